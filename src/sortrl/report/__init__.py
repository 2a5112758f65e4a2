"""The report of one ``sortrl robustify`` run, made from its results alone: html, markdown, png and terminal lines."""

from sortrl.report.page import render
from sortrl.report.text import markdown, summary_lines

__all__ = ["markdown", "render", "summary_lines"]

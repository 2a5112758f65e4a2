"""The report of one ``sortrl robustify`` run, made from its results alone: html, markdown, png and terminal lines."""

from collections.abc import Mapping
from typing import Any

from sortrl.report.continuous import continuous_lines, is_continuous
from sortrl.report.page import render
from sortrl.report.text import markdown
from sortrl.report.text import summary_lines as _summary_lines


def summary_lines(results: Mapping[str, Any]) -> list[str]:
    """The summary for the terminal, of a run with actions of either kind."""
    return continuous_lines(results) if is_continuous(results) else _summary_lines(results)


__all__ = ["markdown", "render", "summary_lines"]

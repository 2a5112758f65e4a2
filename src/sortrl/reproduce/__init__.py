"""The paper's figures and tables, made again: each is one command that continues where it was stopped."""

from __future__ import annotations

from sortrl.reproduce.atari import atari_table
from sortrl.reproduce.atari import table_lines as atari_lines
from sortrl.reproduce.atari_figures import fig2, fig3
from sortrl.reproduce.certificates import certificates
from sortrl.reproduce.compute import compute
from sortrl.reproduce.compute import table_lines as compute_lines
from sortrl.reproduce.figure1 import fig1
from sortrl.reproduce.procgen import procgen_table
from sortrl.reproduce.procgen import table_lines as procgen_lines
from sortrl.reproduce.reliability import reliability
from sortrl.reproduce.reliability import summary as reliability_summary
from sortrl.reproduce.teachers import table_lines as teachers_lines
from sortrl.reproduce.teachers import teachers_table

__all__ = [
    "atari_lines",
    "atari_table",
    "certificates",
    "compute",
    "compute_lines",
    "fig1",
    "fig2",
    "fig3",
    "procgen_lines",
    "procgen_table",
    "reliability",
    "reliability_summary",
    "teachers_lines",
    "teachers_table",
]

"""The paper's figures and tables, made again: each is one command that continues where it was stopped."""

from __future__ import annotations

from sortrl.experiments.atari import atari_table
from sortrl.experiments.atari import table_lines as atari_lines
from sortrl.experiments.atari_figures import fig2, fig3
from sortrl.experiments.campaigns import reliability
from sortrl.experiments.campaigns import summary as reliability_summary
from sortrl.experiments.certificates import certificates
from sortrl.experiments.compute import compute
from sortrl.experiments.compute import table_lines as compute_lines
from sortrl.experiments.figure1 import fig1
from sortrl.experiments.procgen import procgen_table
from sortrl.experiments.procgen import table_lines as procgen_lines
from sortrl.experiments.teachers import table_lines as teachers_lines
from sortrl.experiments.teachers import teachers_table

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

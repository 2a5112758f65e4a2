"""The paper's figures and tables, made again: each is one command that continues where it was stopped."""

from __future__ import annotations

from sortrl.experiments.agents import agents_table
from sortrl.experiments.agents import judgement_line as agents_judgement
from sortrl.experiments.agents import table_lines as agents_lines
from sortrl.experiments.atari import atari_table
from sortrl.experiments.atari import table_lines as atari_lines
from sortrl.experiments.atari_figures import fig2, fig3
from sortrl.experiments.baselines import baselines
from sortrl.experiments.baselines import table_lines as baseline_lines
from sortrl.experiments.certificates import certificates
from sortrl.experiments.compute import compute
from sortrl.experiments.compute import table_lines as compute_lines
from sortrl.experiments.continuous import continuous_table, continuous_table_lines
from sortrl.experiments.figure1 import fig1
from sortrl.experiments.procgen import procgen_table
from sortrl.experiments.procgen import table_lines as procgen_lines
from sortrl.experiments.reliability import reliability
from sortrl.experiments.reliability import summary as reliability_summary
from sortrl.experiments.teachers import table_lines as teachers_lines
from sortrl.experiments.teachers import teachers_table

__all__ = [
    "agents_judgement",
    "agents_lines",
    "agents_table",
    "atari_lines",
    "atari_table",
    "baseline_lines",
    "baselines",
    "certificates",
    "compute",
    "compute_lines",
    "continuous_table",
    "continuous_table_lines",
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

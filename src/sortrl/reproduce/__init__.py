"""The paper's figures and tables, made again: each is one command that continues where it was stopped."""

from __future__ import annotations

from sortrl.reproduce.certificates import certificates
from sortrl.reproduce.figure1 import fig1
from sortrl.reproduce.procgen import procgen_table
from sortrl.reproduce.reliability import reliability
from sortrl.reproduce.reliability import summary as reliability_summary

__all__ = ["certificates", "fig1", "procgen_table", "reliability", "reliability_summary"]

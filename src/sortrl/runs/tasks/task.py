"""What is known to work for one task: its teacher's settings, its student's, and those of its curve in Figure 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sortrl.teachers import PQNConfig, TeacherConfig
from sortrl.teachers.config import Algorithm

MEASURED = ("episodes", "eps_grid", "suite")  # what is measured at the end, however the student was made


@dataclass(frozen=True)
class Task:
    """Settings of one environment."""

    env_id: str
    summary: str
    eps: float = 0.1
    """Perturbation to train for, in the teacher's input units."""
    teachers: Mapping[Algorithm, TeacherConfig] = field(default_factory=dict)
    """How teachers are trained, the usual one first."""
    continued: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``PQNConfig`` that differ when a trained agent goes on."""
    fast: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``RobustifyConfig`` and ``DistillConfig`` that differ from the ``fast`` preset's, for normalising teachers."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Likewise for the ``memory`` preset."""
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    """Likewise for the ``thresholds`` preset, with the fields of ``ThresholdConfig``."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """Likewise for the ``paper`` preset."""
    figure1: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By protocol, where the students of Figure 1 differ from ``fast``; chosen on validation episodes."""
    printed_eps: float | None = None
    """In Figure 1 the recipe as printed is trained for the same eps as ours, or for this one."""

    def settings(self, preset: str) -> dict[str, Any]:
        """What differs from a preset's defaults. What is measured at the end is the same however the student was made."""
        own: Mapping[str, Any] = getattr(self, preset, {})
        shared = {} if preset == "paper" else {name: self.fast[name] for name in MEASURED if name in self.fast}
        return {**shared, **own}

    def going_on(self) -> PQNConfig:
        """Settings to go on with from a trained agent: next to no random actions, which a good agent pays for with its lives, a
        step size that falls to zero, and grades of more episodes, because what is left to gain is less than chance."""
        first = self.teachers.get("pqn")
        settings: dict[str, Any] = {
            "total_steps": 1_500_000,
            "eval_every": 131_072,
            "exploration_fraction": 0.0,
            "exploration_final_eps": 0.001,
            "longest_run": 1,
            "eval_episodes": 30,
        }
        return replace(first if isinstance(first, PQNConfig) else PQNConfig(), **{**settings, **self.continued})

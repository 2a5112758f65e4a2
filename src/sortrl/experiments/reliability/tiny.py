"""The smallest run that has every stage: seconds long, so that it can be killed, damaged and repeated hundreds of times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sortrl.data.collect import CollectConfig
from sortrl.runs.robustify import robustify
from sortrl.teachers import TeacherConfig

ENV, EPS = "CartPole-v1", 0.05
TEACHER = TeacherConfig(
    total_steps=192, eval_every=64, n_envs=2, n_steps=16, batch_size=16, n_epochs=1, eval_episodes=1, hidden=(4,)
)
SETTINGS: dict[str, Any] = {
    "preset": "fast",
    "teacher_config": TEACHER,
    "collect": CollectConfig(states=300, slots=4, exploration=1.0, random_actions=0.5),
    "steps": 30,
    "width": 8,
    "depth": 3,
    "batch": 32,
    "smoothing": 0.0,
    "dagger_rounds": 1,
    "dagger_states": 100,
    "episodes": 1,
    "eps_grid": (0.0, 0.05),
    "suite": ("noise",),
    "suite_episodes": 1,
}


def tiny_run(out: Path, quiet: bool = True) -> None:
    """Train a teacher, distil, evaluate, report: all of ``sortrl robustify``, as small as it gets."""
    robustify(None, ENV, EPS, out=out, quiet=quiet, command="sortrl robustify CartPole-v1 (tiny)", **SETTINGS)

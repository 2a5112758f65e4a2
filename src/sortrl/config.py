"""The table of tasks: what is known to work for each, so that one command needs no further option."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sortrl.collect import CollectConfig
from sortrl.distill import PRESETS, DistillConfig
from sortrl.errors import SortRLError
from sortrl.teachers import TeacherConfig, teacher_preset

Preset = Literal["fast", "paper"]


@dataclass(frozen=True)
class Task:
    """Defaults of one environment."""

    env_id: str
    summary: str
    eps: float = 0.1
    """Perturbation to train for, in the teacher's input units."""
    dagger_rounds: int = 1
    """Rounds in which a provisional student shows which states it reaches."""
    fast: dict[str, Any] = field(default_factory=dict)
    """Settings of the student that differ from the ``fast`` preset's."""


TASKS: dict[str, Task] = {
    task.env_id: task
    for task in (
        Task("CartPole-v1", "balance a pole on a cart; 500 is perfect"),
        Task("Acrobot-v1", "swing a two-link arm above a line; about -70 is very good"),
        Task("MountainCar-v0", "rock a car out of a valley; about -105 is very good"),
        Task("LunarLander-v3", "land softly between two flags; 200 is solved", fast={"lambda_end": 0.3}),
    )
}


@dataclass(frozen=True)
class RobustifyConfig:
    """Everything that determines the result of ``robustify`` besides the teacher and the seed."""

    eps: float
    preset: Preset
    teacher_config: TeacherConfig | None
    collect: CollectConfig
    distill: DistillConfig
    dagger_rounds: int
    """Provisional students, each trained for a third of the steps, whose states the teacher labels for the next."""
    dagger_states: int
    """States per round."""
    noise: float
    """Students and teacher act on observations with uniform noise of up to this size while states are collected, so
    that the data hold what a disturbed agent meets."""
    episodes: int
    """Test episodes per point."""
    eps_grid: tuple[float, ...]
    """Where the return under attack is measured."""
    attack: str = "pgd-10"


def robustify_config(
    env_id: str, eps: float | None = None, preset: Preset = "fast", train_teacher: bool = True, **changes: Any
) -> RobustifyConfig:
    """The defaults for a task; ``changes`` replace fields of the result or of its ``distill`` part.

    >>> robustify_config("CartPole-v1", eps=0.2, steps=10).distill.steps
    10
    """
    task = TASKS.get(env_id, Task(env_id, ""))
    eps = task.eps if eps is None else eps
    if preset == "fast":
        distill = replace(PRESETS[preset], eps=eps, **task.fast)
        collect, rounds = CollectConfig(states=50_000), task.dagger_rounds
    elif preset == "paper":  # the teacher's own states, no DAgger
        distill = replace(PRESETS[preset], eps=eps)
        collect, rounds = CollectConfig(states=50_000, exploration=0.0), 0
    else:
        raise SortRLError(f"Unknown preset {preset!r}; choose fast or paper.")
    noise = changes.pop("noise", None)
    noise = (eps if preset == "fast" else 0.0) if noise is None else noise
    config = RobustifyConfig(
        eps=eps,
        preset=preset,
        teacher_config=teacher_preset(env_id) if train_teacher else None,
        collect=collect,
        distill=distill,
        dagger_rounds=rounds,
        dagger_states=20_000,
        noise=noise,
        episodes=30,
        eps_grid=tuple(round(share * eps, 6) for share in (0.0, 0.5, 1.0, 1.5, 2.0)),
    )
    return _with_changes(config, changes)


def _with_changes(config: RobustifyConfig, changes: dict[str, Any]) -> RobustifyConfig:
    for name, value in changes.items():
        if value is None:
            continue
        if name in RobustifyConfig.__dataclass_fields__:
            config = replace(config, **{name: value})
        elif name in DistillConfig.__dataclass_fields__:
            config = replace(config, distill=replace(config.distill, **{name: value}))
        else:
            known = [*RobustifyConfig.__dataclass_fields__, *DistillConfig.__dataclass_fields__]
            close = difflib.get_close_matches(name, known, n=1)
            raise SortRLError(f"robustify has no option {name!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
    return config

"""The table of tasks, one file per family: what is known to work for each, so that one command needs no further option.

A task that is not in it gets general settings, and the preset ``auto`` takes none from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from sortrl.runs.tasks import atari, classic, minatar, procgen
from sortrl.runs.tasks.task import Task
from sortrl.teachers import PQNConfig, TeacherConfig
from sortrl.teachers.config import Algorithm

__all__ = ["TASKS", "Task", "continued", "teacher_preset"]

TASKS: dict[str, Task] = {task.env_id: task for task in (*classic.TASKS, *minatar.TASKS, *procgen.TASKS, *atari.TASKS)}
_GENERAL: dict[Algorithm, TeacherConfig] = {
    "ppo": TeacherConfig(),
    "dqn": TeacherConfig(algorithm="dqn", n_envs=1),
    "pqn": PQNConfig(),
}


def teacher_preset(env_id: str, algorithm: Algorithm | None = None) -> TeacherConfig:
    """How a teacher of the task is trained; general settings where none are known. Without an algorithm, its usual one.

    >>> teacher_preset("Acrobot-v1").target_return, teacher_preset("sortrl/Pong84-v0").algorithm
    (-77.0, 'pqn')
    """
    own: Mapping[Algorithm, TeacherConfig] = TASKS[env_id].teachers if env_id in TASKS else {}
    usual: Algorithm = next(iter(own), "ppo")
    chosen = usual if algorithm is None else algorithm
    return own.get(chosen, _GENERAL[chosen])


def continued(env_id: str) -> PQNConfig:
    """Settings to go on with from a trained agent of the task (:meth:`Task.going_on`).

    >>> continued("sortrl/Pong84-v0").exploration_fraction
    0.0
    """
    return TASKS.get(env_id, Task(env_id, "")).going_on()

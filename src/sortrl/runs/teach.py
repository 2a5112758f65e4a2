"""Train a teacher with what is known to work for its task."""

from __future__ import annotations

from pathlib import Path

from sortrl import teachers
from sortrl.core.progress import Progress
from sortrl.runs.tasks import continued, teacher_preset
from sortrl.teachers import Teacher, TeacherConfig


def train_teacher(
    env_id: str,
    config: TeacherConfig | None = None,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    processes: int = 1,
    start: Teacher | None = None,
) -> Teacher:
    """:func:`sortrl.teachers.train_teacher`; without a configuration, with the settings of the task in
    :mod:`sortrl.runs.tasks`: those of its teacher or, given an agent to ``start`` from, those to go on with."""
    config = config or (teacher_preset(env_id) if start is None else continued(env_id))
    return teachers.train_teacher(env_id, config, out_dir, seed, progress, processes, start)

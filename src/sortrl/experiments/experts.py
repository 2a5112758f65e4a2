"""The agents that figures and tables start from: published ones, or ours trained in the same way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from sortrl.core.errors import SortRLError
from sortrl.core.files import locked
from sortrl.runs.tasks import teacher_preset
from sortrl.teachers import Teacher, load_teacher, train_teacher

# Published agent and its statistics; None: the agent takes raw observations.
ZOO: dict[str, tuple[str, str | None]] = {
    "CartPole-v1": ("ppo-CartPole-v1.zip", None),
    "Acrobot-v1": ("ppo-Acrobot-v1.zip", "ppo-Acrobot-v1-vecnormalize.pkl"),
    "MountainCar-v0": ("ppo-MountainCar-v0.zip", "ppo-MountainCar-v0-vecnormalize.pkl"),
    "LunarLander-v3": ("ppo-LunarLander-v2.zip", None),
}


def find_teachers(folder: Path | None) -> Path | None:
    """The folder of the published agents of classic control."""
    return find_folder(folder, "sb3", ZOO["CartPole-v1"][0])


def find_folder(folder: Path | None, inner: str, file: str) -> Path | None:
    """Where ``file`` is: in the folder given, or named by SORTRL_TEACHERS, or in ``inner`` there. None if none is named."""
    chosen = folder or (Path(os.environ["SORTRL_TEACHERS"]) if "SORTRL_TEACHERS" in os.environ else None)
    if chosen is None:
        return None
    for candidate in (chosen, chosen / inner):
        if (candidate / file).exists():
            return candidate
    raise SortRLError(f"{chosen} does not hold the published agents (no {file}). Name their folder.")


def expert(protocol: str, task: str, work: Path, published: Path | None) -> Teacher:
    """The expert of a protocol: published, or trained by us in the same way where the files are absent."""
    archive, statistics = ZOO[task]
    if protocol == "paper" and published is not None:
        vecnormalize = None if statistics is None else published / statistics
        return load_teacher(published / archive, task, vecnormalize=vecnormalize, allow_pickle=True)
    normalise = protocol == "normalised" or statistics is not None
    config = replace(teacher_preset(task), normalize_obs=normalise)
    folder = work / "teachers" / f"{task}-{'normalised' if normalise else 'raw'}"
    with locked(folder, wait=True):  # of several units that need it, the first to come trains it
        return train_teacher(task, config, folder)


def published(task: str) -> Teacher | None:
    """The published agent of a task, from the folder that SORTRL_TEACHERS names; None if there is none of this task."""
    folder = find_teachers(None)
    if folder is None:
        raise SortRLError("Name the folder of the published agents by SORTRL_TEACHERS.")
    return expert("paper", task, folder, folder) if task in ZOO else None

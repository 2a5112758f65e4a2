"""One door for every kind of trained agent."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.envs import EnvInfo, describe, env_id_of
from sortrl.nets.architecture import Merge
from sortrl.teachers.load import impala, sb3
from sortrl.teachers.load.vecnormalize import from_vecnormalize, load_normalizer
from sortrl.teachers.teacher import FILE_NAME, CallableBody, Teacher

Source = str | Path | nn.Module | Callable[..., Any] | Any


def load_teacher(
    source: Source,
    env_id: Any = None,
    normalizer: Normalizer | None = None,
    vecnormalize: Any = None,
    allow_pickle: bool = False,
    merge: Merge = "sum",
) -> Teacher:
    """Turn a trained agent into a :class:`Teacher`.

    ``source`` is one of

    - a path: a Stable-Baselines3 zip (PPO, A2C, TRPO, DQN, QR-DQN, ARS; never unpickled), an IMPALA checkpoint as published for
      ProcGen (``.pt``; only its tensors are read), or what ``Teacher.save`` wrote;
    - a Stable-Baselines3 model; the statistics of its ``VecNormalize`` are taken along;
    - a torch module that maps normalised observations to scores (it is copied, then frozen);
    - any callable that maps a numpy batch of raw observations to actions or scores. It has no gradient.

    ``env_id`` (an id, or whatever else ``robustify`` takes as env) is needed for modules and callables, which do not tell their
    shapes; otherwise it is checked against the agent, and in an actor-critic over more actions than the task has, equivalent ones
    become one. With ``merge="sum"`` their probabilities add up: its sampled play stays the same. With "max" its greedy play does.
    ``normalizer`` (or ``vecnormalize``: a VecNormalize, or the path of its file) is the normalisation the agent was trained behind.
    A pickled file is opened only with ``allow_pickle``.

    >>> teacher = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), env_id="CartPole-v1")
    >>> teacher.predict(np.array([0.0, 0.0, 0.1, 0.0]))[0]
    array(1)
    """
    info = describe(env_id_of(env_id)) if env_id is not None else None
    known = _given_normalizer(normalizer, vecnormalize, allow_pickle)
    if isinstance(source, Teacher):
        teacher = source if known is None else _with_normalizer(source, known)
    elif isinstance(source, (str, Path)):
        teacher = _from_path(Path(source), known)
    elif hasattr(source, "policy") and hasattr(source, "get_vec_normalize_env"):
        live = source.get_vec_normalize_env()
        if known is None and live is not None and live.norm_obs:
            known = from_vecnormalize(live)
        agent = sb3.read_model(source)
        teacher = _from_agent(agent, known, agent.algorithm)
    elif isinstance(source, nn.Module):
        teacher = _from_module(copy.deepcopy(source), _needed(info, "a torch module"), known)
    elif callable(source):
        needed = _needed(info, "a callable")
        unit = _shaped(known or _default_normalizer(needed), needed.obs_shape)
        name = getattr(source, "__name__", type(source).__name__)
        body = CallableBody(source, unit, needed.n_actions)
        teacher = Teacher(body, unit, needed.n_actions, name, "callable")
        _probe(teacher, needed)
    else:
        raise SortRLError(
            f"Cannot make a teacher of {type(source).__name__}; expected the path of a Stable-Baselines3 zip or of a "
            "saved teacher, a Stable-Baselines3 model, a torch module or a callable."
        )
    if info is not None:
        teacher = _merged(teacher, info, merge)
        check_fit(teacher, info)
    return teacher


def _merged(teacher: Teacher, info: EnvInfo, merge: Merge) -> Teacher:
    """An actor-critic over a task's original actions, made one over the actions of the task, which merges equivalent ones."""
    groups, architecture = info.action_groups, teacher.architecture
    if groups is None or architecture is None or not teacher.is_stochastic:
        return teacher
    if teacher.n_actions != len(info.merged_action) or architecture.action_groups:
        return teacher
    merged = replace(architecture, n_actions=len(groups), action_groups=groups, merge=merge)
    body = merged.build()
    body.load_state_dict(teacher.body.state_dict())  # merging has no parameters
    return Teacher(body, teacher.normalizer, len(groups), teacher.name, teacher.algorithm, merged)


def _given_normalizer(normalizer: Normalizer | None, vecnormalize: Any, allow_pickle: bool) -> Normalizer | None:
    if normalizer is not None and vecnormalize is not None:
        raise SortRLError("Both normalizer and vecnormalize were given; they say the same thing. Give one.")
    if isinstance(vecnormalize, (str, Path)):
        return load_normalizer(vecnormalize, allow_pickle)
    return normalizer if vecnormalize is None else from_vecnormalize(vecnormalize)


def _from_path(path: Path, normalizer: Normalizer | None) -> Teacher:
    if not path.exists() and path.with_name(f"{path.name}.zip").exists():
        path = path.with_name(f"{path.name}.zip")  # as Stable-Baselines3 names what it saves
    if path.is_dir() and not (path / FILE_NAME).exists():
        raise SortRLError(
            f"{path} holds no {FILE_NAME}. Give the path of a Stable-Baselines3 zip or of a saved teacher."
        )
    if not path.exists():
        raise SortRLError(
            f"No teacher at {path}: no such file. Give the path of a Stable-Baselines3 zip or a saved teacher."
        )
    if path.is_dir() or path.suffix == ".safetensors":
        teacher = Teacher.load(path)
        return teacher if normalizer is None else _with_normalizer(teacher, normalizer)
    if path.suffix in (".pt", ".pth"):
        return _from_agent(impala.read_checkpoint(path), normalizer, path.stem)
    agent = sb3.read_zip(path)
    if agent.facts.vecnormalized and normalizer is None:
        warnings.warn(
            f"{path.name} was trained behind VecNormalize, but no statistics were given: it will see observations it "
            "does not know. Pass its vecnormalize file (--vecnormalize).",
            stacklevel=3,
        )
    return _from_agent(agent, normalizer, path.stem)


def _from_agent(agent: sb3.Agent, normalizer: Normalizer | None, name: str) -> Teacher:
    architecture = agent.architecture
    if normalizer is None:
        make = Normalizer.from_pixels if agent.facts.pixels else Normalizer.identity
        normalizer = make(architecture.obs_shape)
    body = architecture.build()
    with torch.no_grad():
        for parameter, stored in zip(body.parameters(), agent.parameters, strict=True):
            parameter.copy_(stored)
    teacher = Teacher(body, _shaped(normalizer, architecture.obs_shape), architecture.n_actions, name)
    teacher.algorithm, teacher.architecture = agent.algorithm, architecture
    return teacher


def _from_module(module: nn.Module, info: EnvInfo, normalizer: Normalizer | None) -> Teacher:
    unit = _shaped(normalizer or _default_normalizer(info), info.obs_shape)
    teacher = Teacher(module, unit, info.n_actions, type(module).__name__, "module")
    _probe(teacher, info)
    return teacher


def _with_normalizer(teacher: Teacher, normalizer: Normalizer) -> Teacher:
    changed = copy.deepcopy(teacher)
    changed.normalizer = _shaped(normalizer, teacher.obs_shape)
    if isinstance(changed.body, CallableBody):
        changed.body = CallableBody(changed.body.function, changed.normalizer, teacher.n_actions)
    return changed


def _shaped(normalizer: Normalizer, obs_shape: tuple[int, ...]) -> Normalizer:
    if normalizer.obs_shape != obs_shape:
        raise SortRLError(
            f"The normalisation is for observations of shape {normalizer.obs_shape}, but the agent sees {obs_shape}. "
            "Give the statistics saved with this agent."
        )
    return normalizer


def _default_normalizer(info: EnvInfo) -> Normalizer:
    return Normalizer.from_pixels(info.obs_shape) if info.is_image else Normalizer.identity(info.obs_shape)


def _needed(info: EnvInfo | None, what: str) -> EnvInfo:
    if info is None:
        raise SortRLError(f"A teacher made of {what} does not tell its shapes: pass env_id, for example 'CartPole-v1'.")
    return info


def _probe(teacher: Teacher, info: EnvInfo) -> None:
    """Ask for two decisions, so that a wrong module fails here and not in the middle of a run."""
    raw = np.clip(np.zeros((2, *info.obs_shape)), info.valid_low, info.valid_high)
    try:
        with torch.no_grad():
            scores: Any = teacher.scores(teacher.normalize(raw))
    except SortRLError:
        raise
    except Exception as error:
        raise SortRLError(f"{teacher.name} failed on a batch of observations {raw.shape}: {error}") from error
    if not isinstance(scores, Tensor) or tuple(scores.shape) != (2, info.n_actions):
        found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise SortRLError(f"{teacher.name} returned {found} for 2 observations; expected scores (2, {info.n_actions}).")


def check_fit(teacher: Teacher, info: EnvInfo) -> None:
    """Refuse a teacher whose shapes are not those of the task."""
    if teacher.obs_shape != info.obs_shape or teacher.n_actions != info.n_actions:
        raise SortRLError(
            f"{teacher.name} sees observations {teacher.obs_shape} and has {teacher.n_actions} actions, but "
            f"{info.env_id} has {info.obs_shape} and {info.n_actions} actions. {_frames(teacher, info)}"
        )


def _frames(teacher: Teacher, info: EnvInfo) -> str:
    """What to do about shapes that differ: the same times a small number are those of stacked frames."""
    seen, one = teacher.obs_shape, info.obs_shape
    frames = seen[0] // one[0] if seen and one else 0
    if frames > 1 and seen == (frames * one[0], *one[1:]) and teacher.n_actions == info.n_actions:
        return f"If it was trained behind VecFrameStack({frames}), name the environment frames-{frames}/{info.env_id}."
    return "Is this the agent of another task?"

"""The agent with continuous actions that a student learns from, frozen, with its observation normalisation inside."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer, as_array, stored_normalizer
from sortrl.envs import ActionBox, EnvInfo, describe, env_id_of
from sortrl.nets.architecture import Architecture
from sortrl.teachers.load.actors import ContinuousAgent, convert_actor
from sortrl.teachers.load.sb3 import model_parts, read_parts
from sortrl.teachers.load.vecnormalize import from_vecnormalize, load_normalizer
from sortrl.teachers.teacher import FILE_NAME, Teacher

FORMAT = "sortrl-continuous-teacher-1"


class ContinuousTeacher(nn.Module):
    """A frozen agent whose actions are vectors of numbers.

    ``body`` maps unit-space observations to numbers (batch, numbers), which are ``squashed`` to the action's range by tanh, as SAC
    does, or clipped to it, as PPO does.

    >>> box = describe("Pendulum-v1", continuous=True).action_box
    >>> architecture = Architecture(obs_shape=(3,), n_actions=1, hidden=(8,), activation="Tanh")
    >>> teacher = ContinuousTeacher(architecture.build(), Normalizer.identity((3,)), box, architecture=architecture)
    >>> teacher.predict(np.zeros(3))[0].shape, teacher.predict(np.zeros((5, 3)))[0].shape
    ((1,), (5, 1))
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        body: nn.Module,
        normalizer: Normalizer,
        box: ActionBox,
        name: str = "teacher",
        algorithm: str = "module",
        squashed: bool = False,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        self.body, self.normalizer, self.box = body, normalizer, box
        self.obs_shape, self.numbers = normalizer.obs_shape, len(box)
        self.name, self.algorithm, self.squashed, self.architecture = name, algorithm, squashed, architecture
        self.register_buffer("low", torch.from_numpy(box.low.copy()), persistent=False)
        self.register_buffer("high", torch.from_numpy(box.high.copy()), persistent=False)
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> ContinuousTeacher:
        """A teacher never leaves evaluation mode."""
        super().train(False)
        return self

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, float32."""
        unit: Tensor = self.normalizer(obs)
        return unit

    def unclipped(self, unit: Tensor) -> Tensor:
        """Actions (batch, numbers) before they are clipped, differentiable."""
        numbers: Tensor = self.body(unit)
        if self.squashed:
            return self.low + 0.5 * (torch.tanh(numbers).double() + 1.0) * (self.high - self.low)
        return numbers.double()

    def actions(self, unit: Tensor) -> Tensor:
        """What is played (batch, numbers), float32, in the action's own units."""
        return torch.minimum(torch.maximum(self.unclipped(unit), self.low), self.high).float()

    @torch.no_grad()
    def predict(
        self, obs: npt.ArrayLike, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[npt.NDArray[np.float32], Any]:
        """Actions for raw observations, one or a batch, by the contract of Stable-Baselines3; always the mean."""
        observations = as_array(obs, self.obs_shape)
        single = observations.shape == self.obs_shape
        actions = self.actions(self.normalize(observations[None] if single else observations)).numpy()
        return (actions[0] if single else actions), state

    def save(self, directory: str | Path) -> None:
        """Write ``teacher.safetensors`` into ``directory``: tensors and a JSON description, no pickle."""
        if self.architecture is None:
            raise SortRLError(f"{self.name} cannot be saved: its network was not built by sortrl. Keep your own file.")
        clip = self.normalizer.clip
        metadata = {"format": FORMAT, "name": self.name, "algorithm": self.algorithm, "squashed": self.squashed}
        metadata |= {"architecture": self.architecture.to_json(), "clip": clip if np.isfinite(clip) else None}
        write_tensors(Path(directory) / FILE_NAME, self.state_dict(), metadata)


def load_continuous(
    source: Any, env_id: Any, normalizer: Normalizer | None = None, vecnormalize: Any = None, allow_pickle: bool = False
) -> ContinuousTeacher:
    """Turn a trained agent into a :class:`ContinuousTeacher` for the task ``env_id``.

    ``source`` is the path of a Stable-Baselines3 zip (PPO, A2C, TRPO, SAC, TD3, DDPG; never unpickled) or of what ``save`` wrote, a
    Stable-Baselines3 model, a torch module (normalised observations -> actions) or a callable (raw observations -> actions), which
    has no gradient.

    >>> teacher = load_continuous(lambda obs: -obs[:, 2:], "Pendulum-v1")
    >>> teacher.predict(np.array([1.0, 0.0, 0.5]))[0]
    array([-0.5], dtype=float32)
    """
    info = describe(env_id_of(env_id), continuous=True)
    assert info.action_box is not None
    known = normalizer
    if isinstance(vecnormalize, (str, Path)):
        known = load_normalizer(vecnormalize, allow_pickle)
    elif vecnormalize is not None:
        known = from_vecnormalize(vecnormalize)
    if isinstance(source, ContinuousTeacher):
        if known is not None:
            raise SortRLError(f"{source.name} has its normalisation inside; leave out normalizer and vecnormalize.")
        teacher = source
    elif isinstance(source, Teacher):
        raise SortRLError(
            f"{source.name} has {source.n_actions} discrete actions, but {info.env_id} has continuous actions."
        )
    elif isinstance(source, (str, Path)):
        teacher = _from_path(Path(source), info, info.action_box, known)
    elif hasattr(source, "policy") and hasattr(source, "get_vec_normalize_env"):
        live = source.get_vec_normalize_env()
        if known is None and live is not None and live.norm_obs:
            known = from_vecnormalize(live)
        name = type(source).__name__
        agent = convert_actor(*model_parts(source), len(info.action_box), name)
        teacher = _from_agent(agent, info.action_box, known, agent.algorithm)
    elif callable(source):
        is_module = isinstance(source, nn.Module)
        unit = known or Normalizer.identity(info.obs_shape)
        body = copy.deepcopy(source) if isinstance(source, nn.Module) else _Function(source, unit)
        name = type(source).__name__ if is_module else getattr(source, "__name__", type(source).__name__)
        teacher = ContinuousTeacher(body, unit, info.action_box, name, "module" if is_module else "callable")
    else:
        raise SortRLError(
            f"Cannot make a teacher of {type(source).__name__}; expected the path of a Stable-Baselines3 zip or of a saved teacher, a "
            "Stable-Baselines3 model, a torch module or a callable."
        )
    _check(teacher, info)
    return teacher


def _from_path(path: Path, info: EnvInfo, box: ActionBox, normalizer: Normalizer | None) -> ContinuousTeacher:
    if not path.exists() and path.with_name(f"{path.name}.zip").exists():
        path = path.with_name(f"{path.name}.zip")  # as Stable-Baselines3 names what it saves
    if not path.exists():
        raise SortRLError(f"No teacher at {path}: no such file. Give the path of a Stable-Baselines3 zip.")
    if path.is_dir() or path.suffix == ".safetensors":
        return _loaded(path / FILE_NAME if path.is_dir() else path, box, normalizer)
    state, facts = read_parts(path)
    agent = convert_actor(state, facts, len(box), str(path))
    if agent.vecnormalized and normalizer is None:
        warnings.warn(
            f"{path.name} was trained behind VecNormalize, but no statistics were given: it will see observations it does not know. "
            "Pass its vecnormalize file (--vecnormalize).",
            stacklevel=3,
        )
    return _from_agent(agent, box, normalizer, path.stem)


def _from_agent(agent: ContinuousAgent, box: ActionBox, normalizer: Normalizer | None, name: str) -> ContinuousTeacher:
    body = agent.architecture.build()
    with torch.no_grad():
        for parameter, stored in zip(body.parameters(), agent.parameters, strict=True):
            parameter.copy_(stored)
    unit = normalizer or Normalizer.identity(agent.architecture.obs_shape)
    return ContinuousTeacher(body, unit, box, name, agent.algorithm, agent.squashed, agent.architecture)


def _loaded(path: Path, box: ActionBox, normalizer: Normalizer | None) -> ContinuousTeacher:
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise SortRLError(f"{path} is no teacher with continuous actions (format {metadata.get('format')!r}).")
    architecture = Architecture.from_json(metadata.get("architecture"))
    body = {name.removeprefix("body."): tensor for name, tensor in tensors.items() if name.startswith("body.")}
    unit = normalizer or stored_normalizer(tensors, metadata, "normalizer.", path)
    return ContinuousTeacher(
        architecture.build_with(body, str(path)),
        unit,
        box,
        str(metadata.get("name")),
        str(metadata.get("algorithm")),
        metadata.get("squashed") is True,
        architecture,
    )


def _check(teacher: ContinuousTeacher, info: EnvInfo) -> None:
    """Ask for two actions, so that a wrong agent fails here and not in the middle of a run."""
    if teacher.obs_shape != info.obs_shape or len(info.obs_shape) != 1:
        raise SortRLError(
            f"{teacher.name} sees observations {teacher.obs_shape}, and {info.env_id} shows {info.obs_shape}; expected the same, and "
            "vectors. Is this the agent of another task?"
        )
    raw = np.clip(np.zeros((2, *info.obs_shape)), info.valid_low, info.valid_high)
    try:
        with torch.no_grad():
            found: Any = teacher.body(teacher.normalize(raw))
    except SortRLError:
        raise
    except Exception as error:
        raise SortRLError(f"{teacher.name} failed on a batch of observations {raw.shape}: {error}") from error
    if not isinstance(found, Tensor) or tuple(found.shape) != (2, teacher.numbers):
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SortRLError(
            f"{teacher.name} returned {shape} for 2 observations; expected actions (2, {teacher.numbers})."
        )


class _Function(nn.Module):
    """A black box as a network: numpy batch of raw observations (float32) -> actions (batch, numbers)."""

    def __init__(self, function: Callable[..., Any], normalizer: Normalizer) -> None:
        super().__init__()
        self.function = function
        self._normalizer = [normalizer]  # in a list, so that it is not a submodule

    def forward(self, unit: Tensor) -> Tensor:
        if unit.requires_grad and torch.is_grad_enabled():
            raise SortRLError(
                "This teacher is a plain callable, so it has no gradient. Use the attack noise, or give the agent as a torch module "
                "or a Stable-Baselines3 zip."
            )
        answer = self.function(self._normalizer[0].to_raw(unit).float().cpu().numpy())
        result = np.asarray(answer[0] if isinstance(answer, tuple) else answer, np.float32)
        return torch.from_numpy(result)

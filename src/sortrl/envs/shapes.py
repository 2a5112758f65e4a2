"""Environments as users have them, shown as the rest of the package expects them: one array of numbers in, one number out.

Dict observations are flattened, images get their channels first, frames are stacked and joint actions are counted through. Each
does what Stable-Baselines3 does, so that an agent trained by it sees what it knows.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from sortrl.core.errors import SortRLError

MOST_JOINT_ACTIONS = 64
STACKED = re.compile(r"frames-([1-9]\d?)/(.+)")
"""``frames-4/CartPole-v1``: the last four observations, as behind ``VecFrameStack(4)``."""

Wrapped = gym.Env[Any, Any]


def shaped(env: Wrapped, frames: int = 1) -> Wrapped:
    """The environment behind whatever wrappers it needs."""
    if isinstance(env.observation_space, spaces.Dict) and _boxes(env.observation_space):
        env = FlatDict(env)
    if channels_last(env.observation_space):
        env = ChannelsFirst(env)
    if frames > 1:
        env = Frames(env, frames)
    if isinstance(env.action_space, spaces.MultiDiscrete) and env.action_space.nvec.ndim == 1:
        env = JointActions(env)
    return env


def channels_last(space: spaces.Space[Any]) -> bool:
    """Whether these are bytes of images, height x width x channels."""
    shape = space.shape or ()
    return space.dtype == np.uint8 and len(shape) == 3 and shape[2] < min(shape[:2])


class FlatDict(gym.ObservationWrapper[Any, Any, Any]):
    """A Dict of boxes as one vector, its parts in the order of their names."""

    def __init__(self, env: Wrapped) -> None:
        super().__init__(env)
        parts = env.observation_space.spaces  # type: ignore[attr-defined]
        self._order = sorted(parts)
        if list(parts) != self._order:  # an agent would see another order than whoever flattens without the space
            raise SortRLError(
                f"Dict observations have their parts in the order {', '.join(parts)}, expected {', '.join(self._order)}: make the "
                "Dict of a plain dict, of which Gymnasium sorts the names."
            )
        low, high = ([getattr(parts[name], bound).ravel() for name in self._order] for bound in ("low", "high"))
        self.observation_space = spaces.Box(_joined(low), _joined(high), dtype=np.float32)
        self.obs_names = tuple(
            f"{name}[{', '.join(map(str, index))}]" if parts[name].shape else name
            for name in self._order
            for index in np.ndindex(parts[name].shape)
        )

    def observation(self, observation: Any) -> npt.NDArray[np.float32]:
        return _joined([np.asarray(observation[name]).ravel() for name in self._order])


class ChannelsFirst(gym.ObservationWrapper[Any, Any, Any]):
    """Images as channels x height x width, as ``VecTransposeImage`` shows them."""

    def __init__(self, env: Wrapped) -> None:
        super().__init__(env)
        space = env.observation_space
        low, high = (np.moveaxis(getattr(space, bound), 2, 0) for bound in ("low", "high"))
        self.observation_space = spaces.Box(low, high, dtype=np.uint8)

    def observation(self, observation: Any) -> npt.NDArray[np.uint8]:
        moved: npt.NDArray[np.uint8] = np.moveaxis(observation, 2, 0)
        return moved


class Frames(gym.ObservationWrapper[Any, Any, Any]):
    """The last ``n`` observations along the first axis, the newest last; zeros before the first, as ``VecFrameStack`` has it."""

    def __init__(self, env: Wrapped, n: int) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) not in (1, 3):
            raise SortRLError(f"frames-{n}: observations {space} cannot be stacked; expected vectors or images.")
        self._frames: deque[npt.NDArray[Any]] = deque(maxlen=n)
        low, high = (np.concatenate([getattr(space, bound)] * n) for bound in ("low", "high"))
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        nothing = np.zeros(self.env.observation_space.shape or (), self.observation_space.dtype)
        self._frames.extend([nothing] * (self._frames.maxlen or 1))
        return super().reset(seed=seed, options=options)

    def observation(self, observation: Any) -> npt.NDArray[Any]:
        self._frames.append(np.asarray(observation))
        return np.concatenate(self._frames)


class JointActions(gym.ActionWrapper[Any, Any, Any]):
    """MultiDiscrete actions counted through: one number for every combination, the last part fastest (``np.unravel_index``)."""

    def __init__(self, env: Wrapped) -> None:
        super().__init__(env)
        space = env.action_space
        self.parts = tuple(int(n) for n in space.nvec)  # type: ignore[attr-defined]
        n = math.prod(self.parts)
        if n > MOST_JOINT_ACTIONS or np.any(space.start != 0):  # type: ignore[attr-defined]
            raise SortRLError(
                f"Actions {space} have {n} combinations, counted from {space.start.tolist()}; expected at most "  # type: ignore[attr-defined]
                f"{MOST_JOINT_ACTIONS}, counted from 0. Wrap the environment with fewer."
            )
        self.action_space = spaces.Discrete(n)
        self.action_names = tuple(str(parts) for parts in itertools.product(*map(range, self.parts)))

    def action(self, action: Any) -> npt.NDArray[np.int64]:
        return np.array(np.unravel_index(int(action), self.parts))


def _boxes(space: spaces.Dict) -> bool:
    """Whether all parts are vectors or single numbers; images among them would need a network of their own."""
    return all(isinstance(part, spaces.Box) and len(part.shape) <= 2 for part in space.spaces.values())


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    joined: npt.NDArray[np.float32] = np.concatenate(parts).astype(np.float32)
    return joined

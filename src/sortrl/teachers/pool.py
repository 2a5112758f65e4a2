"""What Stable-Baselines3 needs to be trained on images: many games at once, and a CNN of any size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from sortrl.envs.procgen import TRAIN_LEVELS, ProcgenEnv, make_pool
from sortrl.nets.architecture import Architecture


class PoolVecEnv(VecEnv):
    """``n`` games of one kind over one set of levels, which the pool draws from the seed.

    The time limit counts as an end like any other, as in ProcGen itself: were the value of going on put in its place,
    an agent that waits would learn that waiting is safe.
    """

    def __init__(self, env: ProcgenEnv, n: int) -> None:
        self._env = env
        self._pool: Any = None
        # The action that stands for each group of equivalent ones.
        self._original = np.array([group[0] for group in env.action_groups])
        super().__init__(n, env.observation_space, env.action_space)

    def reset(self) -> npt.NDArray[np.uint8]:
        """Begin new episodes; after :meth:`seed`, with levels that depend on that seed alone."""
        if self._pool is None or self._seeds[0] is not None:
            self.close()
            n_levels = TRAIN_LEVELS if self._env.levels == "train" else 0
            self._pool = make_pool(self._env.game, self.num_envs, self._seeds[0] or 0, 0, n_levels)
        self._reset_seeds()
        obs: npt.NDArray[np.uint8] = self._pool.reset()[0]
        return obs

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._pool.send(self._original[actions])

    def step_wait(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.bool_], list[Any]]:
        obs, rewards, terminated, truncated, _ = self._pool.recv()
        done = terminated | truncated
        if done.any():
            obs = obs.copy()
            obs[done] = self._pool.reset(np.flatnonzero(done))[0]
        return obs, rewards, done, [{} for _ in range(self.num_envs)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._env, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"The games of a pool have no attribute {attr_name!r} that can be set.")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise AttributeError(f"The games of a pool have no method {method_name!r} of their own.")

    def env_is_wrapped(self, wrapper_class: Any, indices: Iterable[int] | int | None = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


class Convolutions(BaseFeaturesExtractor):
    """Stable-Baselines3's NatureCNN, with the number of channels left open; its parts have the same names."""

    def __init__(self, observation_space: Any, features_dim: int, channels: tuple[int, ...]) -> None:
        super().__init__(observation_space, features_dim)
        trunk = Architecture(observation_space.shape, 1, (), "ReLU", "nature_cnn", features_dim, channels=channels)
        *convolutions, linear, activation, _ = trunk.build()
        self.cnn, self.linear = nn.Sequential(*convolutions), nn.Sequential(linear, activation)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.linear(self.cnn(images))
        return features

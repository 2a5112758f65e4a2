"""One episode that can be branched: what would have happened had another action been played?"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils import EzPickle

from sortrl.core.errors import SortRLError
from sortrl.envs.info import make_env


class Simulator:
    """A seeded episode of a deterministic environment with :meth:`fork`.

    Environments in plain Python are copied; those whose state lives in C++ (Box2D) are played again from the seed, which
    gives the same states as long as the environment draws no random numbers but from its seed.

    >>> here = Simulator("CartPole-v1", seed=3)
    >>> there = here.fork()
    >>> _ = here.step(0), there.step(1)
    >>> bool(here.obs[1] < there.obs[1]), here.length
    (True, 1)
    """

    def __init__(self, env_id: str, seed: int) -> None:
        self.env_id, self.seed = env_id, seed
        self.actions: tuple[int, ...] = ()
        self.total = 0.0
        self.done = False
        self._env: gym.Env[Any, Any] = make_env(env_id)
        self.obs: npt.NDArray[Any] = np.asarray(self._env.reset(seed=seed)[0])

    @property
    def length(self) -> int:
        return len(self.actions)

    def step(self, action: int) -> tuple[npt.NDArray[Any], float, bool]:
        """Play one action; returns the raw observation, the reward and whether the episode is over."""
        if self.done:
            raise SortRLError(f"Simulator: this episode of {self.env_id} is over after {self.length} steps.")
        obs, reward, terminated, truncated, _ = self._env.step(int(action))
        self.obs = np.asarray(obs)
        self.total += float(reward)
        self.actions = (*self.actions, int(action))
        self.done = bool(terminated or truncated)
        return self.obs, float(reward), self.done

    def fork(self) -> Simulator:
        """An independent continuation of the same episode."""
        if isinstance(self._env.unwrapped, EzPickle):  # copies of these start anew: their state is not Python's
            return self._replayed()
        twin = copy.copy(self)
        twin.obs, twin._env = self.obs.copy(), copy.deepcopy(self._env)
        return twin

    def _replayed(self) -> Simulator:
        twin = Simulator(self.env_id, self.seed)
        for action in self.actions:
            twin.step(action)
        if not np.array_equal(twin.obs, self.obs) or twin.total != self.total:
            raise SortRLError(f"{self.env_id} does not repeat itself from one seed: its episodes cannot be branched.")
        return twin

    def close(self) -> None:
        self._env.close()

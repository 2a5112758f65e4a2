"""A task as a user brings one: a robot on the floor of a hall finds its way around a pillar. Importing this module registers it.

Its sensors have different units and spreads on purpose: metres, and the battery in per cent.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

ENV_ID = "Navigation-v0"
MODULE = __name__
HALL, PILLAR, REACH, STRIDE = 10.0, 2.0, 0.75, 0.5  # metres: side, radius of the pillar, how near is there, one move
MOVES = np.array([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])


class Navigation(gym.Env[npt.NDArray[np.float32], np.int64]):
    """From a random place to a random goal. A metre nearer to the goal earns 1, touching the pillar or a wall costs 0.5, arriving
    earns 5.

    >>> env = Navigation()
    >>> obs, _ = env.reset(seed=3)
    >>> env.observation_space.contains(obs), env.step(1)[1] != 0
    (True, True)
    """

    observation_space = gym.spaces.Box(np.zeros(5, np.float32), np.array([HALL, HALL, HALL, HALL, 100.0], np.float32))
    action_space = gym.spaces.Discrete(len(MOVES))
    action_names = ("stay", "east", "west", "north", "south")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.goal = self._free_place(), self._free_place()
        while np.linalg.norm(self.place - self.goal) < 3.0:
            self.goal = self._free_place()
        self.battery = 100.0
        return self._seen(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        before = float(np.linalg.norm(self.place - self.goal))
        drift = self.np_random.normal(0.0, 0.05, size=2)  # wheels slip
        wanted = self.place + STRIDE * MOVES[int(action)] + drift
        blocked = not _is_free(wanted)
        if not blocked:
            self.place = wanted
        self.battery -= 1.0 if action else 0.5
        after = float(np.linalg.norm(self.place - self.goal))
        arrived = after < REACH
        reward = before - after - 0.5 * blocked + 5.0 * arrived
        return self._seen(), reward, arrived, False, {}

    def _free_place(self) -> npt.NDArray[np.float64]:
        while True:
            place = self.np_random.uniform(0.5, HALL - 0.5, size=2)
            if _is_free(place):
                return place

    def _seen(self) -> npt.NDArray[np.float32]:
        return np.array([*self.place, *self.goal, self.battery], np.float32)


def _is_free(place: npt.NDArray[np.float64]) -> bool:
    inside = bool((place > 0).all() and (place < HALL).all())
    return inside and float(np.linalg.norm(place - HALL / 2)) > PILLAR


gym.register(ENV_ID, f"{__name__}:Navigation", max_episode_steps=60)

"""The world as an adversary sees it: the victim and its environment together are what it acts on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from sortrl.attacks.base import Attack
from sortrl.attacks.valid import valid_range
from sortrl.core.records import Policy
from sortrl.envs import EnvSlots

LARGEST_OUTPUT = 100.0  # Stable-Baselines3 wants bounded actions; no network comes near


class Siege(VecEnv):
    """Episodes of a victim whose observations the learner perturbs, side by side; the victim is asked in batches.

    The learner observes ``features(unit, scores)`` of each state; ``strike(outputs)`` makes its outputs an attack; its
    reward is minus the environment's. ``finished`` holds the victim's latest returns.
    """

    def __init__(
        self,
        victim: Policy,
        env_id: str,
        eps_unit: float,
        slots: int,
        seed: int,
        outputs: int,
        features: Callable[[Tensor, Tensor], Tensor],
        strike: Callable[[Tensor], Attack],
    ) -> None:
        self.victim, self.eps_unit, self.features, self.strike = victim, eps_unit, features, strike
        self.envs = EnvSlots(env_id, slots)
        self.low, self.high = valid_range(victim, self.envs.info)
        self.generator = np.random.default_rng(seed)
        self.finished: deque[float] = deque(maxlen=slots)
        self.totals = np.zeros(slots)
        self.raw: list[npt.NDArray[Any]] = []
        seen = gym.spaces.Box(-np.inf, np.inf, (self.envs.info.obs_size + victim.n_actions,), np.float32)
        done = gym.spaces.Box(-LARGEST_OUTPUT, LARGEST_OUTPUT, (outputs,), np.float32)
        super().__init__(slots, seen, done)

    def reset(self) -> npt.NDArray[np.float32]:
        self.totals[:] = 0.0
        self.raw = [self._restarted(slot) for slot in range(self.num_envs)]
        return self._look()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self.outputs = torch.as_tensor(actions, dtype=torch.float32)

    def step_wait(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]]:
        result = self.strike(self.outputs)(self.victim, self.unit, self.eps_unit, self.low, self.high)
        rewards, dones = np.zeros(self.num_envs), np.zeros(self.num_envs, dtype=bool)
        for slot, action in enumerate(result.action):
            self.raw[slot], rewards[slot], dones[slot] = self.envs.step(slot, int(action))
        self.totals += rewards
        arrived = self._look()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for slot in np.flatnonzero(dones).tolist():
            self.finished.append(float(self.totals[slot]))
            infos[slot] = {
                "terminal_observation": arrived[slot],
                "TimeLimit.truncated": bool(self.envs.truncated[slot] and not self.envs.terminated[slot]),
            }
            self.raw[slot], self.totals[slot] = self._restarted(slot), 0.0
        if dones.any():
            arrived = self._look()
        return arrived, -rewards.astype(np.float32), dones, infos

    def _look(self) -> npt.NDArray[np.float32]:
        self.unit = self.victim.normalize(np.stack(self.raw))
        with torch.no_grad():
            seen: npt.NDArray[np.float32] = self.features(self.unit, self.victim.scores(self.unit)).numpy()
        return seen

    def _restarted(self, slot: int) -> npt.NDArray[Any]:
        return self.envs.reset(slot, int(self.generator.integers(2**31)))

    def close(self) -> None:
        self.envs.close()

    # The rest of the interface, which a learner without wrappers and without rendering asks for but does not use.
    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("Siege: its environments have no attributes to set.")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError("Siege: its environments have no methods to call.")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def seed(self, seed: int | None = None) -> Sequence[None]:
        return [None] * self.num_envs  # its episodes are seeded on construction

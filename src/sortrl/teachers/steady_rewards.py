"""Environments of Stable-Baselines3 in which unsteady steps have a price (:mod:`sortrl.teachers.steady` says why)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize
from torch import Tensor

from sortrl.teachers.steady import unsteady


class SteadyRewards(VecEnvWrapper):
    """Takes ``price`` times :func:`unsteady` of what is seen next off the reward of every step.

    ``model`` is set once it exists: its present policy is judged. The price is in units of the task's own reward, ``eps`` in
    those of normalised observations.
    """

    def __init__(self, env: VecNormalize, price: float, eps: float) -> None:
        super().__init__(env)
        self._normalised = env
        self.price, self.eps = price, eps
        self.model: Any = None
        self._generator = torch.Generator()

    def seed(self, seed: int | None = None) -> Any:
        self._generator.manual_seed(seed or 0)
        return super().seed(seed)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = self._normalised.step_wait()
        price = self.price
        if self._normalised.norm_reward:
            price /= float(np.sqrt(self._normalised.ret_rms.var + self._normalised.epsilon))
        unit = torch.from_numpy(np.asarray(obs, np.float32))
        return obs, rewards - price * unsteady(self._logits, unit, self.eps, self._generator), dones, infos

    def _logits(self, unit: Tensor) -> Tensor:
        logits: Tensor = self.model.policy.get_distribution(unit).distribution.logits
        return logits

"""A policy acting under attack, as one who visits states for `collect`: the student learns what an adversary leads to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl.attacks import PGD
from sortrl.attacks.valid import valid_range
from sortrl.envs import EnvInfo
from sortrl.nets import CertifiedPolicy

STEPS_PER_SIZE = 50  # on average, until an episode's perturbation gets another size


class UnderAttack:
    """Plays what ``policy`` plays while PGD perturbs its observations, by a random size up to ``eps`` per episode.

    Certified decisions are not attacked, since they cannot change.
    """

    def __init__(self, policy: CertifiedPolicy, info: EnvInfo, eps: float, seed: int) -> None:
        self.policy, self.eps = policy, eps
        self.low, self.high = valid_range(policy, info)
        self.attack = PGD(steps=5, step_share=0.4)  # coarser than the test's: there are many states to visit
        self.rng = np.random.default_rng([seed, 3])
        self.sizes = np.zeros(0)

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], None]:
        """Actions for raw observations, row by row those of the same episodes as in the call before."""
        clock, drawn = self.rng.random((2, len(obs)))
        drawn *= self.eps
        self.sizes = np.where(clock * STEPS_PER_SIZE < 1, drawn, self.sizes if len(self.sizes) == len(obs) else drawn)
        unit = self.policy.normalize(obs)
        certificate = self.policy.certify_unit(unit)
        actions = certificate.action.astype(np.int64)
        exposed = np.flatnonzero(certificate.radius <= self.sizes)
        if len(exposed):
            rows, sizes = torch.from_numpy(exposed), torch.from_numpy(self.sizes[exposed])
            actions[exposed] = self.attack(self.policy, unit[rows], sizes, self.low, self.high).action
        return actions, None

"""A teacher good enough to learn from and cheap enough for every test: a hand-written CartPole controller."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.normalizer import Normalizer
from sortrl.teachers import Architecture, Teacher


class Balancer(nn.Module):
    """Pushes towards where the pole falls: linear in the state, balances for 500 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.1, 0.5, 3.0, 1.5]))

    def forward(self, unit: Tensor) -> Tensor:
        push = 2.0 * (unit @ self.gain)
        return torch.stack([-push, push], dim=1)


def balancer() -> Teacher:
    scale = np.array([0.5, 0.5, 0.1, 0.5])
    body = Balancer()
    with torch.no_grad():
        body.gain.mul_(torch.from_numpy(scale).float())  # the controller is stated in raw units
    return Teacher(body, Normalizer(np.zeros(4), scale), 2, "balancer")


def restless() -> Teacher:
    """Balances the pole by its velocity above all, so that every push crosses the switching surface; a plain MLP."""
    architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(), activation="Tanh")
    weights = {"1.weight": torch.tensor([[0.0] * 4, [0.05, 0.3, 1.0, 1.0]]), "1.bias": torch.zeros(2)}
    unit = Normalizer(np.zeros(4), np.array([0.9, 0.5, 0.04, 0.3]))  # of the size of what a balanced pole shows
    return Teacher(architecture.build_with(weights, "weights"), unit, 2, "restless", "ppo", architecture)

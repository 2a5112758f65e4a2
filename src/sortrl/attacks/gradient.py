"""White-box attacks that follow the gradient of the cross-entropy of the policy's own action."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks.base import Attack, Target
from sortrl.errors import SortRLError


@dataclass(frozen=True)
class PGD(Attack):
    """Projected gradient descent: ``steps`` steps of ``step_share * eps``, from the clean state (the paper's adversary)."""

    steps: int = 10
    step_share: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.step_share > 0:
            raise SortRLError(
                f"PGD: steps={self.steps}, step_share={self.step_share}; expected at least 1 and more than 0."
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"PGD-{self.steps}"

    def search(self, target: Target) -> Tensor:
        x, step = target.unit, self.step_share * target.eps_unit
        for _ in range(self.steps):
            x = target.budget.project(x + step * target.counter.gradient(x, target.clean).sign())
        return x


@dataclass(frozen=True)
class FGSM(Attack):
    """One step of size eps along the sign of the gradient."""

    name: str = "FGSM"

    def search(self, target: Target) -> Tensor:
        return target.unit + target.eps_unit * target.counter.gradient(target.unit, target.clean).sign()


@dataclass(frozen=True)
class UniformNoise(Attack):
    """Uniform noise in the eps ball: not an adversary but a noisy sensor, and the least any attack must beat."""

    name: str = "noise"

    def search(self, target: Target) -> Tensor:
        return target.unit + target.eps_unit * (2 * torch.rand(target.unit.shape, generator=target.generator) - 1)

"""Faulty sensors: one random draw per state, within the eps ball. Not adversaries, but the least an attack must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks.base import Attack, Target
from sortrl.core.errors import SortRLError


@dataclass(frozen=True)
class UniformNoise(Attack):
    """Uniform noise over the eps ball."""

    name = "noise"
    needs_gradient = False

    def search(self, target: Target) -> Tensor:
        return target.uniform()


@dataclass(frozen=True)
class GaussianNoise(Attack):
    """Normal noise with standard deviation eps / 2, cut off at the eps ball (about 5 % of the coordinates are)."""

    name = "gaussian"
    needs_gradient = False

    def search(self, target: Target) -> Tensor:
        return target.unit + target.eps * (target.randn(*target.unit.shape[1:]) / 2).clamp(-1, 1)


@dataclass(frozen=True)
class SensorDropout(Attack):
    """A random ``share`` of the coordinates moves towards 0 of unit space (the mean, or black), by at most eps.

    A sensor that fails outright leaves any small ball; this is the part of such a failure that eps allows.
    """

    share: float = 0.3
    name = "dropout"
    needs_gradient = False

    def __post_init__(self) -> None:
        _check_share("SensorDropout", self.share)

    def search(self, target: Target) -> Tensor:
        shift = torch.clamp(-target.unit, -target.eps, target.eps)
        return target.unit + _some(target, self.share) * shift


@dataclass(frozen=True)
class SaltAndPepper(Attack):
    """A random ``share`` of the coordinates moves by +eps or -eps: the corners of the ball, and what lies between."""

    share: float = 0.3
    name = "salt-and-pepper"
    needs_gradient = False

    def __post_init__(self) -> None:
        _check_share("SaltAndPepper", self.share)

    def search(self, target: Target) -> Tensor:
        chosen = _some(target, self.share)
        return target.unit + target.eps * chosen * torch.where(target.rand(*target.unit.shape[1:]) < 0.5, -1.0, 1.0)


def _some(target: Target, share: float) -> Tensor:
    return target.rand(*target.unit.shape[1:]) < share


def _check_share(owner: str, share: float) -> None:
    if not 0 < share <= 1:
        raise SortRLError(f"{owner}: share is {share}, expected a number in (0, 1].")

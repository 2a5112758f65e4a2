"""The valid range of observations in unit space, to which attacks are clipped."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.envs import EnvInfo


class Normalizes(Protocol):
    """Whoever has a unit space."""

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor: ...


def check_eps(policy: Normalizes, info: EnvInfo, eps_unit: float) -> None:
    """Refuse an eps that lets an adversary replace the whole observation: most likely it is in another unit."""
    if not 0 <= eps_unit < float("inf"):
        raise SortRLError(f"eps is {eps_unit}, expected a finite number >= 0 in the policy's input units.")
    low, high = valid_range(policy, info)
    if low is None or high is None:
        return
    span = float((high - low).max())
    if eps_unit >= span:  # never where a sensor is unbounded
        raise too_wide(info, eps_unit, span)


def too_wide(info: EnvInfo, eps_unit: float, span: float) -> SortRLError:
    """With the number that was most likely meant."""
    pixels = f" For {eps_unit:g} of 255 grey levels write {eps_unit / 255:.4g}." if info.is_image else ""
    return SortRLError(
        f"eps is {eps_unit:g}, but observations of {info.env_id} span only {span:g} in the policy's input units, which "
        f"eps is stated in: everything could be changed into anything.{pixels} Choose a smaller eps."
    )


def valid_range(policy: Normalizes, info: EnvInfo) -> tuple[Tensor | None, Tensor | None]:
    """The declared bounds of observations in unit space; None where no component has one."""

    def to_unit(bounds: npt.NDArray[np.float64]) -> Tensor | None:
        finite = np.isfinite(bounds)
        if not finite.any():
            return None
        unit = policy.normalize(np.where(finite, bounds, 0.0)[None])[0]
        return torch.where(torch.from_numpy(finite), unit, torch.from_numpy(np.where(finite, 0.0, bounds)).float())

    return to_unit(info.valid_low), to_unit(info.valid_high)

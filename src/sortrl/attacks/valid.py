"""Which observations are possible at all, in the policy's own units: what an attack may not leave."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.envs import EnvInfo
from sortrl.records import Policy


def valid_range(policy: Policy, info: EnvInfo) -> tuple[Tensor | None, Tensor | None]:
    """The declared bounds of observations in the policy's units; None where there is none at all."""

    def to_unit(bounds: npt.NDArray[np.float64]) -> Tensor | None:
        finite = np.isfinite(bounds)
        if not finite.any():
            return None
        unit = policy.normalize(np.where(finite, bounds, 0.0)[None])[0]
        return torch.where(torch.from_numpy(finite), unit, torch.from_numpy(np.where(finite, 0.0, bounds)).float())

    return to_unit(info.valid_low), to_unit(info.valid_high)

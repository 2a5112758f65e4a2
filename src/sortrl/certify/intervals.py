"""Certificates by interval propagation: never below the margin's, and far above it where few coordinates move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.nets import CertifiedPolicy
from sortrl.nets.float_bounds import box_around

BOXES_AT_ONCE = 2048


@torch.no_grad()
def proven_in_box(policy: CertifiedPolicy, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
    """Whether (batch,) intervals prove ``action`` (batch,) for every input of the unit-space boxes [lo, hi]."""
    parts = zip(*(torch.split(tensor, BOXES_AT_ONCE) for tensor in (lo, hi, action)), strict=True)
    return torch.cat([policy.proven(*part) for part in parts]) if len(lo) else torch.zeros(0, dtype=torch.bool)


@torch.no_grad()
def interval_radius(
    policy: CertifiedPolicy,
    unit: Tensor,
    low: Tensor | None = None,
    high: Tensor | None = None,
    *,
    weights: Tensor | None = None,
    reach: float = 4.0,
    steps: int = 12,
) -> npt.NDArray[np.float64]:
    """The largest r (batch,) for which intervals prove the action on the box ``unit +- r * weights``, up to ``reach``.

    ``low`` and ``high`` clip the box to the valid observations. ``weights`` (obs_shape, default 1) says how much each
    coordinate may move: a single 1 among zeros asks how wrong one sensor may be alone. Found by bisection in ``steps``
    steps; what is returned was itself proven. It is at least the margin's radius.

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((3,), 2, width=16, depth=2)
    >>> x = torch.randn(10, 3)
    >>> bool((interval_radius(policy, x, weights=torch.tensor([1.0, 0.0, 0.0])) >= interval_radius(policy, x)).all())
    True
    """
    spread = torch.ones(policy.obs_shape) if weights is None else weights.float()
    if tuple(spread.shape) != policy.obs_shape or not bool((spread >= 0).all()) or float(spread.amax()) != 1.0:
        raise SortRLError(
            f"interval_radius: weights of shape {tuple(spread.shape)} and maximum {float(spread.amax()):g}, expected "
            f"shape {policy.obs_shape}, none negative and the largest 1."
        )
    certificate = policy.certify_unit(unit)
    action = torch.from_numpy(certificate.action)
    good = torch.from_numpy(certificate.radius).clamp(max=reach)
    bad = torch.full_like(good, reach)
    ones = (-1, *(1 for _ in policy.obs_shape))

    def holds(radius: Tensor) -> Tensor:
        eps = radius.reshape(ones) * spread.double() * (1.0 + 1e-12)  # not less than the exact product
        return proven_in_box(policy, *box_around(unit, eps, low, high), action)

    good = torch.where(holds(bad), bad, good)
    for _ in range(steps):
        # Geometric while the bracket is wide, because radii differ by orders of magnitude.
        middle = torch.where(bad > 4 * good, torch.sqrt(bad * good.clamp(min=1e-6)), (good + bad) / 2)
        holding = holds(middle) & (middle > good)
        good, bad = torch.where(holding, middle, good), torch.where(holding, bad, torch.minimum(bad, middle))
        bad = torch.maximum(bad, good)
    return good.numpy()

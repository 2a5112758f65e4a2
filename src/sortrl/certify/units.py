"""Certificates in the units people have: raw sensor values, a budget per sensor, levels of grey."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.certify.intervals import proven_in_box
from sortrl.core.errors import SortRLError
from sortrl.nets import CertifiedPolicy
from sortrl.nets.float_bounds import RADIUS_DOWN, box_around

# |unit as computed - unit exactly| <= ROUNDED * |unit as computed| + TINY: float64 arithmetic, then rounding to float32.
ROUNDED = 1.001 * 2.0**-24
TINY = 2.0**-126
SLIGHTLY_MORE = 1.0 + 1e-12  # many times the rounding errors of these few float64 operations
BYTE = 255


def raw_radii(policy: CertifiedPolicy, obs: npt.ArrayLike | Tensor) -> npt.NDArray[np.float64]:
    """Radii (batch, *obs_shape) in raw units: while every value stays within its own, the action cannot change.

    They are ``radius * scale``, less what the normaliser may round. Where it clips a value, the value may also move
    freely as far as it stays clipped.

    >>> from sortrl.core.normalizer import Normalizer
    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((2,), 2, width=8, depth=2, normalizer=Normalizer([0.0, 0.0], [1.0, 50.0]))
    >>> raw = raw_radii(policy, [[0.3, 10.0]])[0]
    >>> bool(raw[1] >= 49.9 * raw[0])
    True
    """
    raw = _as_double(obs)
    unit = policy.normalize(raw)
    radius = torch.from_numpy(policy.certify_unit(unit).radius).reshape(-1, *(1 for _ in policy.obs_shape))
    room = (radius - 2.0 * _rounding(unit)) / (1.0 + ROUNDED)
    free = room.clamp(min=0.0) + _clipped_by(policy, raw)
    radii = torch.where(room > 0, policy.normalizer.scale * free * RADIUS_DOWN, 0.0)
    # The factor rounds down; not so the smallest numbers of float64, which have fewer digits than it needs.
    return torch.nextafter(radii, torch.zeros_like(radii)).numpy()


def certified_for(
    policy: CertifiedPolicy,
    obs: npt.ArrayLike | Tensor,
    eps: npt.ArrayLike,
    *,
    units: Literal["raw", "unit"] = "raw",
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> npt.NDArray[np.bool_]:
    """Whether (batch,) the action survives every perturbation in which coordinate i moves by at most ``eps[i]``.

    ``obs`` are raw observations; ``eps`` (broadcast to obs_shape) is in raw or in unit space. First the margin is asked
    whether the largest of the budgets is within its radius; where it is not, intervals are asked about the very box,
    clipped to the valid range ``low``, ``high`` (unit space) if given.

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((2,), 2, width=8, depth=2)
    >>> certified_for(policy, [[0.3, 10.0]], eps=[0.0, 0.0])
    array([ True])
    """
    raw = _as_double(obs)
    unit = policy.normalize(raw)
    budget = torch.from_numpy(np.broadcast_to(np.asarray(eps, dtype=np.float64), policy.obs_shape).copy())
    if not bool((budget >= 0).all()):
        raise SortRLError(f"certified_for: eps ranges from {float(budget.min())}, expected numbers >= 0 or infinity.")
    if units == "raw":
        moved = budget / policy.normalizer.scale * SLIGHTLY_MORE
        moved = (moved - _clipped_by(policy, raw)).clamp(min=0.0)
        # An untouched value is the same number again; what moves is rounded twice.
        allowed = torch.where(budget > 0, moved * (1.0 + ROUNDED) + 2.0 * _rounding(unit), 0.0) * SLIGHTLY_MORE
    elif units == "unit":
        allowed = budget.expand(unit.shape)
    else:
        raise SortRLError(f"certified_for: units {units!r}, expected 'raw' or 'unit'.")
    certificate = policy.certify_unit(unit)
    certified = allowed.flatten(1).amax(1) < torch.from_numpy(certificate.radius)
    if not bool(certified.all()):
        rest = ~certified
        lo, hi = box_around(unit[rest], allowed[rest], low, high)
        clip = float(np.nextafter(np.float32(policy.normalizer.clip), np.float32(np.inf)))
        lo, hi = lo.clamp(-clip, clip), hi.clamp(-clip, clip)  # nothing else comes out of the normaliser
        _check_bounded(lo, hi)
        certified[rest] = proven_in_box(policy, lo, hi, torch.from_numpy(certificate.action)[rest])
    return certified.numpy()


def certified_levels(policy: CertifiedPolicy, obs: npt.ArrayLike | Tensor) -> npt.NDArray[np.int64]:
    """For observations of bytes: the largest k (batch,) such that no change of up to k levels per value changes the action.

    -1 where not even the tie of two actions is excluded. k / 255 is the radius as the literature on images states it.

    >>> from sortrl.core.normalizer import Normalizer
    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((1, 4, 4), 2, width=8, depth=2, normalizer=Normalizer.from_pixels((1, 4, 4)))
    >>> bool(certified_levels(policy, np.zeros((1, 1, 4, 4), np.uint8))[0] >= -1)
    True
    """
    raw = _as_double(obs)
    if not bool(((raw >= 0) & (raw <= BYTE) & (raw == raw.round())).all()):
        raise SortRLError("certified_levels: observations must be whole numbers from 0 to 255 (bytes).")
    ends = torch.tensor([0.0, float(BYTE)], dtype=torch.float64).reshape(2, *(1 for _ in policy.obs_shape))
    low, high = policy.normalize(ends.expand(2, *policy.obs_shape))
    levels: npt.NDArray[np.int64] = np.floor(raw_radii(policy, raw).reshape(len(raw), -1).min(1)).astype(np.int64)
    levels[policy.certify(raw).radius == 0] = -1
    trying = np.flatnonzero((levels >= 0) & (levels < BYTE))
    while len(trying):  # intervals on the clipped box add a level here and there
        for k in np.unique(levels[trying]):
            same = trying[levels[trying] == k]
            held = certified_for(policy, raw[torch.from_numpy(same)], float(k + 1), low=low, high=high)
            levels[same[held]] += 1
            trying = np.setdiff1d(trying, same[~held])
        trying = trying[levels[trying] < BYTE]
    return levels


def _as_double(obs: npt.ArrayLike | Tensor) -> Tensor:
    return (obs if isinstance(obs, Tensor) else torch.as_tensor(np.asarray(obs))).double()


def _rounding(unit: Tensor) -> Tensor:
    return ROUNDED * unit.abs().double() + TINY


def _clipped_by(policy: CertifiedPolicy, raw: Tensor) -> Tensor:
    """How far beyond the clip a value is, in unit space, rounded down."""
    normalizer = policy.normalizer
    exact = ((raw - normalizer.mean) / normalizer.scale).abs()
    return (exact * RADIUS_DOWN - normalizer.clip).clamp(min=0.0)


def _check_bounded(lo: Tensor, hi: Tensor) -> None:
    if not bool(torch.isfinite(lo).all() and torch.isfinite(hi).all()):
        raise SortRLError(
            "certified_for: an infinite eps needs a valid range (low, high) or a clipping normaliser to bound the values."
        )

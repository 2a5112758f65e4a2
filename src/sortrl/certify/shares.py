"""What radii say together: certified share against eps (ACR), their distribution, whole episodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.certify.intervals import proven_in_box
from sortrl.core.errors import SortRLError
from sortrl.core.records import EvalResult
from sortrl.nets import CertifiedPolicy
from sortrl.nets.float_bounds import box_around

# The literature counts "states whose action is certified at eps" (ACR) in three ways. Figures of different variants must
# not be compared.
ACR_VARIANTS = {
    "margin": "SortRL: margin > 2 L eps (after rounding slack), all states pooled",
    "sa-dqn": "SA-DQN: intervals on the eps box clipped to the valid range, all states pooled",
    "radial": "RADIAL: intervals on the eps box as it is, mean over episodes of the share in each",
}


def acr(
    policy: CertifiedPolicy,
    episodes: Sequence[Tensor],
    eps_unit: float,
    variant: str = "margin",
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> float:
    """Action certification rate of clean episodes, each a tensor (steps, *obs_shape) of unit-space states.

    SA-DQN and RADIAL bound differences of scores through a linear output layer. A sort layer has no such form, so here
    each score is bounded by itself, and a state also counts where the margin certifies it.

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((3,), 2, width=16, depth=2)
    >>> states = [torch.randn(20, 3), torch.randn(5, 3)]
    >>> acr(policy, states, 0.0, "margin") == acr(policy, states, 0.0, "sa-dqn")
    True
    """
    if variant not in ACR_VARIANTS:
        raise SortRLError(f"acr: unknown variant {variant!r}; choose one of {', '.join(ACR_VARIANTS)}.")
    if not episodes or not all(len(states) for states in episodes):
        raise SortRLError("acr: no episodes, or one without states; play at least one step of each.")
    unit = torch.cat(list(episodes))
    certificate = policy.certify_unit(unit)
    certified = torch.from_numpy(certificate.certified_at(eps_unit))
    if variant != "margin" and eps_unit > 0:
        bounds = (low, high) if variant == "sa-dqn" else (None, None)
        box = box_around(unit, eps_unit, *bounds)
        certified |= proven_in_box(policy, *box, torch.from_numpy(certificate.action))
    if variant == "radial":
        shares = [part.double().mean() for part in torch.split(certified, [len(states) for states in episodes])]
        return float(torch.stack(shares).mean())
    return float(certified.double().mean())


def certified_shares(result: EvalResult, eps_units: Sequence[float]) -> list[float]:
    """ACR, variant "margin" of the paper: share of the states of clean episodes with a radius above each eps."""
    radii = _radii(result)
    return [float((radii > eps).mean()) for eps in eps_units]


def fully_certified_episodes(result: EvalResult, eps_unit: float) -> float:
    """Share of the episodes in which every step is certified: their return is the same under any attack at eps."""
    return float(_fully_certified(result, eps_unit).mean())


def proven_mean(result: EvalResult, eps_unit: float, least_return: float) -> float:
    """What the mean return is at least, under any attack at eps: an episode with a step that is not certified counts as the
    worst there is. For tasks in which nothing is random but the start."""
    return float(np.where(_fully_certified(result, eps_unit), result.returns, least_return).mean())


def _fully_certified(result: EvalResult, eps_unit: float) -> npt.NDArray[np.bool_]:
    """One truth per episode."""
    parts = np.split(_radii(result), np.cumsum(result.lengths)[:-1])
    return np.array([bool((part > eps_unit).all()) for part in parts])


def certificate_summary(clean: EvalResult, eps_unit: float, bins: int = 40) -> dict[str, Any]:
    """The ``certificate`` part of results.json, from one clean evaluation."""
    radii = _radii(clean)
    grid = [round(float(e), 6) for e in np.linspace(0.0, 3.0 * eps_unit if eps_unit > 0 else 0.3, 31)]
    counts, edges = np.histogram(radii, bins=bins, range=(0.0, max(float(np.quantile(radii, 0.999)), 1e-6)))
    first = radii[: int(clean.lengths[0])]
    return {
        "acr_variant": "margin > 2 L eps on the states of clean episodes (radius after rounding slack)",
        "eps": grid,
        "share": certified_shares(clean, grid),
        "radius_median": float(np.median(radii)),
        "histogram": {"edges": [float(e) for e in edges], "counts": [int(c) for c in counts]},
        "episode": {
            "seed": clean.seeds[0],
            "return": float(clean.returns[0]),
            "radii": [math.floor(float(r) * 1e6) / 1e6 for r in first],  # never rounded up
        },
        "fully_certified_episodes": fully_certified_episodes(clean, eps_unit),
    }


def _radii(result: EvalResult) -> np.ndarray[Any, Any]:
    if result.radii is None:
        raise SortRLError(f"{result.policy} has no certificates; certify a SortPolicy.")
    if result.attack != "none" and result.eps_unit > 0:
        raise SortRLError("Certified shares are stated on clean episodes; evaluate without an attack.")
    return np.asarray(result.radii)

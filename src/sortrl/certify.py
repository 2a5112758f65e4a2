"""What radii say together: certified share against eps (ACR), their distribution, whole episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sortrl.errors import SortRLError
from sortrl.records import EvalResult


def certified_shares(result: EvalResult, eps_units: Sequence[float]) -> list[float]:
    """ACR, variant "margin" of the paper: share of the states of clean episodes with a radius above each eps."""
    radii = _radii(result)
    return [float((radii > eps).mean()) for eps in eps_units]


def fully_certified_episodes(result: EvalResult, eps_unit: float) -> float:
    """Share of the episodes in which every step is certified: their return is the same under any attack at eps."""
    parts = np.split(_radii(result), np.cumsum(result.lengths)[:-1])
    return float(np.mean([bool((part > eps_unit).all()) for part in parts]))


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
            "radii": [round(float(r), 6) for r in first],
        },
        "fully_certified_episodes": fully_certified_episodes(clean, eps_unit),
    }


def _radii(result: EvalResult) -> np.ndarray[Any, Any]:
    if result.radii is None:
        raise SortRLError(f"{result.policy} has no certificates; certify a SortPolicy.")
    if result.attack != "none" and result.eps_unit > 0:
        raise SortRLError("Certified shares are stated on clean episodes; evaluate without an attack.")
    return np.asarray(result.radii)

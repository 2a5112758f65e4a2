"""Four bounds on the radius of a decision, in rising order: margin, intervals, complete search, smallest attack found."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sortrl.certify.intervals import interval_radius
from sortrl.certify.search import exact_radius
from sortrl.nets import SortPolicy


def ladder(
    policy: SortPolicy,
    unit: Tensor,
    low: Tensor | None = None,
    high: Tensor | None = None,
    *,
    reach: float = 1.0,
    tolerance: float = 1e-3,
    boxes_per_state: int = 20_000,
    time_limit: float = math.inf,
) -> dict[str, Any]:
    """All radii of each state (lists of numbers, unit space, cut off at ``reach``) and summary statistics.

    ``margin``: (margin - slack) / (2 L). ``interval``: intervals on the box clipped to the valid range. ``exact_lower``
    and ``exact_upper``: the complete search; the upper one is the distance of a real counter-example, None where there is
    none within reach.
    """
    margin = np.minimum(policy.certify_unit(unit).radius, reach)
    interval = interval_radius(policy, unit, low, high, reach=reach)
    bracket = exact_radius(
        policy,
        unit,
        low,
        high,
        tolerance=tolerance,
        reach=reach,
        boxes_per_state=boxes_per_state,
        time_limit=time_limit,
    )
    found = np.isfinite(bracket.upper)
    upper = np.minimum(bracket.upper, reach)
    return {
        "states": len(unit),
        "reach": reach,
        "tolerance": tolerance,
        "boxes": bracket.boxes,
        "margin": _listed(margin),
        "interval": _listed(interval),
        "exact_lower": _listed(bracket.lower),
        "exact_upper": [float(value) if there else None for value, there in zip(bracket.upper, found, strict=True)],
        "solved_share": float((upper - bracket.lower <= tolerance).mean()),
        "no_flip_share": float((~found).mean()),
        "margin_of_upper": _ratio(margin, upper),
        "interval_of_upper": _ratio(interval, upper),
        "exact_lower_of_upper": _ratio(bracket.lower, upper),
    }


def _listed(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values]


def _ratio(below: npt.NDArray[np.float64], above: npt.NDArray[np.float64]) -> dict[str, float]:
    """Statistics over states of a lower bound divided by the upper bound."""
    share = below / above
    return {
        "median": float(np.median(share)),
        "mean": float(np.mean(share)),
        "quartile": float(np.quantile(share, 0.25)),
    }

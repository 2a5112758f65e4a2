"""Robust summaries of returns: the interquartile mean and its bootstrap interval (Agarwal et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError

RESAMPLES = 2000
LEVEL = 0.95

Returns = Sequence[float] | npt.NDArray[np.floating]


def iqm(returns: Returns) -> float:
    """Mean of what is left after dropping ``floor(n / 4)`` values at either end: blind to outliers, less noisy than a median.

    >>> iqm([0.0, 1.0, 2.0, 300.0])
    1.5
    """
    return float(_trimmed_means(_checked(returns)[None])[0])


def iqm_interval(
    strata: Sequence[Returns], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the IQM of all strata together, each resampled by itself.

    A stratum is what one run or seed returned, so that every resample holds as much of each run as the data do. A sample of
    one value cannot be resampled: its interval is the value itself.

    >>> iqm_interval([[5.0, 5.0, 5.0], [5.0]])
    (5.0, 5.0)
    """
    if not strata or not 0 < level < 1 or resamples < 1:
        raise SortRLError(
            f"iqm_interval: {len(strata)} strata, level {level}, {resamples} resamples; expected at least one stratum, "
            "a level in (0, 1) and at least one resample."
        )
    samples = [_checked(stratum) for stratum in strata]
    generator = np.random.default_rng(seed)
    drawn = [sample[generator.integers(len(sample), size=(resamples, len(sample)))] for sample in samples]
    tail = 100 * (1 - level) / 2
    low, high = np.percentile(_trimmed_means(np.concatenate(drawn, axis=1)), [tail, 100 - tail])
    return float(low), float(high)


def _trimmed_means(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    cut = rows.shape[1] // 4
    kept = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut]
    means: npt.NDArray[np.float64] = kept.mean(axis=1)
    return means


def _checked(returns: Returns) -> npt.NDArray[np.float64]:
    values = np.asarray(returns, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        raise SortRLError(
            f"IQM: returns of shape {values.shape}, expected a list of one or more finite numbers per stratum."
        )
    return values

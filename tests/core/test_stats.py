"""The interquartile mean and its interval, against cases worked by hand and against what an interval promises."""

from __future__ import annotations

import numpy as np
import pytest

from sortrl.core.errors import SortRLError
from sortrl.core.stats import iqm, iqm_interval

BY_HAND = {
    "one value": ([7.0], 7.0),
    "too few to trim": ([1.0, 2.0, 6.0], 3.0),
    "four: the middle two": ([100.0, 2.0, 1.0, -50.0], 1.5),
    "seven: floor(7 / 4) = 1 from each end": ([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, -80.0], 3.0),
    "eight: two from each end": ([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 999.0, 999.0], 2.5),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_iqm_by_hand(case):
    values, expected = BY_HAND[case]
    assert iqm(values) == expected
    assert iqm(values[::-1]) == expected


def test_the_interval_of_two_values_is_exact():
    # Resamples of (0, 1) have means 0, 1/2, 1 with probabilities 1/4, 1/2, 1/4; each tail holds far more than 2.5 %.
    assert iqm_interval([[0.0, 1.0]]) == (0.0, 1.0)
    # At level .4 the tails of 30 % end inside the middle value.
    assert iqm_interval([[0.0, 1.0]], level=0.4) == (0.5, 0.5)


def test_strata_are_resampled_by_themselves():
    apart = [[0.0] * 10, [10.0] * 10]  # no variation within a run: every resample is the data
    assert iqm_interval(apart) == (5.0, 5.0)
    low, high = iqm_interval([apart[0] + apart[1]])  # the same returns as one run do vary
    assert low < 4 < 6 < high


def test_the_interval_is_seeded_and_holds_the_estimate():
    returns = np.random.default_rng(0).exponential(100.0, size=30)
    first = iqm_interval([returns])
    assert first == iqm_interval([returns])
    assert first != iqm_interval([returns], seed=1)
    assert first[0] < iqm(returns) < first[1]
    narrow = iqm_interval([returns], level=0.5)
    assert first[0] < narrow[0] < narrow[1] < first[1]


@pytest.mark.parametrize("spread", ["normal", "skewed"])
def test_coverage_is_near_what_it_says(spread):
    generator = np.random.default_rng(1)
    draw = generator.normal if spread == "normal" else generator.exponential
    truth = iqm(draw(size=400_000))
    held = []
    for trial in range(300):
        strata = [draw(size=15), draw(size=15), draw(size=15)]
        low, high = iqm_interval(strata, resamples=400, seed=trial)
        held.append(low <= truth <= high)
    # A percentile interval of 45 values covers a little less than 95 %; the error of this estimate is about 1.5 %.
    assert 0.88 <= np.mean(held) <= 0.99


@pytest.mark.parametrize(
    "call",
    [
        lambda: iqm([]),
        lambda: iqm([1.0, float("nan")]),
        lambda: iqm([[1.0, 2.0]]),
        lambda: iqm_interval([]),
        lambda: iqm_interval([[1.0], []]),
        lambda: iqm_interval([[1.0]], level=1.0),
        lambda: iqm_interval([[1.0]], resamples=0),
    ],
)
def test_bad_input_is_named(call):
    with pytest.raises(SortRLError, match="expected"):
        call()

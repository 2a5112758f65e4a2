"""Each rung of the ladder is sound and at least the one before; the complete search agrees with brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sortrl.certify import exact_radius, interval_radius, ladder
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json
from sortrl.experiments.certificate_study import run
from sortrl.nets import SortPolicy


def build(seed: int, inputs: int, actions: int = 3, width: int = 16, depth: int = 3, **options) -> SortPolicy:
    torch.manual_seed(seed)
    policy = SortPolicy((inputs,), actions, width, depth, **options).requires_grad_(False)
    policy.calibrate(torch.randn(256, inputs))
    return policy


def nearest_flip_on_a_grid(policy, x, reach, steps=301, low=-math.inf, high=math.inf) -> float:
    """The distance of the nearest grid point (two dimensions) that is answered differently; infinite if there is none."""
    axis = torch.linspace(-reach, reach, steps)
    grid = x + torch.cartesian_prod(axis, axis)
    grid = grid[((grid >= low) & (grid <= high)).all(1)]
    flips = grid[policy.scores(grid).argmax(1) != policy.scores(x[None]).argmax(1)]
    return float((flips.double() - x.double()).abs().amax(1).min()) if len(flips) else math.inf


def test_complete_search_agrees_with_brute_force():
    closer = 0
    for seed in range(6):
        policy = build(seed, 2)
        x = torch.randn(6, 2)
        bracket = exact_radius(policy, x, tolerance=1e-3, reach=0.8)
        margin = policy.certify_unit(x).radius
        for i in range(len(x)):
            brute, spacing = nearest_flip_on_a_grid(policy, x[i], 0.8), 1.6 / 300
            assert bracket.lower[i] <= brute, "an input below the lower bound changes the action"
            assert min(bracket.upper[i], 0.8) <= brute + 1e-3 or bracket.upper[i] - bracket.lower[i] <= 1e-3
            if math.isfinite(bracket.upper[i]):
                assert brute <= bracket.upper[i] + 20 * spacing, "the grid should have seen a flip as near as that"
        closer += int((bracket.lower > 1.1 * np.minimum(margin, 0.8)).sum())
        assert (np.minimum(bracket.upper, 0.8) - bracket.lower <= 1.001e-3).all()
    assert closer > 3, "the test needs states in which the search proves more than the margin"


def test_every_float_below_the_lower_bound_is_answered_the_same():
    for seed in range(8):
        policy = build(seed, 1, actions=2)
        x = torch.randn(10, 1)
        bracket = exact_radius(policy, x, tolerance=1e-4, reach=0.5)
        for i in range(len(x)):
            inside = x[i] + torch.linspace(-1, 1, 20_001)[:, None] * bracket.lower[i]
            inside = inside[(inside.double() - x[i].double()).abs()[:, 0] <= bracket.lower[i]]
            assert (policy.scores(inside.float()).argmax(1) == policy.scores(x[i : i + 1]).argmax(1)).all()


def test_counter_examples_are_real_and_just_outside():
    policy = build(0, 4)
    x = torch.randn(30, 4)
    low, high = torch.full((4,), -1.5), torch.full((4,), 1.5)
    bracket = exact_radius(policy, x, low, high, reach=1.0, tolerance=5e-3)
    found = np.isfinite(bracket.upper)
    assert found.sum() > 10
    example = bracket.counter_example[found]
    assert (policy.scores(example).argmax(1) != policy.scores(x[found]).argmax(1)).all()
    distance = (example.double() - x[found].double()).abs().amax(1).numpy()
    assert (distance == bracket.upper[found]).all()
    assert (bracket.lower[found] < bracket.upper[found]).all()
    assert ((example >= torch.minimum(low, x[found])) & (example <= torch.maximum(high, x[found]))).all()
    assert torch.equal(bracket.counter_example[~found], x[~found])
    assert float(np.median(bracket.gap[found])) <= 5e-3


@pytest.mark.parametrize("inputs", [2, 6])
def test_rungs_are_in_order_and_nothing_sampled_breaks_them(inputs):
    policy = build(3, inputs, width=24)
    x = torch.randn(25, inputs)
    low, high = torch.full((inputs,), -1.0), torch.full((inputs,), 1.0)
    rungs = ladder(policy, x, low, high, reach=0.6, tolerance=2e-3, boxes_per_state=400)
    margin, interval, lower = (np.array(rungs[name]) for name in ("margin", "interval", "exact_lower"))
    upper = np.array([math.inf if u is None else u for u in rungs["exact_upper"]])
    assert ((margin <= interval) & (interval <= lower + 1e-11) & (lower < upper)).all()
    assert rungs["margin_of_upper"]["median"] <= rungs["exact_lower_of_upper"]["median"] <= 1.0
    action = policy.scores(x).argmax(1)
    for radius, bounds in ((interval, (low, high)), (lower, (low, high)), (margin, (None, None))):
        eps = torch.from_numpy(radius)[:, None].float() * 0.99999
        for _ in range(100):
            moved = x + eps * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0)
            if bounds[0] is not None:
                moved = torch.minimum(torch.maximum(moved, torch.minimum(low, x)), torch.maximum(high, x))
            assert (policy.scores(moved).argmax(1) == action).all()


def test_the_valid_range_raises_interval_radii():
    policy = build(2, 3)
    x = torch.rand(40, 3)
    free = interval_radius(policy, x)
    clipped = interval_radius(policy, x, torch.zeros(3), torch.ones(3))
    assert (clipped >= free).all()
    assert (clipped > 1.05 * free).any()
    assert (free >= np.minimum(policy.certify_unit(x).radius, 4.0)).all()
    point = x[0]
    assert interval_radius(policy, x[:1], point, point, reach=2.0)[0] == 2.0


def test_one_sensor_alone_may_be_further_off():
    policy = build(4, 4, width=32)
    x = torch.randn(40, 4)
    together = interval_radius(policy, x)
    gained = 0
    for coordinate in range(4):
        weights = torch.zeros(4)
        weights[coordinate] = 1.0
        alone = interval_radius(policy, x, weights=weights)
        assert (alone >= together).all()
        gained += int((alone > 2 * together).sum())
        for share in torch.linspace(-1, 1, 41):
            moved = x + share * torch.from_numpy(alone)[:, None].float() * 0.99999 * weights
            assert (policy.scores(moved).argmax(1) == policy.scores(x).argmax(1)).all()
    assert gained > 20


def test_a_limit_on_work_gives_the_best_bracket_so_far():
    policy = build(5, 6, width=24)
    x = torch.randn(10, 6)
    margin = policy.certify_unit(x).radius
    few, many = (exact_radius(policy, x, reach=0.5, tolerance=1e-4, boxes_per_state=n) for n in (50, 1000))
    assert few.boxes < many.boxes
    assert (few.lower >= np.minimum(margin, 0.5) * (1 - 1e-9)).all()
    assert np.minimum(many.upper, 0.5).mean() - many.lower.mean() < np.minimum(few.upper, 0.5).mean() - few.lower.mean()
    none = exact_radius(policy, x, reach=0.5, time_limit=0.0)
    assert none.boxes == 0
    assert (none.lower < none.upper).all()
    again = exact_radius(policy, x, reach=0.5, tolerance=1e-4, boxes_per_state=50)
    assert (again.lower == few.lower).all()
    assert (again.upper == few.upper).all(), "with a limit on boxes the result is reproducible"


def test_ties_and_states_on_the_boundary_do_not_hang():
    policy = build(6, 2, actions=2)
    policy.layers[-1].weight[1] = policy.layers[-1].weight[0]
    policy.bias.zero_()
    bracket = exact_radius(policy, torch.randn(3, 2), boxes_per_state=3000)
    assert (bracket.lower < 1e-3).all(), "two equal scores: nothing can be proven"


class Liar(SortPolicy):
    """Claims more than it can hold."""

    def certify_unit(self, unit):
        certificate = super().certify_unit(unit)
        return replace(certificate, radius=certificate.radius * 4 + 0.1)


def test_a_planted_unsound_certificate_is_caught():
    torch.manual_seed(0)
    policy = Liar((3,), 3, 16, 3).requires_grad_(False)
    policy.calibrate(torch.randn(256, 3))
    with pytest.raises(SortRLError, match="counter-example lies within a certified radius"):
        exact_radius(policy, torch.randn(20, 3))


def test_the_report_has_nested_curves_and_is_reproducible(tmp_path):
    policy = build(0, 4, actions=2, width=12, depth=2)
    options = {"states": 12, "episodes": 2, "boxes_per_state": 100, "progress": lambda line: None}
    results = run({"CartPole-v1": policy}, tmp_path, **options)
    task = results["tasks"]["CartPole-v1"]
    assert read_json(tmp_path / "certificates.json")["tasks"]["CartPole-v1"]["ladder"] == task["ladder"]
    assert (tmp_path / "certificates.png").read_bytes()[:4] == b"\x89PNG"
    attacked = np.array([math.inf if r is None else r for r in task["attack"]["radius"]])
    margin, lower = np.array(task["ladder"]["margin"]), np.array(task["ladder"]["exact_lower"])
    assert (margin <= lower).all()
    assert (lower <= attacked).all()
    assert np.isfinite(attacked).any()
    assert set(task["acr"]) == {"eps", "states", "margin", "sa-dqn", "radial"}
    assert task["acr"]["sa-dqn"] >= task["acr"]["margin"]
    assert task["rounding"]["bound_of_error_least"] >= 1.0
    assert list(task["one_sensor"]) == ["cart position", "cart velocity", "pole angle", "pole angular velocity"]
    again = run({"CartPole-v1": policy}, tmp_path / "again", **options)
    assert again["tasks"]["CartPole-v1"]["ladder"] == task["ladder"]


BAD = {
    "tolerance": (lambda p: exact_radius(p, torch.zeros(1, 2), tolerance=0.0), r"tolerance 0\.0"),
    "reach": (lambda p: exact_radius(p, torch.zeros(1, 2), reach=-1.0), r"reach -1\.0"),
    "weights": (lambda p: interval_radius(p, torch.zeros(1, 2), weights=torch.tensor([2.0, 0.0])), "the largest 1"),
    "NaN": (lambda p: ladder(p, torch.full((1, 2), math.nan)), "NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, message = BAD[case]
    with pytest.raises(SortRLError, match=message):
        call(build(0, 2))

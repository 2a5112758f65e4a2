"""Sort layers with a linear head: what intervals claim is hunted for violations, and everything else works as for sort layers."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

import sortrl
from sortrl.attacks import PGD
from sortrl.certify import exact_radius, interval_radius, save_certificates
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.distill.loop import DistillConfig, distill
from sortrl.nets import HybridPolicy, IntervalHead, SortPolicy
from sortrl.nets.float_bounds import box_around
from sortrl.verify import verify


def build(seed: int, inputs: int = 3, actions: int = 4, hidden: tuple[int, ...] = (12,), **shape) -> HybridPolicy:
    torch.manual_seed(seed)
    policy = HybridPolicy((inputs,), actions, width=16, depth=2, hidden=hidden, **shape).requires_grad_(False)
    states = torch.randn(500, inputs)
    policy.calibrate(states)
    policy.trunk.bias.add_(policy.trunk.scores(states).mean(0))
    policy.head.layers[-1].bias.sub_(policy.scores(states).mean(0))  # no action is favoured, so that there are borders
    return policy


def shaken(unit: torch.Tensor, size: torch.Tensor, draws: int) -> torch.Tensor:
    """Inputs at exactly ``size`` from each state, in random corners."""
    signs = torch.where(torch.rand(draws, *unit.shape) < 0.5, -1.0, 1.0)
    return unit + signs * size.reshape(-1, *[1] * (unit.ndim - 1)).float()


def flips(policy: HybridPolicy, unit: torch.Tensor, size: np.ndarray) -> int:
    """How many states change their action within ``size``, by corners and by gradients."""
    action = policy.certify_unit(unit).action
    corners = shaken(unit, torch.from_numpy(size), 60)
    found = policy.scores(corners.flatten(0, 1)).argmax(1).reshape(60, -1).numpy() != action
    attacked = PGD(20, loss="margin", random_start=True, restarts=2)(policy, unit, torch.from_numpy(size))
    return int((found.any(0) | attacked.changed).sum())


@pytest.mark.parametrize("hidden", [(), (12,), (12, 8)])
def test_no_action_changes_within_its_radius(hidden):
    certified = 0
    for seed in range(8):
        inputs = 24 if seed % 2 else 3
        policy = build(seed, inputs, hidden=hidden, scale=2.0 if seed % 3 else 1.0)
        unit = torch.randn(100, inputs)
        radius = policy.certify_unit(unit).radius
        certified += int((radius > 0.01).sum())
        assert flips(policy, unit, 0.999 * radius) == 0
    assert certified > 200, "nothing was certified, so nothing was tested"


def test_no_action_changes_behind_bounded_convolutions():
    """The network of the ProcGen students, in small: convolutions, one sort layer, one linear layer."""
    certified = 0
    for seed in range(4):
        torch.manual_seed(seed)
        front = {"bounded_conv": ((8, 4, 2), (12, 3, 1)), "scale": 20.0}
        policy = HybridPolicy((3, 12, 12), 4, width=16, depth=1, hidden=(), **front).requires_grad_(False)
        unit = torch.rand(60, 3, 12, 12)
        policy.calibrate(unit)
        policy.trunk.bias.add_(policy.trunk.scores(unit).mean(0))
        policy.head.layers[-1].bias.sub_(policy.scores(unit).mean(0))
        radius = policy.certify_unit(unit).radius
        certified += int((radius > 0.001).sum())
        assert flips(policy, unit, 0.999 * radius) == 0
        assert flips(policy, unit, 8 * radius + 0.01) > 0, "an attack that never succeeds tests nothing"
    assert certified > 60


@pytest.mark.parametrize(("hidden", "factor"), [((), 1.5), ((12,), 6.0)])
def test_a_radius_that_is_too_large_is_caught(hidden, factor):
    """Intervals lose more with every layer, so a lie has to be bolder behind one."""
    policy, unit = build(0, inputs=24, hidden=hidden), torch.randn(200, 24)
    assert flips(policy, unit, factor * policy.certify_unit(unit).radius) > 10


def test_without_hidden_layers_the_radius_is_that_of_the_difference_of_weights():
    policy, unit = build(3, hidden=()), torch.randn(50, 3)
    weight, scores = policy.head.layers[0].weight.double(), policy.scores(unit).double()
    action = scores.argmax(1)
    gap = scores.gather(1, action[:, None]) - scores
    per_reach = (weight[action][:, None] - weight).abs().sum(2) * policy.trunk.lipschitz
    expected = torch.where(gap > 0, gap / per_reach, torch.inf).amin(1).numpy()
    found = policy.certify_unit(unit).radius
    assert (found <= expected).all()
    assert np.allclose(found, expected, rtol=2e-3, atol=1e-5)


def test_bounds_hold_for_features_in_the_box_and_rounding_only_lowers_them():
    torch.manual_seed(0)
    head = IntervalHead(6, (10, 7), 3).double().requires_grad_(False)
    centre, action = torch.randn(40, 6).double(), torch.randint(3, (40,))
    half = torch.rand(40, 1).double()
    leads, careful = (head.leads_within(centre, half, action, careful=flag) for flag in (False, True))
    assert torch.allclose(leads, careful, atol=1e-4)
    assert (careful <= leads).all()
    assert torch.allclose(leads, head.leads_over(centre - half, centre + half, action))
    for _ in range(200):
        scores = head(centre + half * (2 * torch.rand_like(centre) - 1))
        lead = scores.gather(1, action[:, None]) - scores
        assert (lead.scatter(1, action[:, None], torch.inf) >= leads - 1e-12).all()


def test_other_actions_are_reachable_only_beyond_the_radius():
    policy, unit = build(1), torch.randn(80, 3)
    certificate = policy.certify_unit(unit)
    eps = float(np.median(certificate.radius))
    reachable = policy.reachable(unit, eps)
    assert reachable[np.arange(80), certificate.action].all()
    assert (reachable.sum(1) == 1)[certificate.radius > eps].all()
    assert (reachable.sum(1) > 1)[certificate.radius < eps * 0.99].all()
    moved = shaken(unit, torch.full((80,), eps), 50)
    played = policy.scores(moved.flatten(0, 1)).argmax(1).reshape(50, 80)
    assert all(reachable[state, int(a)] for row in played for state, a in enumerate(row))


def test_intervals_over_the_whole_network_and_clipped_boxes_certify_no_less():
    policy, unit = build(2), torch.rand(40, 3)
    low, high = torch.zeros(3), torch.ones(3)
    radius = policy.certify_unit(unit).radius
    clipped = interval_radius(policy, unit, low, high)
    assert (clipped >= 0.999 * radius).all()
    action = torch.from_numpy(policy.certify_unit(unit).action)
    lo, hi = box_around(unit, torch.from_numpy(clipped)[:, None], low, high)
    for _ in range(100):
        inside = lo + (hi - lo) * torch.randint(2, unit.shape)
        assert ((policy.scores(inside).argmax(1) == action) | (torch.from_numpy(clipped) == 0)).all()


def test_saved_and_loaded_it_decides_alike(tmp_path):
    policy = build(5, normalizer=Normalizer([1.0, 2.0, 3.0], [2.0, 0.5, 1.0], clip=4.0))
    policy.save(tmp_path)
    loaded = sortrl.load(tmp_path)
    assert isinstance(loaded, HybridPolicy)
    obs = np.random.default_rng(0).normal(size=(30, 3))
    assert (loaded.certify(obs).radius == policy.certify(obs).radius).all()
    one = loaded.predict_certified(obs[0])
    assert one.action == policy.predict(obs[0])[0]
    assert one.radius == policy.certify(obs[:1]).radius[0]
    assert copy.deepcopy(loaded).scores(torch.zeros(1, 3)).shape == (1, 4)
    with pytest.raises(SortRLError, match="kind 'hybrid', expected 'sort'"):
        SortPolicy.load(tmp_path)


@pytest.mark.parametrize("hidden", [(), (12,), (12, 8)])
def test_the_independent_checker_agrees_and_catches_lies(hidden, tmp_path):
    policy, unit = build(4, hidden=hidden), torch.randn(50, 3)
    policy.save(tmp_path)
    certificate = policy.certify_unit(unit)
    save_certificates(tmp_path / "true.safetensors", policy, unit, certificate, tmp_path)
    verdict = verify(tmp_path / "true.safetensors")
    assert verdict.ok, verdict.failures
    assert 0 <= verdict.smallest_spare < 1e-3, "what is stated is nearly all that intervals prove"
    lie = replace(certificate, radius=certificate.radius * 1.01 + 1e-4)
    save_certificates(tmp_path / "false.safetensors", policy, unit, lie, tmp_path)
    assert len(verify(tmp_path / "false.safetensors").failures) == 50


def test_what_needs_sort_layers_alone_says_so():
    policy, unit = build(0), torch.zeros(1, 3)
    with pytest.raises(SortRLError, match="complete search needs a policy of sort layers alone"):
        exact_radius(policy, unit)
    with pytest.raises(SortRLError, match="at least 2"):
        HybridPolicy((3,), 1)


def demonstrations(n: int = 3000) -> Demonstrations:
    """A teacher of stripes and rings, which a single plane cannot tell apart."""
    obs = np.random.default_rng(0).uniform(-1, 1, size=(n, 2)).astype(np.float32)
    actions = (np.abs(obs[:, 0]) > 0.5).astype(np.int64) + (obs[:, 1] > 0)
    return Demonstrations("toy", obs, actions, np.eye(3, dtype=np.float32)[actions] * 5, np.arange(n) // 50)


def test_it_learns_with_wide_leads_and_resumes_to_the_same_bits(tmp_path):
    data, normalizer = demonstrations(), Normalizer.identity((2,))
    config = DistillConfig(eps=0.03, steps=240, batch=256, width=32, depth=2, head=(16,), theta_factor=2.2)
    whole = distill(data, normalizer, config, held_out=data, out_dir=tmp_path / "whole")
    assert whole.held_out["agreement"] > 0.9
    assert whole.held_out["certified"] > 0.6

    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] >= 130:
            raise Stop

    with pytest.raises(Stop):
        distill(data, normalizer, config, out_dir=tmp_path / "cut", progress=stop)
    resumed = distill(data, normalizer, config, out_dir=tmp_path / "cut").policy
    for name, tensor in whole.policy.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def images(n: int = 1200) -> Demonstrations:
    """A bright square on noise; the action is the quarter it is in."""
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 60, size=(n, 1, 12, 12)).astype(np.uint8)
    actions = rng.integers(4, size=n)
    for image, action, row, column in zip(obs, actions, rng.integers(4, size=n), rng.integers(4, size=n), strict=True):
        top, left = row + 6 * (action // 2), column + 6 * (action % 2)
        image[0, top : top + 2, left : left + 2] = 255
    return Demonstrations("toy", obs, actions, np.eye(4, dtype=np.float32)[actions] * 5, np.arange(n) // 20)


def test_convolutions_learn_images_and_their_worst_scores():
    """Without the worst scores in the loss there would be nothing to certify at this eps."""
    data, normalizer = images(), Normalizer.from_pixels((1, 12, 12))
    config = DistillConfig(
        eps=0.035,
        steps=200,
        batch=128,
        width=32,
        depth=1,
        head=(),
        scale=30.0,
        learning_rate=0.01,
        lambda_end=1.0,
        worst_share=0.5,
        bounded_conv=((8, 3, 1), (32, 10, 1)),
        conv_learning_rate=0.003,
        exact_share=0.15,
    )
    found = distill(data, normalizer, config, held_out=data)
    assert found.held_out["agreement"] > 0.9
    assert found.held_out["certified"] > 0.8
    careless = distill(data, normalizer, replace(config, worst_share=0.0, theta_factor=1e-6), held_out=data)
    assert careless.held_out["certified"] < 0.2
    with pytest.raises(SortRLError, match="worst_share needs a linear head"):
        replace(config, head=None)

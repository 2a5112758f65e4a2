"""Ordinary networks certified by intervals: radii are hunted for violations, files kept and refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sortrl
from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import IntervalConfig, IntervalPolicy
from sortrl.nets.float_bounds import box_around


def build(seed: int, shape: tuple[int, ...] = (3,), hidden: tuple[int, ...] = (12,), **more) -> IntervalPolicy:
    torch.manual_seed(seed)
    policy = IntervalPolicy(shape, 4, hidden=hidden, **more).requires_grad_(False)
    states = torch.randn(500, *shape)
    policy.head.layers[-1].bias.sub_(policy.scores(states).mean(0))  # no action is favoured, so that there are borders
    return policy


def flips(policy: IntervalPolicy, unit: torch.Tensor, size: np.ndarray) -> int:
    """How many states change their action within ``size``, by corners and by gradients."""
    action = policy.certify_unit(unit).action
    reach = torch.from_numpy(size).reshape(-1, *[1] * (unit.ndim - 1)).float()
    signs = torch.where(torch.rand(60, *unit.shape) < 0.5, -1.0, 1.0)
    found = policy.scores((unit + signs * reach).flatten(0, 1)).argmax(1).reshape(60, -1).numpy() != action
    attacked = PGD(20, loss="margin", random_start=True, restarts=2)(policy, unit, torch.from_numpy(size))
    return int((found.any(0) | attacked.changed).sum())


IMAGE = {"shape": (1, 6, 6), "conv": ((3, 3, 1),)}


@pytest.mark.parametrize(
    "design", [{"hidden": ()}, {}, {"hidden": (12, 8)}, {"shape": (2, 5)}, IMAGE, {**IMAGE, "norm": True}], ids=str
)
def test_no_action_changes_within_its_radius(design):
    certified = flipped_beyond = 0
    for seed in range(4):
        policy = build(seed, **design)
        unit = torch.randn(60, *policy.obs_shape)
        radius = policy.certify_unit(unit).radius
        certified += int((radius > 0.001).sum())
        assert flips(policy, unit, 0.9999 * radius) == 0
        flipped_beyond += flips(policy, unit, 20 * radius + 0.5)
    assert certified > 50, "nothing was certified, so nothing was tested"
    assert flipped_beyond > 50, "the hunt finds nothing at all"


def test_a_linear_policy_is_certified_to_its_true_radius():
    policy = build(0, hidden=())
    unit = torch.randn(40, 3)
    certificate = policy.certify_unit(unit)
    weight, scores = policy.head.layers[0].weight.double(), policy.scores(unit).double()
    for i, action in enumerate(certificate.action):
        gaps = (scores[i, action] - scores[i]) / (weight[action] - weight).abs().sum(1)
        true = float(gaps[gaps.isfinite() & (gaps > 0)].min())
        assert certificate.radius[i] == pytest.approx(min(true, 4.0), rel=2e-3)


def test_reachable_and_proven_agree_with_the_radius():
    policy = build(1)
    unit = torch.randn(50, 3)
    certificate = policy.certify_unit(unit)
    for eps in (0.01, 0.1):
        alone = policy.reachable(unit, eps).sum(1) == 1
        inside = certificate.radius > eps
        assert inside.any()
        assert not inside.all()
        assert (alone >= inside).all()
        lo, hi = box_around(unit, eps, None, None)
        assert (policy.proven(lo, hi, torch.from_numpy(certificate.action)).numpy() >= inside).all()


def test_no_states_are_certified_as_none():
    assert len(build(0).certify_unit(torch.zeros(0, 3))) == 0


@pytest.mark.parametrize("design", [{"hidden": (7, 5)}, {**IMAGE, "norm": True}], ids=["mlp", "image"])
def test_a_policy_is_read_back_as_it_was(design, tmp_path):
    policy = build(2, **design)
    policy.normalizer = Normalizer(torch.rand(policy.obs_shape), torch.rand(policy.obs_shape) + 0.5)
    policy.save(tmp_path)
    same = sortrl.load(tmp_path)
    assert isinstance(same, IntervalPolicy)
    assert same.config == policy.config
    obs = torch.rand(9, *policy.obs_shape)
    ours, theirs = policy.certify(obs), same.certify(obs)
    assert (ours.radius == theirs.radius).all()
    assert (ours.action == theirs.action).all()
    assert (same.predict(obs.numpy())[0] == ours.action).all()


def test_training_changes_play_and_certificates_together():
    policy = build(3)
    unit = torch.randn(30, 3)
    before = policy.certify_unit(unit)
    policy.head.layers[0].weight.data.mul_(3.0)
    after = policy.certify_unit(unit)
    assert (before.radius != after.radius).any()
    assert flips(policy, unit, 0.9999 * after.radius) == 0


@pytest.mark.parametrize(
    "fields", [{"hidden": (0,)}, {"n_actions": 1}, {"conv": ((4, 3, 1),)}, {"norm": 1}, {"conv": ((4, 3),)}], ids=str
)
def test_what_no_network_has_is_refused(fields):
    with pytest.raises(SortRLError, match="IntervalPolicy"):
        IntervalConfig(**{"obs_shape": (3,), "n_actions": 2, **fields})

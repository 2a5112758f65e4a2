"""Policies with continuous actions: no action moves farther than its certificate says, whatever is done to the policy's copies."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import sortrl
from sortrl.attacks.continuous import Farthest, WorstDirection
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import ContinuousPolicy, load_discrete
from sortrl.nets.sort import SortPolicy

LOW, HIGH = (-2.0, -1.0), (2.0, 3.0)


def policy_of(slope=(3.0, 0.5), scale=1.0, depth=3, rho=0.3, offset=0.0):
    """A policy whose weights and means are all of the size ``scale``."""
    generator = torch.Generator().manual_seed(1)
    policy = ContinuousPolicy(
        (4,), LOW, HIGH, slope, width=24, depth=depth, rho=rho, normalizer=Normalizer.identity((4,))
    )
    with torch.no_grad():
        for layer in policy.trunk.layers:
            layer.weight.normal_(generator=generator).mul_(scale).add_(offset)
        policy.trunk.calibrate(scale * torch.randn(200, 4, generator=generator))
        # In the middle of its range an action is free to move.
        policy.trunk.bias.add_(policy.trunk.scores(scale * torch.randn(200, 4, generator=generator)).mean(0))
    return policy.eval().requires_grad_(False)


def hunted(policy, unit, eps, bounds=None):
    """By how much, relative to its bounds, the farthest move found exceeds what is certified (> 0: a violation)."""
    found = bounds or policy.certify_unit(unit, eps)
    most = -np.inf
    generator = torch.Generator().manual_seed(0)
    corners = [
        (unit.double() + eps * torch.sign(torch.randn(unit.shape, generator=generator, dtype=torch.float64))).float()
        for _ in range(30)
    ]
    inside = [torch.minimum(torch.maximum(x, shrunk(unit, -eps)), shrunk(unit, eps)) for x in corners]
    attacked = [attack(policy, unit, eps, generator=generator).perturbed for attack in (Farthest(), WorstDirection())]
    for x in (*inside, *attacked):
        assert bool(((x.double() - unit.double()).abs() <= eps).all())
        action = policy.predict(policy.normalizer.to_raw(x).numpy())[0]
        np.testing.assert_array_equal(action, policy.actions(x).numpy())
        most = max(most, float((action - found.high).max()), float((found.low - action).max()))
    return most


def shrunk(unit, eps):
    """The end of an interval, rounded towards the state."""
    end = (unit.double() + eps).float()
    outside = (end.double() - unit.double()).abs() > abs(eps)
    return torch.where(outside, torch.nextafter(end, unit), end)


@pytest.mark.parametrize("rho", [0.0, 0.3])
@pytest.mark.parametrize(
    ("scale", "offset", "eps"), [(1.0, 0.0, 0.1), (1.0, 0.0, 1e-6), (1e-3, 1e3, 1e-4), (1e4, 0.0, 3.0)]
)
def test_no_action_moves_beyond_its_bound(scale, offset, eps, rho):
    policy = policy_of((3.0 / scale, 0.5 / scale), scale, rho=rho, offset=offset)
    unit = scale * torch.randn(100, 4, generator=torch.Generator().manual_seed(2))
    assert hunted(policy, unit, eps) <= 0.0
    moves = policy.certify_unit(unit, eps).moves
    free = (moves < np.array(HIGH) - np.array(LOW)).mean()
    assert free > 0.5 or offset, "most bounds must say something"


def test_the_bound_is_reached():
    """A bound that nothing comes near to would be sound and worthless, and the hunt would prove nothing."""
    policy, unit = policy_of(), torch.randn(200, 4, generator=torch.Generator().manual_seed(2))
    moved = WorstDirection(20, 0.2)(policy, unit, 0.1).distance.numpy()
    assert (moved / (policy.lipschitz * 0.1)).max() > 0.9
    assert (policy.certify_unit(unit, 0.1).moves <= policy.lipschitz * 0.1 + 1e-4).all()


def test_a_planted_wrong_constant_is_caught(monkeypatch):
    """The hunt finds a constant that is 15 % too small."""
    policy, unit = policy_of(), torch.randn(200, 4, generator=torch.Generator().manual_seed(2))
    assert hunted(policy, unit, 0.1) <= 0.0
    honest = ContinuousPolicy._steepness
    monkeypatch.setattr(ContinuousPolicy, "_steepness", lambda self, constant: 0.85 * honest(self, constant))
    assert hunted(policy, unit, 0.1) > 0.0


def test_rounding_is_part_of_the_bound():
    """Far from zero a float32 rounds by more than a tiny eps allows exactly computed scores to move."""
    policy = policy_of((3.0, 0.5), 1.0, offset=3e3)
    unit = torch.randn(300, 4, generator=torch.Generator().manual_seed(3))
    assert hunted(policy, unit, 1e-6) <= 0.0
    bounds = policy.certify_unit(unit, 1e-6)
    exact = copy.copy(bounds)
    object.__setattr__(exact, "low", bounds.action - policy.lipschitz * 1e-6)
    object.__setattr__(exact, "high", bounds.action + policy.lipschitz * 1e-6)
    assert hunted(policy, unit, 1e-6, exact) > 0.0


def test_copies_and_files_answer_and_certify_alike(tmp_path):
    policy, obs = policy_of(), np.random.default_rng(0).normal(size=(50, 4))
    policy.save(tmp_path)
    for twin in (
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        ContinuousPolicy.load(tmp_path),
        sortrl.load(tmp_path),
    ):
        np.testing.assert_array_equal(twin.predict(obs)[0], policy.predict(obs)[0])
        ours, theirs = policy.certify(obs, 0.1), twin.certify(obs, 0.1)
        np.testing.assert_array_equal(ours.low, theirs.low)
        np.testing.assert_array_equal(ours.high, theirs.high)
        assert hunted(twin, policy.normalize(obs), 0.1) <= 0.0


def test_weights_written_to_behind_its_back_change_play_and_certificate_together():
    policy, unit = policy_of(), torch.randn(50, 4)
    before = policy.certify_unit(unit, 0.1)
    with torch.no_grad():
        policy.trunk.layers[0].weight.mul_(3.0)
    after = policy.certify_unit(unit, 0.1)
    assert not np.array_equal(before.action, after.action)
    np.testing.assert_array_equal(after.action, policy.actions(unit).numpy())
    assert hunted(policy, unit, 0.1) <= 0.0


def test_one_observation_and_a_batch():
    policy, obs = policy_of(), np.zeros(4)
    action, state = policy.predict(obs, state="memory")
    assert action.shape == (2,)
    assert action.dtype == np.float32
    assert state == "memory"
    bounds = policy.predict_certified(obs, 0.1)
    assert bounds.low.shape == (2,)
    assert (bounds.low <= action).all()
    assert (action <= bounds.high).all()
    assert (bounds.moves > 0).all()


def test_actions_stay_in_their_range():
    policy = policy_of((300.0, 50.0))
    bounds = policy.certify_unit(torch.randn(500, 4), 5.0)
    assert (bounds.low >= LOW).all()
    assert (bounds.high <= HIGH).all()
    assert (bounds.action == np.array(HIGH)).any(), "some are clipped"


def test_wrong_shapes_and_numbers_are_refused():
    with pytest.raises(SortRLError, match="each low below its high"):
        ContinuousPolicy((3,), (1.0,), (-1.0,), (1.0,))
    with pytest.raises(SortRLError, match="positive slopes"):
        ContinuousPolicy((3,), (-1.0,), (1.0,), (0.0,))
    with pytest.raises(SortRLError, match="equally many"):
        ContinuousPolicy((3,), (-1.0,), (1.0, 2.0), (1.0,))
    with pytest.raises(SortRLError, match="a vector"):
        ContinuousPolicy((3, 8, 8), (-1.0,), (1.0,), (1.0,))
    policy = policy_of()
    with pytest.raises(SortRLError, match="eps is -1"):
        policy.certify(np.zeros((1, 4)), -1.0)
    with pytest.raises(SortRLError, match="NaN"):
        policy.certify_unit(torch.full((1, 4), torch.nan), 0.1)


def test_what_needs_a_list_of_actions_refuses_it(tmp_path):
    policy_of().save(tmp_path)
    with pytest.raises(SortRLError, match="continuous actions, and this is for discrete ones"):
        load_discrete(tmp_path)
    with pytest.raises(SortRLError, match="kind 'continuous'"):
        SortPolicy.load(tmp_path)


def test_huge_inputs_have_no_bound_but_the_range():
    policy = policy_of()
    bounds = policy.certify_unit(torch.full((1, 4), 1e31), 0.1)
    assert (bounds.low == LOW).all()
    assert (bounds.high == HIGH).all()

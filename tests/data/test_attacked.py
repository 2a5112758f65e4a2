"""What helps a Lipschitz student: a smoothed teacher, one that is decided at the start, and states that an adversary leads to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import balancer
from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.data.attacked import UnderAttack
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.envs import describe
from sortrl.teachers import decided_at_start, load_teacher, smoothed

CARTPOLE = "CartPole-v1"


@pytest.fixture(scope="module")
def student():
    teacher = balancer()
    data = collect(teacher, CARTPOLE, CollectConfig(states=2000), seed=0)
    return distill(data, teacher.normalizer, DistillConfig(width=24, depth=3, steps=120, eps=0.1)).policy


def test_smoothing_a_linear_rule_changes_no_decision():
    """Displacements come in opposite pairs, so the mean of what is linear is what it was."""
    unit = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    teacher = balancer()
    torch.testing.assert_close(smoothed(teacher, 0.3).scores(unit), teacher.scores(unit), atol=1e-4, rtol=1e-4)


def test_smoothing_removes_a_thin_region():
    thin = load_teacher(lambda obs: (np.abs(obs[:, 0]) < 0.01).astype(int), env_id=CARTPOLE)
    centre = torch.zeros(1, 4)
    assert int(thin.scores(centre).argmax()) == 1
    assert int(smoothed(thin, 0.1).scores(centre).argmax()) == 0


def test_an_actor_critic_is_averaged_in_probability():
    class Step(torch.nn.Module):
        def forward(self, unit: torch.Tensor) -> torch.Tensor:
            push = 100.0 * unit[:, :1].sign()
            return torch.cat([-push, push], 1)

    teacher = load_teacher(Step(), env_id=CARTPOLE)
    teacher.algorithm = "ppo"
    wide = smoothed(teacher, 0.5)
    shares = wide.scores(torch.tensor([[0.25, 0.0, 0.0, 0.0]])).softmax(1)[0]
    votes = wide.body.noise[:, 0] > -0.25
    torch.testing.assert_close(shares[1], votes.float().mean())


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_sigma_is_refused(sigma):
    with pytest.raises(SortRLError, match="sigma"):
        smoothed(balancer(), sigma)


def test_near_the_start_a_teacher_has_one_mind_and_elsewhere_its_own():
    teacher, radius = balancer(), 0.2
    decided = decided_at_start(teacher, CARTPOLE, radius)
    low, high, action = decided.body.low, decided.body.high, decided.body.action
    near = low + (high - low) * torch.rand(500, 4, generator=torch.Generator().manual_seed(0))
    push = 0.99 * radius * torch.randn(500, 4, generator=torch.Generator().manual_seed(1)).sign()
    far = high + 1.01 * radius + torch.rand(500, 4, generator=torch.Generator().manual_seed(2))
    assert len(teacher.scores(near + push).argmax(1).unique()) == 2  # it had two before
    assert (decided.scores(near + push).argmax(1) == action).all()
    assert torch.equal(decided.scores(far), teacher.scores(far))


def test_the_action_at_the_start_is_the_one_with_most_weight_there():
    class Leaning(torch.nn.Module):
        """Far from sure of the left in half of the states, and quite sure of the right in the other half."""

        def forward(self, unit: torch.Tensor) -> torch.Tensor:
            lead = torch.where(unit[:, 0] > 0, torch.tensor(5.0), torch.tensor(-0.1))
            return torch.stack([torch.zeros_like(lead), lead], 1)

    teacher = load_teacher(Leaning(), env_id=CARTPOLE)
    assert decided_at_start(teacher, CARTPOLE, 0.1).body.action == 1


def test_every_episode_then_begins_with_the_same_label():
    decided = decided_at_start(balancer(), CARTPOLE, 0.3)
    labels = {}
    for name, teacher in (("own", balancer()), ("decided", decided)):
        data = collect(teacher, CARTPOLE, CollectConfig(states=400, random_actions=0.5, exploration=1.0), seed=0)
        first = np.append(True, data.episodes[1:] != data.episodes[:-1])
        labels[name] = set(data.actions[first].tolist())
    assert labels["own"] == {0, 1}
    assert labels["decided"] == {decided.body.action}


@pytest.mark.parametrize("radius", [0.0, -1.0, float("nan"), float("inf")])
def test_a_senseless_radius_is_refused(radius):
    with pytest.raises(SortRLError, match="radius"):
        decided_at_start(balancer(), CARTPOLE, radius)


def test_an_actor_under_attack_plays_what_the_attack_makes_of_the_policy(student):
    obs = collect(balancer(), CARTPOLE, CollectConfig(states=400), seed=3).obs
    actor = UnderAttack(student, describe(CARTPOLE), eps=0.5, seed=0)
    played, _ = actor.predict(obs)
    unit = student.normalize(obs)
    expected = PGD(5, 0.4)(student, unit, torch.from_numpy(actor.sizes), actor.low, actor.high).action
    certificate = student.certify_unit(unit)
    np.testing.assert_array_equal(played, expected)  # also where certified states were skipped
    assert (certificate.radius > actor.sizes).any()
    assert 0.05 < (played != certificate.action).mean() < 0.95


def test_sizes_last_and_are_drawn_from_the_seed(student):
    obs = np.zeros((50, 4), np.float32)
    actor = UnderAttack(student, describe(CARTPOLE), eps=0.2, seed=1)
    actor.predict(obs)
    first = actor.sizes.copy()
    actor.predict(obs)
    assert 0 < first.min() < first.max() < 0.2
    assert (actor.sizes == first).mean() > 0.8
    again = UnderAttack(student, describe(CARTPOLE), eps=0.2, seed=1)
    again.predict(obs)
    np.testing.assert_array_equal(again.sizes, first)


def test_attacked_collection_visits_other_states_but_keeps_the_teachers_labels(student):
    teacher, config = balancer(), CollectConfig(states=2000, exploration=0.0)
    actor = UnderAttack(student, describe(CARTPOLE), eps=2.0, seed=0)
    attacked = collect(teacher, CARTPOLE, config, seed=5, actor=actor)
    calm = collect(teacher, CARTPOLE, config, seed=5, actor=student)
    assert np.abs(attacked.obs[:, 3]).mean() > 1.2 * np.abs(calm.obs[:, 3]).mean()
    np.testing.assert_array_equal(attacked.actions, teacher.predict(attacked.obs)[0])

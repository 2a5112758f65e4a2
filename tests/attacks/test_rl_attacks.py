"""Attacks that know about actions, values and time: each does what its paper says, within its budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from helpers import balancer
from sortrl import attacks
from sortrl.attacks.learned import LearnedAdversary, train_adversary
from sortrl.attacks.schedule import CriticalPoints, Strategic
from sortrl.attacks.valid import valid_range
from sortrl.attacks.values import action_values
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.envs import describe
from sortrl.evaluate.returns import evaluate
from sortrl.teachers import Teacher, load_teacher

ENV = "CartPole-v1"
FRAGILE = 0.25  # of the balancer: PGD hardly lowers its return, yet it can be toppled


class Linear(nn.Module):
    """Three actions over two inputs, so that what is reachable can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))

    def forward(self, unit):
        return unit @ self.weight.T


def linear(algorithm: str = "module") -> Teacher:
    return Teacher(Linear(), Normalizer.identity((2,)), 3, "linear", algorithm)


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=4000), seed=0)
    config = DistillConfig(eps=0.05, steps=300, batch=256, width=48, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def states(student):
    return student.normalize(collect(balancer(), ENV, CollectConfig(states=600), seed=9).obs)


@pytest.fixture(scope="module")
def adversary(tmp_path_factory):
    """Trained on the hand-written teacher, and kept."""
    folder, rows = tmp_path_factory.mktemp("adversary"), []
    before = torch.get_rng_state()
    trained = train_adversary(balancer(), ENV, FRAGILE, 16_384, seed=0, directory=folder, progress=rows.append)
    assert torch.equal(torch.get_rng_state(), before), "training must leave the caller's generators alone"
    return trained, folder, rows


def everything(adversary):
    teacher = balancer()
    return [
        attacks.MinBest(),
        attacks.MinBest(surrogate_p=32.0),
        attacks.MinQ(teacher),
        attacks.Transfer(teacher, attacks.PGD(10)),
        attacks.Aimed(),
        adversary[0],
    ]


@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_budget_valid_range_and_certificates_hold(student, states, adversary, eps):
    low, high = valid_range(student, describe(ENV))
    certified = student.certify_unit(states).certified_at(eps)
    changed = 0
    for attack in everything(adversary):
        result = attack(student, states, eps, low, high, torch.Generator().manual_seed(0))
        assert float((result.perturbed.double() - states.double()).abs().max()) <= eps, attack.name
        assert (result.perturbed <= torch.maximum(high, states)).all(), attack.name
        assert (result.perturbed >= torch.minimum(low, states)).all(), attack.name
        assert not result.changed[certified].any(), attack.name
        changed += result.changed.sum()
    assert certified.any() or eps > 0.1
    assert changed > 0


def test_aimed_reaches_exactly_what_can_be_reached():
    # Action 1 is played where x1 > 0 and x1 > x2: from (-a, 0), that needs eps > a; action 2 from (0.3, -0.1) needs 0.2.
    unit = torch.tensor([[-0.1, 0.0], [-0.3, 0.0], [0.3, -0.1], [0.3, -0.3]])
    policy, eps = linear(), 0.21
    aimed = attacks.Aimed().at(np.array([1, 1, 2, 2]))
    result = aimed(policy, unit, eps)
    assert result.action.tolist() == [1, 0, 2, 1]
    assert torch.equal(result.perturbed[[1, 3]], unit[[1, 3]]), "what cannot be reached is left alone"
    member = attacks.Ensemble((attacks.FGSM(), aimed))
    assert member(policy, unit, eps).changed[[0, 2]].all(), "aims are looked up by place in the batch"
    with pytest.raises(SortRLError, match="4 aims for 3 states"):
        aimed(policy, unit[:3], eps)


def test_without_aims_the_worst_scored_action_is_wanted():
    unit = torch.tensor([[0.2, -0.1]])  # scores 0, .2, -.1: action 2 is the last
    assert attacks.Aimed()(linear(), unit, 0.2).action.tolist() == [2]


def test_min_best_lowers_the_best_score(student, states):
    found = attacks.MinBest()(student, states, 0.1)
    clean = torch.from_numpy(found.clean_action)[:, None]
    before, after = (student.scores(x).gather(1, clean)[:, 0] for x in (states, found.perturbed))
    assert float((after < before).float().mean()) > 0.95


def test_min_q_makes_the_policy_do_what_is_worth_least():
    unit = torch.tensor([[0.3, 0.25], [0.3, 0.0]])  # plays 1; 2 is near in the first, 0 nearer in value
    values = torch.tensor([[0.0, 9.0, 8.0], [0.0, 9.0, 8.0]])

    class Valued(Teacher):
        def values(self, unit):
            return values[: len(unit)]

    judge = Valued(Linear(), Normalizer.identity((2,)), 3, "valued")
    assert torch.equal(action_values(judge, unit), values)
    eps = 0.4
    by_value, by_margin = (attack(linear(), unit, eps).action for attack in (attacks.MinQ(judge), attacks.PGD(10)))
    assert by_value.tolist() == [0, 0]
    assert by_margin.tolist() != [0, 0], "the nearest other action is not the worst one"


def test_values_of_an_actor_critic_are_log_probabilities():
    unit = torch.tensor([[0.3, 0.25]])
    assert torch.allclose(action_values(linear("ppo"), unit).exp().sum(1), torch.ones(1))
    assert torch.equal(action_values(linear("dqn"), unit), linear().scores(unit))


def test_min_q_never_leads_to_a_better_action(student, states):
    teacher = balancer()
    found = attacks.MinQ(teacher)(student, states, 0.3)
    values = action_values(teacher, states)
    worth = [values.gather(1, torch.from_numpy(a)[:, None]) for a in (found.clean_action, found.action)]
    assert (worth[1] <= worth[0]).all()
    assert found.changed.any()


def test_transfer_searches_on_the_source_and_judges_on_the_target(states):
    source = balancer()
    direct = attacks.PGD(10)(source, states, 0.2)
    itself = attacks.Transfer(source, attacks.PGD(10))(source, states, 0.2)
    assert torch.equal(itself.perturbed, direct.perturbed)
    assert itself.gradients == direct.gradients > 0
    black_box = load_teacher(lambda obs: source.predict(obs)[0], env_id=ENV, normalizer=source.normalizer)
    assert (attacks.Transfer(source, attacks.PGD(10))(black_box, states, 0.2).changed == direct.changed).all()


def test_transfer_refuses_other_units(states):
    other = Teacher(balancer().body, Normalizer.identity((4,)), 2)
    with pytest.raises(SortRLError, match="different units"):
        attacks.Transfer(balancer(), attacks.PGD(10))(other, states, 0.2)


def test_strategic_attacks_only_where_the_policy_is_sure():
    attack, teacher = attacks.PGD(10), balancer()

    def play(threshold, steps):
        return evaluate(teacher, ENV, attack, 0.3, episodes=4, when=Strategic(threshold, steps))

    never, seldom, often = play(0.999, 20), play(0.3, 20), play(0.0, 20)
    assert never.attacked_share == never.changed_share == 0
    assert 0 < seldom.attacked_share < often.attacked_share
    changed = round(often.changed_share * int(often.lengths.sum()))
    assert 0 < changed <= 20 * 4, "the budget counts changed actions per episode"
    assert often.timing == "strategic-0-20"
    assert often.attack_parameters["when"] == {"threshold": 0.0, "steps": 20, "guide": None}


def test_the_guide_decides_when(student):
    calm = Teacher(nn.Sequential(nn.Linear(4, 2, bias=False)), balancer().normalizer, 2, "calm")
    with torch.no_grad():
        calm.body[0].weight.zero_()
    spared = evaluate(student, ENV, attacks.PGD(10), 0.3, episodes=2, when=Strategic(0.1, 50, guide=calm))
    assert spared.attacked_share == 0
    guided = evaluate(student, ENV, attacks.PGD(10), 0.3, episodes=2, when=Strategic(0.1, 50, guide=balancer()))
    assert guided.attacked_share > 0
    assert guided.attack_parameters["when"]["guide"] == "balancer"


def test_timed_attacks_spare_certified_states_and_lose_nothing(student):
    fast, slow = (
        evaluate(
            student,
            ENV,
            attacks.PGD(10),
            0.1,
            episodes=3,
            when=Strategic(0.0, 30),
            skip_certified=skip,
        )
        for skip in (True, False)
    )
    assert (fast.returns == slow.returns).all()
    assert fast.attacked_share < slow.attacked_share


def test_critical_points_do_more_harm_with_fewer_changes():
    teacher, eps = balancer(), 0.3
    everywhere = evaluate(teacher, ENV, attacks.PGD(10), eps, episodes=2, seed=1)
    timing = CriticalPoints(horizon=40, damage=1.0, steps=100, strokes=10)
    critical = evaluate(teacher, ENV, attacks.Aimed(), eps, episodes=2, seed=1, when=timing)
    assert critical.mean < everywhere.mean < 500
    changes = [result.changed_share * result.lengths.sum() for result in (critical, everywhere)]
    assert changes[0] < 0.8 * changes[1]
    harmless = CriticalPoints(horizon=5, damage=1.0, steps=60, strokes=1)  # nothing falls within five steps
    spared = evaluate(teacher, ENV, attacks.Aimed(), eps, episodes=1, seed=1, when=harmless)
    assert (spared.mean, spared.attacked_share) == (500.0, 0.0)


def test_the_learned_adversary_hurts_more_than_pgd(adversary):
    trained, _, rows = adversary
    pgd, learned = (
        evaluate(balancer(), ENV, attack, FRAGILE, episodes=6, seed=2) for attack in (attacks.PGD(10), trained)
    )
    assert learned.mean < 0.75 * pgd.mean
    assert rows[-1]["total"] == 16_384
    assert 0 < rows[-1]["return"] <= 500
    assert learned.attack_parameters["env_id"] == ENV
    assert learned.attack_parameters["inner"]["kind"] == "Aimed"


def test_the_learned_adversary_is_kept_without_a_pickle(adversary, states, tmp_path):
    trained, folder, _ = adversary
    again = LearnedAdversary.load(folder)
    assert again.eps_unit == FRAGILE
    assert torch.equal(again(balancer(), states, FRAGILE).perturbed, trained(balancer(), states, FRAGILE).perturbed), (
        "what is read back is what was trained"
    )
    balancer_like = tmp_path / "adversary.safetensors"
    balancer_like.write_bytes(b"nonsense")
    with pytest.raises(SortRLError, match="not a readable"):
        LearnedAdversary.load(tmp_path)


def test_a_learned_adversary_of_a_black_box_needs_no_gradient(states):
    source = balancer()
    black_box = load_teacher(lambda obs: source.predict(obs)[0], env_id=ENV, normalizer=source.normalizer)
    trained = train_adversary(black_box, ENV, 0.5, steps=1, seed=1, director=False)
    assert not trained.needs_gradient
    twin = train_adversary(black_box, ENV, 0.5, steps=1, seed=1, director=False)
    found = [one(black_box, states, 0.5).perturbed for one in (trained, twin)]
    assert torch.equal(*found), "the seed fixes the training"
    assert float((found[0] - states).abs().max()) > 0


BAD_INPUT = {
    "no steps": (lambda: attacks.MinBest(steps=0), "steps=0"),
    "no aim": (lambda: attacks.Aimed(step_share=0.0), r"step_share=0\.0"),
    "values of others": (
        lambda: attacks.MinQ(linear())(Teacher(nn.Flatten(), Normalizer.identity((2,)), 2), torch.zeros(1, 2), 0.1),
        "values of 3 actions",
    ),
    "threshold": (lambda: Strategic(threshold=1.0), r"threshold=1\.0"),
    "strokes": (lambda: CriticalPoints(horizon=3, strokes=5), "strokes=5"),
    "not aimed": (
        lambda: evaluate(balancer(), ENV, attacks.PGD(10), 0.3, 1, when=CriticalPoints(40, strokes=10)),
        r"Use attacks\.Aimed",
    ),
    "adversary eps": (lambda: train_adversary(balancer(), ENV, 0.0), r"eps=0\.0"),
    "suite": (lambda: attacks.suite("fast"), "Unknown suite 'fast'"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call()

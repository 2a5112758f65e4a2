"""A certified return is a promise: no attack, and no choice among the actions it counts as possible, goes below it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import balancer
from sortrl import attacks
from sortrl.certify.returns import certified_return
from sortrl.core.errors import SortRLError
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.envs import Simulator
from sortrl.evaluate.returns import episode_seeds, evaluate
from sortrl.nets import SortPolicy

ENV = "CartPole-v1"
SEED = 2
EPISODES = 4


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=3000), seed=0)
    config = DistillConfig(eps=0.05, steps=200, batch=256, width=32, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def clean(student):
    return evaluate(student, ENV, episodes=EPISODES, seed=SEED)


@pytest.fixture(scope="module")
def levels(clean):
    """One eps at which half of the episodes are certified whole, and larger ones at which none is."""
    least = [part.min() for part in np.split(clean.radii, np.cumsum(clean.lengths)[:-1])]
    return (0.999 * float(np.median(least)), 0.01, 0.05, 0.2)


@pytest.fixture(scope="module")
def found(student, levels):
    return {
        eps: [certified_return(student, ENV, eps, s, budget=600) for s in episode_seeds(SEED, EPISODES)]
        for eps in levels
    }


@pytest.mark.parametrize("n_actions", [2, 5])
def test_reachable_actions_hold_every_action_an_attack_reaches(n_actions):
    torch.manual_seed(0)
    policy = SortPolicy((4,), n_actions, width=32, depth=3).eval().requires_grad_(False)
    states = torch.randn(400, 4)
    policy.calibrate(states)
    excluded = 0
    for eps in (0.01, 0.05, 0.2):
        reachable = policy.reachable(states, eps)
        certificate = policy.certify_unit(states)
        rows = np.arange(len(states))
        assert reachable[rows, certificate.action].all()
        assert ((reachable.sum(1) == 1) == (certificate.radius > eps)).all()
        excluded += int((~reachable[certificate.radius <= eps]).sum())
        for attack in (attacks.PGD(10), attacks.FGSM(), attacks.UniformNoise()):
            assert reachable[rows, attack(policy, states, eps).action].all()
    assert n_actions == 2 or excluded > 50, "with many actions, some of them must be out of reach"


def test_exact_means_the_same_return_under_any_attack(student, clean, levels, found):
    exact = np.array([result.exact for result in found[levels[0]]])
    assert 1 <= exact.sum() < EPISODES, "the test needs whole and broken episodes"
    for attack in (attacks.PGD(10), attacks.UniformNoise()):
        attacked = evaluate(student, ENV, attack, levels[0], EPISODES, SEED, skip_certified=False)
        assert (attacked.returns[exact] == clean.returns[exact]).all()
    for result, total, length in zip(found[levels[0]], clean.returns, clean.lengths, strict=True):
        if result.exact:
            assert (result.lower, result.prefix, result.nodes, result.complete) == (total, length, length, True)


def test_no_attack_goes_below_the_bound(student, levels, found):
    for eps in levels:
        lower = np.array([result.lower for result in found[eps]])
        for attack in (attacks.PGD(10), attacks.FGSM(), attacks.UniformNoise()):
            assert (evaluate(student, ENV, attack, eps, EPISODES, SEED).returns >= lower).all()


@pytest.mark.parametrize("env", [ENV, "MountainCar-v0"])
def test_no_choice_among_the_reachable_actions_goes_below_the_bound(student, levels, found, env):
    generator, broken = np.random.default_rng(0), 0
    if env == ENV:
        cases = [(student, eps, result) for eps in levels[1:] for result in found[eps][:2]]
    else:
        torch.manual_seed(3)
        policy = SortPolicy((2,), 3, width=16, depth=3).eval().requires_grad_(False)
        policy.calibrate(torch.randn(200, 2))
        cases = [(policy, 1.0, certified_return(policy, env, 1.0, 7, budget=700))]
    for policy, eps, result in cases:
        for _ in range(3):
            simulator, choices = Simulator(env, result.seed), 0
            while not simulator.done:
                reachable = np.flatnonzero(policy.reachable(policy.normalize(simulator.obs[None]), eps)[0])
                assert len(reachable) == 1 or simulator.length >= result.prefix
                choices += len(reachable) > 1
                simulator.step(int(generator.choice(reachable)))
            assert simulator.total >= result.lower
            broken += choices > 0
    assert broken > 0


def test_the_bound_says_more_than_the_prefix_and_rises_with_the_budget(student, levels):
    seed = episode_seeds(SEED, 1)[0]
    bounds = [certified_return(student, ENV, 0.05, seed, budget=budget) for budget in (50, 300, 1500)]
    values = [bound.lower for bound in bounds]
    assert values == sorted(values)
    assert bounds[-1].lower > bounds[-1].prefix + 1
    assert not bounds[0].complete
    smaller = certified_return(student, ENV, 0.01, seed, budget=300)
    assert smaller.lower >= bounds[1].lower


def test_a_complete_search_finds_the_worst_return_there_is():
    """Where every action can be forced at every step, against all sequences of actions, tried one by one."""
    policy = SortPolicy((4,), 2, width=8, depth=2).eval().requires_grad_(False)
    result = certified_return(policy, ENV, 1e6, seed=0, budget=20_000)
    playing, steps = [Simulator(ENV, 0)], 0
    while not any(simulator.done for simulator in playing):
        twins = [(action, simulator.fork()) for simulator in playing for action in (0, 1)]
        for action, twin in twins:
            twin.step(action)
        playing, steps = [twin for _, twin in twins], steps + 1
    assert (result.lower, result.prefix, result.exact, result.complete) == (steps, 0, False, True)


def test_without_a_least_reward_nothing_is_claimed(student):
    torch.manual_seed(1)
    policy = SortPolicy((8,), 4, width=16, depth=3).eval().requires_grad_(False)
    result = certified_return(policy, "LunarLander-v3", 10.0, 0, budget=60)
    assert not result.complete
    assert result.lower is None
    bounded = certified_return(policy, "LunarLander-v3", 10.0, 0, budget=60, reward_floor=-200.0)
    assert bounded.lower is not None
    assert bounded.lower < -1000


BAD_INPUT = {
    "eps": (lambda p: certified_return(p, ENV, -0.1, 0), r"eps is -0\.1"),
    "budget": (lambda p: certified_return(p, ENV, 0.1, 0, budget=0), "budget 0"),
    "environment": (lambda p: certified_return(p, "CartPol-v1", 0.1, 0), "Did you mean CartPole-v1"),
    "a wrong floor": (lambda p: certified_return(p, ENV, 0.1, 0, reward_floor=2.0), r"paid 1\.0 for a step"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case, student):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call(student)

"""Decisions carry their certificates, and a monitor says and does what it should where they are too small."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import sortrl
from helpers import balancer
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Decision
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.evaluate.monitor import Monitor
from sortrl.nets import SortPolicy

ENV = "CartPole-v1"
EPS = 0.05


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=3000), seed=0)
    config = DistillConfig(eps=EPS, steps=200, batch=256, width=32, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def observations():
    return collect(balancer(), ENV, CollectConfig(states=1500), seed=5).obs


def play(monitor, seed=0):
    infos = []
    obs, _ = monitor.reset(seed=seed)
    done = False
    while not done:
        obs, _, terminated, truncated, info = monitor.step(monitor.decide(obs))
        infos.append(info)
        done = terminated or truncated
    return infos


def test_a_decision_is_the_prediction_with_its_certificate(student, observations):
    batch, certificate = student.predict_certified(observations), student.certify(observations)
    assert (batch.action == student.predict(observations)[0]).all()
    assert (batch.action == certificate.action).all()
    assert (batch.radius == certificate.radius).all()
    assert (batch.runner_up == certificate.runner_up).all()
    assert 0.1 < batch.certified_at(EPS).mean() < 1
    for index in range(0, 300, 7):
        one = student.predict_certified(observations[index])
        assert (one.action, one.runner_up) == (batch.action[index], batch.runner_up[index])
        assert one.radius == pytest.approx(batch.radius[index], rel=1e-5, abs=1e-6)
        assert one.action.shape == one.radius.shape == ()


@pytest.mark.parametrize("n_actions", [2, 5])
def test_of_equal_scores_the_first_action_is_played_and_nothing_is_certified(n_actions):
    policy = SortPolicy((3,), n_actions, width=8, depth=2)
    with torch.no_grad():
        policy.layers[-1].weight.copy_(policy.layers[-1].weight[:1].expand_as(policy.layers[-1].weight))
    one, batch = policy.predict_certified(np.ones(3)), policy.predict_certified(np.ones((4, 3)))
    assert (int(one.action), int(one.runner_up), float(one.radius)) == (0, 1, 0.0)
    assert (batch.action == policy.predict(np.ones((4, 3)))[0]).all()
    assert (batch.runner_up == 1).all()
    assert (batch.radius == 0).all()


def test_a_certificate_follows_a_change_of_the_network():
    policy = SortPolicy((3,), 2, width=8, depth=3, scale=2.0)
    before = policy.predict_certified(np.ones(3))
    with torch.no_grad():
        policy.front[0].factor.mul_(3.0)
    assert policy.error_bound().lipschitz == pytest.approx(policy.lipschitz, rel=1e-12)
    assert policy.lipschitz > 5.9
    policy.layers[1].mix = policy.layers[1].mix * 2
    assert policy.error_bound().lipschitz > 11.9
    assert before.radius >= 0


@pytest.mark.parametrize("clip", [10.0, np.inf])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_decision_on_what_is_not_a_number(bad, clip):
    policy = SortPolicy((3,), 2, width=8, depth=2, normalizer=Normalizer(np.zeros(3), np.ones(3), clip))
    for obs in (np.array([0.0, bad, 0.0]), np.array([[0.0, 0.0, 0.0], [bad, 0.0, 0.0]])):
        with pytest.raises(SortRLError, match="NaN or infinity"):
            policy.predict_certified(obs)


def test_infos_and_summary_tell_the_episode(student):
    monitor = sortrl.Monitor(gym.make(ENV), student, eps=EPS)
    infos = play(monitor)
    radii = np.array([info["radius"] for info in infos])
    summary = monitor.summary()
    assert (monitor.radii == radii).all()
    assert all(info["certified"] == (info["radius"] > EPS) for info in infos)
    assert not any(info["handed_over"] for info in infos), "without a fallback the policy plays on"
    assert summary.steps == summary.total == len(infos)
    assert summary.certified_share == np.mean(radii > EPS)
    assert 0 < summary.certified_share < 1
    assert (summary.least_radius, summary.least_radius_step) == (radii.min(), radii.argmin())
    assert summary.finished
    assert f"{len(infos)} steps" in str(summary)
    assert monitor.reset(seed=1) is not None
    with pytest.raises(SortRLError, match="nothing to sum up"):
        monitor.summary()


def test_every_uncertified_decision_is_reported(student):
    events = []
    monitor = Monitor(gym.make(ENV), student, EPS, on_uncertified=events.append)
    infos = play(monitor)
    assert [event.step for event in events] == [i for i, info in enumerate(infos) if not info["certified"]]
    assert len(events) > 0
    for event in events[:20]:
        assert student.predict_certified(event.obs) == event.decision
        assert event.decision.radius <= event.eps_unit == EPS


FALLBACKS = {
    "a teacher": lambda: balancer(),
    "a callable": lambda: lambda obs: balancer().predict(obs)[0],
    "an action": lambda: 1,
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_the_fallback_decides_where_the_policy_may_not(student, kind):
    fallback = FALLBACKS[kind]()
    monitor = Monitor(gym.make(ENV), student, EPS, fallback=fallback)
    obs, _ = monitor.reset(seed=3)
    handed = 0
    for _ in range(60):
        action, own = monitor.decide(obs), student.predict_certified(obs)
        expected = 1 if kind == "an action" else int(balancer().predict(obs)[0])
        assert action == (int(own.action) if own.radius > EPS else expected)
        obs, _, terminated, _, info = monitor.step(action)
        assert info["handed_over"] == (own.radius <= EPS)
        handed += info["handed_over"]
        if terminated:
            break
    assert monitor.summary().handed_over == handed > 0


def test_a_safe_fallback_saves_the_episode(student):
    """At an eps that certifies nothing the fallback plays alone, so that the return is its own."""
    monitor = Monitor(gym.make(ENV), student, eps=1e6, fallback=balancer())
    play(monitor)
    assert monitor.summary().total == 500
    assert monitor.summary().handed_over == 500


def test_who_plays_another_action_has_taken_over(student):
    monitor = Monitor(gym.make(ENV), student, eps=0.0)
    obs, _ = monitor.reset(seed=0)
    assert monitor.step(1 - monitor.decide(obs))[4]["handed_over"]


def _monitor(**changes):
    arguments = {"env": gym.make(ENV), "policy": SortPolicy((4,), 2, width=8, depth=2), "eps": 0.1, **changes}
    return Monitor(**arguments)


def _started(**changes):
    monitor = _monitor(**changes)
    monitor.reset(seed=0)
    return monitor


BAD_INPUT = {
    "eps": (lambda: _monitor(eps=-1.0), r"eps is -1\.0"),
    "eps NaN": (lambda: _monitor(eps=float("nan")), "eps is nan"),
    "vector env": (lambda: _monitor(env=gym.make_vec(ENV, 2)), "expected one gymnasium environment"),
    "no certificates": (lambda: _monitor(policy=balancer()), "expected a SortPolicy"),
    "other task": (lambda: _monitor(env=gym.make("Acrobot-v1")), r"Discrete\(3\)"),
    "other shape": (lambda: _monitor(policy=SortPolicy((5,), 2, width=8, depth=2)), r"shape \(4,\)"),
    "fallback action": (lambda: _monitor(fallback=2), "fallback is action 2"),
    "fallback kind": (lambda: _monitor(fallback="stop"), "fallback is str"),
    "fallback answer": (
        lambda: _started(fallback=lambda obs: 7, eps=1e6).decide(np.zeros(4)),
        "the fallback answered 7",
    ),
    "step first": (lambda: _started().step(0), "step without a decision"),
    "batch": (lambda: _started().decide(np.zeros((2, 4))), r"shape \(2, 4\)"),
    "NaN": (lambda: _started().decide(np.full(4, np.nan)), "NaN or infinity"),
    "decision shapes": (lambda: Decision(np.zeros(2, int), np.zeros(3), np.zeros(2, int)), "equal shapes"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call()

"""Training a teacher on under attack: it helps, it never returns a worse one, it resumes, and it refuses what it cannot do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.envs import describe
from sortrl.teachers import Architecture, HardenConfig, Teacher, hardened, hardening, load_teacher
from sortrl.teachers.proximal import Rollout, advantages

CARTPOLE = "CartPole-v1"
ARCHITECTURE = Architecture(obs_shape=(4,), n_actions=2, hidden=(), activation="Tanh")
QUICK = HardenConfig(eps=0.1, steps=256, n_envs=4, n_steps=16, batch_size=32, check_episodes=4, seed=3)


def pilot(weights=(0.0, 0.5, 5.0, 1.0)) -> Teacher:
    """A linear rule: push to the right if the weighted sum of the observation is positive."""
    tensors = {"1.weight": torch.tensor([[0.0] * 4, list(weights)]), "1.bias": torch.zeros(2)}
    body = ARCHITECTURE.build_with(tensors, "weights")
    return Teacher(body, Normalizer.identity((4,)), 2, "pilot", "ppo", ARCHITECTURE)


def equal(one: Teacher, other: Teacher) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_the_adversary_keeps_its_distance_and_changes_what_a_linear_rule_leaves_to_change():
    teacher, unit = pilot(), 0.3 * torch.randn(500, 4)
    sizes = torch.linspace(0, 0.2, 500)
    shown = hardening.Adversary(teacher, describe(CARTPOLE))(teacher.body, unit, sizes)
    assert ((shown - unit).abs().amax(1) <= sizes + 1e-6).all()
    scores = teacher.scores(unit)
    near = (scores[:, 1] - scores[:, 0]).abs() < 0.999 * sizes * 6.5  # the sum of the absolute weights
    changed = teacher.scores(shown).argmax(1) != scores.argmax(1)
    assert 0.02 < near.float().mean() < 0.98
    assert changed[near].all()


def test_the_adversary_keeps_to_the_declared_range():
    teacher, low = pilot((0.0, 0.0, -1.0, 0.0)), float(describe(CARTPOLE).valid_low[2])
    unit = torch.tensor([[0.0, 0.0, 0.99 * low, 0.0], [0.0, 0.0, 1.5 * low, 0.0]])
    adversary, sizes = hardening.Adversary(teacher, describe(CARTPOLE)), torch.full((2,), 0.1)
    away = adversary(
        pilot((0.0, 0.0, 1.0, 0.0)).body, unit, sizes
    )  # pushes to the left there; more angle would change it
    assert torch.allclose(away[:, 2], unit[:, 2] + 0.1)
    against = adversary(teacher.body, -unit, sizes)
    assert torch.allclose(against[:, 2], -unit[:, 2] - 0.1)
    body = pilot((0.0, 0.0, 1.0, 0.0)).body
    body[1].bias.data = torch.tensor([0.0, 1.0])  # to the right there, and less angle would change it
    pushed = adversary(body, unit, sizes)
    assert pushed[0, 2] == pytest.approx(low), "no further than the declared bound"
    assert pushed[1, 2] == pytest.approx(1.5 * low), "what lies outside already is not pushed further"


def test_advantages_are_those_of_the_definition():
    zeros = torch.zeros(3, 1)
    rollout = Rollout(
        shown=zeros,
        true=zeros,
        actions=zeros,
        log_probs=zeros,
        rewards=torch.tensor([[1.0], [2.0], [4.0]]),
        ended=torch.tensor([[False], [True], [False]]),
        truncated=torch.zeros(3, 1, dtype=torch.bool),
        values=torch.tensor([[0.5], [0.25], [0.0], [8.0]]),
    )
    # Divided by 2, discounted by 1/2, lambda 1/2; nothing is carried over the end of the second step.
    last = 2.0 + 0.5 * 8.0 - 0.0
    second = 1.0 - 0.25
    first = 0.5 + 0.5 * 0.25 - 0.5 + 0.25 * second
    found = advantages(rollout, scale=2.0, gamma=0.5, gae_lambda=0.5)
    assert found.flatten().tolist() == pytest.approx([first, second, last])
    cut = advantages(rollout._replace(truncated=rollout.ended), 2.0, 0.5, 0.5)
    assert cut.flatten().tolist() == pytest.approx([0.5 + 0.5 * 0.25 - 0.5, 0.0, last])


def test_training_on_under_attack_makes_a_teacher_that_copes_better():
    teacher = pilot((0.5, 1.0, 1.0, 0.5))
    config = HardenConfig(
        eps=0.05,
        steps=30_000,
        n_envs=16,
        n_steps=64,
        warm_updates=3,
        learning_rate=0.02,
        gamma=0.98,
        batch_size=256,
        check_episodes=40,
    )
    found, info = hardened(teacher, CARTPOLE, config), describe(CARTPOLE)
    fresh = replace(config, seed=77)
    before, after = (hardening.returns_under_attack(agent, info, fresh).mean() for agent in (teacher, found))
    assert before < 50
    assert after > 300


def test_a_training_that_finds_nothing_better_returns_the_teacher(monkeypatch):
    own = {name: tensor.clone() for name, tensor in pilot().state_dict().items()}

    def worse(teacher, info, config):
        away = sum(float((tensor - own[name]).abs().sum()) for name, tensor in teacher.state_dict().items())
        return np.array([500.0 - away])

    monkeypatch.setattr(hardening, "returns_under_attack", worse)
    assert equal(hardened(pilot(), CARTPOLE, QUICK), pilot())


class Stopped(Exception):
    pass


def test_a_stopped_training_continues_to_the_same_teacher(tmp_path, monkeypatch):
    monkeypatch.setattr(hardening, "SAVE_EVERY_S", 0.0)
    whole = hardened(pilot(), CARTPOLE, replace(QUICK, learning_rate=0.01, warm_updates=0))
    config = replace(QUICK, learning_rate=0.01, warm_updates=0)

    def stop(row):
        if row["step"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        hardened(pilot(), CARTPOLE, config, tmp_path, stop)
    steps = []
    continued = hardened(pilot(), CARTPOLE, config, tmp_path, lambda row: steps.append(row["step"]))
    assert steps == [4]
    assert equal(whole, continued)
    steps.clear()
    assert equal(whole, hardened(pilot(), CARTPOLE, config, tmp_path, lambda row: steps.append(row["step"])))
    assert not steps, "a finished training is only read"
    with pytest.raises(SortRLError, match="other settings"):
        hardened(pilot(), CARTPOLE, replace(config, seed=4), tmp_path)


def test_it_refuses_a_teacher_that_is_no_policy_of_known_weights():
    black_box = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), env_id=CARTPOLE)
    values = Teacher(pilot().body, Normalizer.identity((4,)), 2, "values", "dqn", ARCHITECTURE)
    for teacher in (black_box, values):
        with pytest.raises(SortRLError, match="cannot be trained on"):
            hardened(teacher, CARTPOLE, QUICK)


def test_settings_are_checked():
    for changes, message in (
        ({"eps": 0.0}, "eps is 0.0, expected a positive"),
        ({"eps": 0.1, "n_steps": 1}, "n_steps is 1, expected a whole number, at least 2"),
        ({"eps": 0.1, "gamma": 1.5}, "gamma is 1.5, expected between 0 and 1"),
    ):
        with pytest.raises(SortRLError, match=message):
            HardenConfig(**changes)

"""The search for a steadier teacher: it finds one, it never returns a worse one, it resumes, and it refuses what it cannot do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import restless
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.teachers import Architecture, SteadyConfig, Teacher, load_teacher, steadied, steadying
from sortrl.teachers.steadying import Evolution

CARTPOLE = "CartPole-v1"


def drawn(n: int) -> torch.Tensor:
    """The same states whichever tests ran before."""
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


def deep() -> Teacher:
    torch.manual_seed(0)
    architecture = Architecture(obs_shape=(4,), n_actions=3, hidden=(8, 8), activation="Tanh")
    return Teacher(architecture.build(), Normalizer.identity((4,)), 3, "deep", "ppo", architecture)


@pytest.mark.parametrize("make", [restless, deep])
def test_a_variant_as_a_teacher_of_its_own_decides_as_it_did_in_the_batch(make):
    teacher = make()
    points = np.random.default_rng(0).standard_normal((5, steadying.Variants.size(teacher)))
    variants, unit = steadying.Variants(teacher, points), drawn(50)
    for number in range(5):
        own = variants.teacher(number)
        expected = variants.scores(unit, torch.full((50,), number))
        torch.testing.assert_close(own.scores(unit), expected, atol=1e-5, rtol=1e-5)
        assert not torch.equal(own.scores(unit).argmax(1), teacher.scores(unit).argmax(1))


def test_the_zero_point_is_the_teacher():
    teacher, unit = deep(), drawn(50)
    variants = steadying.Variants(teacher, np.zeros((1, steadying.Variants.size(teacher))))
    torch.testing.assert_close(variants.scores(unit, torch.zeros(50, dtype=torch.long)), teacher.scores(unit))


def test_a_step_against_the_lead_finds_the_surface_of_a_linear_rule():
    """For one, the step is the strongest that there is: decisions change exactly where the margin is less than eps |w|_1."""
    teacher, unit, eps = restless(), drawn(2000), 0.1
    variants = steadying.Variants(teacher, np.zeros((1, 18)))
    actions, pushed = variants.decide(unit, torch.zeros(2000, dtype=torch.long), torch.full((2000,), eps))
    scores = teacher.scores(unit)
    near = (scores[:, 0] - scores[:, 1]).abs() < eps * (0.05 + 0.3 + 1.0 + 1.0)
    assert 0.02 < near.float().mean() < 0.5
    assert torch.equal(torch.from_numpy(actions != pushed), near)


def test_the_search_finds_a_steadier_teacher_that_plays_as_well():
    teacher = restless()
    config = SteadyConfig(eps=0.1, generations=12, population=12, episodes=2, check_episodes=8)
    found = steadied(teacher, CARTPOLE, config)
    seeds = list(range(900, 908))  # not those of the search
    own = steadying.play(teacher, CARTPOLE, np.zeros((1, 18)), seeds, 0.1)
    new = steadying.play(found, CARTPOLE, np.zeros((1, 18)), seeds, 0.1)
    assert own.clean[0] == 500
    assert new.clean[0] >= 0.95 * own.clean[0]
    assert new.steady[0] > own.steady[0] + 0.1


def test_a_search_that_finds_nothing_better_returns_the_teacher(monkeypatch):
    """On the fresh episodes the teacher takes part too."""

    def worse(teacher, env_id, points, seeds, eps, eps_attack):
        away = np.abs(points).sum(1)
        return steadying.Played(500.0 - away, 500.0 - away, np.full(len(points), 0.5))

    monkeypatch.setattr(steadying, "play", worse)
    teacher = restless()
    found = steadied(teacher, CARTPOLE, SteadyConfig(eps=0.1, generations=3, population=4))
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name


def test_lost_return_costs_more_than_steadiness_gains():
    always_left = np.zeros((2, 18))
    always_left[1, 8] = 100.0
    played = steadying.play(restless(), CARTPOLE, always_left, [1, 2], 0.1)
    assert played.clean[1] < 20
    assert played.steady[1] == 1.0
    assert steadying.fitness(played, SteadyConfig(eps=0.1)).argmax() == 0


def test_return_under_attack_counts_where_it_is_asked_for():
    played = steadying.Played(np.array([500.0, 500.0]), np.array([500.0, 100.0]), np.array([0.5, 0.9]))
    config = SteadyConfig(eps=0.1)
    assert steadying.fitness(played, config).argmax() == 1
    assert steadying.fitness(played, replace(config, eps_attack=0.2)).argmax() == 0


def test_attacked_episodes_are_the_second_half():
    teacher = restless()
    calm = steadying.play(teacher, CARTPOLE, np.zeros((1, 18)), [1, 2, 3, 4], 0.1)
    hurt = steadying.play(teacher, CARTPOLE, np.zeros((1, 18)), [1, 2, 3, 4], 0.1, eps_attack=3.0)
    assert calm.clean[0] == hurt.clean[0] == 500
    assert hurt.attacked[0] < 400


class Stopped(Exception):
    pass


def test_a_stopped_search_continues_to_the_same_teacher(tmp_path):
    teacher = restless()
    config = SteadyConfig(eps=0.1, generations=5, population=4, episodes=2, check_episodes=2, seed=3)
    whole = steadied(teacher, CARTPOLE, config)

    def stop(row):
        if row["step"] == 3:
            raise Stopped

    with pytest.raises(Stopped):
        steadied(teacher, CARTPOLE, config, out_dir=tmp_path, progress=stop)
    steps = []
    continued = steadied(teacher, CARTPOLE, config, out_dir=tmp_path, progress=lambda row: steps.append(row["step"]))
    assert steps == [4, 5]
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, continued.state_dict()[name]), name
    with pytest.raises(SortRLError, match="belongs to another search"):
        steadied(teacher, CARTPOLE, replace(config, seed=4), tmp_path)
    (tmp_path / steadying.FILE_NAME).write_bytes(b"no tensors")
    with pytest.raises(SortRLError, match="steadying"):
        steadied(teacher, CARTPOLE, config, out_dir=tmp_path)


def test_it_refuses_a_teacher_whose_weights_are_unknown():
    black_box = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), env_id=CARTPOLE)
    with pytest.raises(SortRLError, match="not a plain MLP"):
        steadied(black_box, CARTPOLE, SteadyConfig(eps=0.1))


def test_settings_are_checked():
    for changes, message in (
        ({"eps": 0.0}, "eps is 0.0, expected a positive"),
        ({"eps": 0.1, "population": 2}, "population is 2, expected a whole number, at least 4"),
        ({"eps": 0.1, "eps_attack": float("nan")}, "eps_attack is nan, expected a finite"),
    ):
        with pytest.raises(SortRLError, match=message):
            SteadyConfig(**changes)


def test_evolution_refuses_a_state_of_another_size():
    with pytest.raises(ValueError, match="expected"):
        Evolution(3, 8, 0).restore(Evolution(4, 8, 0).state)

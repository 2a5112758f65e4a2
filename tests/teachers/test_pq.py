"""Parallel Q-learning: its returns by hand, a training that learns, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.envs import describe, greedy_returns
from sortrl.runs.tasks import TASKS, continued, teacher_preset
from sortrl.teachers import (
    Architecture,
    PQNConfig,
    load_teacher,
    train_teacher,
)
from sortrl.teachers.grading import grade
from sortrl.teachers.train_pqn import Rollout, Run, _values, lambda_returns

BREAKOUT = "sortrl/Breakout10-v0"
TINY = PQNConfig(
    total_steps=1024,
    eval_every=512,
    eval_episodes=2,
    n_envs=4,
    n_steps=16,
    batch_size=32,
    channels=(4,),
    hidden=(16,),
    longest_run=5,
    stagger=8,
    exploration_fraction=0.5,
)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def rollout(rewards, terminated=(), truncated=()):
    """One game; the best value of every next state is 10, of every action played 7."""
    n = len(rewards)
    ends = [torch.tensor([[t in moments] for t in range(n)]) for moments in (terminated, truncated)]
    values = torch.full((n, 1), 7.0)
    blank = torch.zeros(n, 1)
    return Rollout(blank, blank, torch.tensor(rewards)[:, None], *ends, values, torch.full((n, 1), 10.0))


def test_lambda_returns_by_hand():
    one_step = lambda_returns(rollout([1.0, 2.0, 3.0]), gamma=0.5, q_lambda=0.0)
    assert one_step.flatten().tolist() == [6.0, 7.0, 8.0]
    whole = lambda_returns(rollout([1.0, 2.0, 3.0]), gamma=0.5, q_lambda=1.0)
    assert whole.flatten().tolist() == [4.0, 6.0, 8.0]  # 3 + 10 / 2, 2 + 8 / 2, 1 + 6 / 2
    mixed = lambda_returns(rollout([1.0, 2.0, 3.0]), gamma=0.5, q_lambda=0.5)
    assert mixed.flatten().tolist() == [1 + 0.5 * (0.5 * 6.5 + 5), 2 + 0.5 * (0.5 * 8 + 5), 8.0]
    ended = lambda_returns(rollout([1.0, 2.0, 3.0], terminated=[1]), gamma=0.5, q_lambda=1.0)
    assert ended.flatten().tolist() == [2.0, 2.0, 8.0]
    cut = lambda_returns(rollout([1.0, 2.0, 3.0], truncated=[1]), gamma=0.5, q_lambda=1.0)
    assert cut.flatten().tolist() == [1.0 + 0.5 * 7.0, 7.0, 8.0]  # a step cut short keeps its own estimate


def test_random_actions_come_in_runs():
    run = Run(describe(BREAKOUT), replace(TINY, n_envs=64, longest_run=20, stagger=0), seed=0, stored={})
    generator, greedy = torch.Generator().manual_seed(0), torch.zeros(64, dtype=torch.int64)
    played = torch.stack([run.explore(greedy, 1.0, 1000, generator) for _ in range(400)])
    changes = (played[1:] != played[:-1]).float().mean()
    expected = 1.0 / sum(1.0 / k for k in range(1, 21))  # lengths of k or more have probability 1 / k
    assert abs(changes - expected) < 0.03
    run.config = replace(run.config, longest_run=1)
    rare = torch.stack([run.explore(greedy, 0.1, 1000, generator) for _ in range(400)])[20:]
    assert abs((rare != 0).float().mean() - 0.1) < 0.02


def test_the_network_is_normalised_and_saved(tmp_path):
    architecture = Architecture((1, 84, 84), 4, (256,), "ReLU", "norm_cnn", channels=(16, 32, 32))
    body = architecture.build()
    assert [type(layer).__name__ for layer in body[:3]] == ["Conv2d", "GroupNorm", "ReLU"]
    assert [type(layer).__name__ for layer in body[-4:]] == ["Linear", "LayerNorm", "ReLU", "Linear"]
    assert body(torch.rand(2, 1, 84, 84)).shape == (2, 4)
    assert Architecture.from_json(architecture.to_json()) == architecture
    with pytest.raises(SortRLError, match="too small"):
        Architecture((1, 84, 84), 4, (256,), "ReLU", "norm_cnn", channels=(8, 8, 8, 8)).build()
    with pytest.raises(SortRLError, match="do not belong to a norm_cnn"):
        Architecture((1, 84, 84), 4, (256,), "ReLU", "norm_cnn")
    with pytest.raises(SortRLError, match="sees images"):
        Architecture((4,), 4, (256,), "ReLU", "norm_cnn", channels=(8,))


def test_a_small_game_is_learned(tmp_path):
    config = replace(teacher_preset(BREAKOUT), total_steps=49_152, exploration_fraction=0.4, target_return=None)
    teacher = train_teacher(BREAKOUT, config, tmp_path, seed=0)
    returns = greedy_returns(teacher, BREAKOUT, range(20))
    rng = np.random.default_rng(0)
    random_returns = greedy_returns(RandomAgent(rng), BREAKOUT, range(20))
    assert random_returns.mean() < 1.5
    assert returns.mean() > random_returns.mean() + 2.0
    assert teacher.algorithm == "pqn"
    assert not teacher.is_stochastic
    obs = np.zeros((3, 4, 10, 10), np.uint8)
    assert teacher.values(teacher.normalize(obs)).shape == (3, 3)
    again = load_teacher(tmp_path, BREAKOUT)
    assert np.array_equal(greedy_returns(again, BREAKOUT, range(20)), returns)


class RandomAgent:
    def __init__(self, rng):
        self.rng = rng

    def predict(self, obs):
        return self.rng.integers(3, size=len(obs)), None


class Killed(Exception):
    pass


def weights(teacher):
    return torch.cat([tensor.flatten().double() for tensor in teacher.state_dict().values()])


def test_a_killed_training_continues_to_the_same_teacher(tmp_path, monkeypatch):
    monkeypatch.setattr("sortrl.teachers.train_pqn.SAVE_EVERY_S", 0.0)
    rows = []
    whole = train_teacher(BREAKOUT, TINY, tmp_path / "whole", seed=5, progress=rows.append)
    assert [row["step"] for row in rows] == list(range(64, 1025, 64))
    assert {"total", "training_return", "steps_per_s", "hours_left"} <= set(rows[0])
    assert "return" in rows[-1]

    def kill(row):
        if row["step"] >= 704:  # after the first evaluation and some more
            raise Killed

    with pytest.raises(Killed):
        train_teacher(BREAKOUT, TINY, tmp_path / "killed", seed=5, progress=kill)
    torch.manual_seed(99)  # the caller's generators do not matter
    resumed_rows = []
    resumed = train_teacher(BREAKOUT, TINY, tmp_path / "killed", seed=5, progress=resumed_rows.append)
    assert [row["step"] for row in resumed_rows] == list(range(768, 1025, 64))
    assert resumed_rows[-1]["training_return"] == rows[-1]["training_return"]
    assert torch.equal(weights(whole), weights(resumed))
    assert torch.equal(
        weights(train_teacher(BREAKOUT, TINY, tmp_path / "killed", seed=5, progress=pytest.fail)), weights(whole)
    )
    with pytest.raises(SortRLError, match="other settings"):
        train_teacher(BREAKOUT, TINY, tmp_path / "killed", seed=6)
    assert not torch.equal(weights(train_teacher(BREAKOUT, TINY, seed=6)), weights(whole))


def test_playing_on_during_updates_changes_nothing():
    config = replace(TINY, total_steps=512, eval_every=512)
    alone, together = (train_teacher(BREAKOUT, config, seed=2, processes=processes) for processes in (1, 2))
    assert torch.equal(weights(alone), weights(together))


def test_half_precision_gives_nearly_the_same_values_and_trains():
    body = Architecture((1, 84, 84), 4, (32,), "ReLU", "norm_cnn", channels=(8, 8, 8)).build()
    obs = torch.randint(256, (8, 1, 84, 84), dtype=torch.uint8)
    exact, half = (_values(body, obs, PQNConfig(half=half)) for half in (False, True))
    assert half.dtype == torch.float32
    assert not torch.equal(exact, half)
    assert torch.allclose(exact, half, atol=0.05)
    config = replace(TINY, total_steps=512, eval_every=512)
    plain, trained = (train_teacher(BREAKOUT, replace(config, half=half), seed=2) for half in (False, True))
    assert not torch.equal(weights(plain), weights(trained))
    assert torch.isfinite(weights(trained)).all()


def test_grades_break_off_games_that_stand_still(monkeypatch):
    class Waits:
        calls = 0

        def predict(self, obs):
            self.calls += 1
            return np.zeros(len(obs), int), None

    agent = Waits()
    config = PQNConfig(eval_episodes=2, patience=7)
    assert grade(agent, "sortrl/Freeway84-v0", config, seed=0, segment=0) == (0.0, False)
    assert agent.calls == 7


@pytest.mark.slow
def test_a_training_survives_sigkill_and_another_number_of_processes(tmp_path):
    config = replace(TINY, total_steps=20_480, eval_every=10_240)
    whole = train_teacher(BREAKOUT, config, seed=1)
    code = (
        "from dataclasses import replace; from sortrl.teachers import PQNConfig, pq, train_teacher\n"
        "import os, signal\n"
        "pq.SAVE_EVERY_S = 0.0\n"
        "def kill(row):\n"
        "    if row['step'] >= 12_800: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"train_teacher({BREAKOUT!r}, {config!r}, {str(tmp_path)!r}, 1, kill)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert torch.equal(weights(train_teacher(BREAKOUT, config, tmp_path, seed=1, processes=2)), weights(whole))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "ppo"}, "expected 'pqn'"),
        ({"batch_size": 100}, "cannot be cut into batches of 100"),
        ({"q_lambda": 2.0}, "q_lambda is 2.0"),
        ({"longest_run": 0}, "longest_run"),
        ({"retry": 1.5}, "retry is 1.5"),
        ({"sticky": -0.5}, "sticky is -0.5"),
        ({"patience": -1}, "patience is -1"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(SortRLError, match=message):
        PQNConfig(**fields)


def test_the_command_trains_and_tells_the_result(tmp_path, monkeypatch, capsys):
    tiny = replace(TINY, total_steps=128, eval_every=128, confirm_episodes=2)
    monkeypatch.setitem(TASKS, BREAKOUT, replace(TASKS[BREAKOUT], teachers={"pqn": tiny}))
    cli.main(["teach", BREAKOUT, "--out", str(tmp_path), "--json", str(tmp_path / "result.json")])
    assert "over 2 greedy episodes" in capsys.readouterr().out
    assert load_teacher(tmp_path).algorithm == "pqn"
    (row,) = json.loads((tmp_path / "training.json").read_text())["history"]
    assert {"step", "return", "training_return", "hours", "done"} == set(row)
    assert row["done"]


def test_half_precision_is_for_value_learning(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["teach", "CartPole-v1", "--half", "--out", str(tmp_path)])
    assert "--half is for pqn" in capsys.readouterr().err


def test_presets_and_wrong_tasks():
    assert continued("sortrl/RoadRunner84-v0").retry == 0.7
    assert continued("sortrl/Asterix10-v0").retry == 0.0
    assert teacher_preset("sortrl/Freeway84-v0").longest_run == 100
    assert teacher_preset("sortrl/Freeway84-v0", "ppo").algorithm == "ppo"
    assert teacher_preset("CartPole-v1").algorithm == "ppo"
    assert isinstance(teacher_preset("sortrl/Asterix10-v0", "pqn"), PQNConfig)
    with pytest.raises(SortRLError, match="pqn learns from images"):
        train_teacher("CartPole-v1", PQNConfig())


def test_a_training_goes_on_from_an_earlier_agent_and_returns_nothing_worse(tmp_path):
    first = train_teacher(BREAKOUT, TINY, tmp_path / "first")
    still = replace(TINY, exploration_fraction=0.0, exploration_final_eps=0.0, learning_rate=1e-12)
    same = train_teacher(BREAKOUT, still, tmp_path / "same", start=first)
    far = max(float((a - b).abs().max()) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert far < 1e-6, "it begins with the weights that it was given"
    history = json.loads((tmp_path / "same" / "training.json").read_text())["history"]
    assert [row["step"] for row in history] == [0, 512, 1024], "the start is graded too"
    train_teacher(BREAKOUT, replace(TINY, learning_rate=1.0), tmp_path / "worse", start=first)
    kept = load_teacher(tmp_path / "worse", BREAKOUT)
    grades = json.loads((tmp_path / "worse" / "training.json").read_text())["history"]
    if max(grades, key=lambda row: row["return"])["step"] == 0:
        assert torch.equal(next(kept.parameters()), next(first.parameters()))
    another = train_teacher(BREAKOUT, TINY, None, seed=1)
    with pytest.raises(SortRLError, match="other settings"):
        train_teacher(BREAKOUT, still, tmp_path / "same", start=another)


def test_a_training_does_not_go_on_from_what_has_another_network_or_algorithm(tmp_path):
    other = train_teacher(BREAKOUT, replace(TINY, total_steps=64, eval_every=64), None)
    with pytest.raises(SortRLError, match="the same network"):
        train_teacher(BREAKOUT, replace(TINY, hidden=(17,)), tmp_path, start=other)
    with pytest.raises(SortRLError, match="only pqn"):
        train_teacher("CartPole-v1", teacher_preset("CartPole-v1"), tmp_path, start=other)


def test_without_a_time_to_explore_next_to_no_action_is_random_from_the_first():
    config = replace(TINY, exploration_fraction=0.0, exploration_final_eps=0.0)
    run = Run(describe(BREAKOUT), config, 0, {})
    n = run.fleet.info.n_actions
    last = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(n))
    last(torch.zeros(1, *run.fleet.info.obs_shape))
    last.requires_grad_(False)[1].weight.zero_()
    last[1].bias.copy_(torch.arange(float(n)))
    played = run.play(last, torch.Generator().manual_seed(0), step=0).actions
    assert bool((played == n - 1).all())

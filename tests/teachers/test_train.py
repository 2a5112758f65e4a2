"""Training: reproducible, resumable, good enough."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sortrl.core.errors import SortRLError
from sortrl.envs import greedy_returns
from sortrl.runs.tasks import TASKS, teacher_preset
from sortrl.teachers import TeacherConfig, train_teacher

PUBLISHED = Path(os.environ.get("SORTRL_TEACHERS") or Path(__file__).parents[3] / "shared" / "teachers") / "sb3"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published agents; set SORTRL_TEACHERS")
needs_box2d = pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="box2d is not installed")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


TINY = {
    "ppo": TeacherConfig(
        total_steps=2048,
        eval_every=512,
        eval_episodes=3,
        n_envs=2,
        n_steps=64,
        normalize_reward=True,
        linear_decay=True,
    ),
    "dqn": TeacherConfig(
        algorithm="dqn",
        total_steps=1280,
        eval_every=320,
        eval_episodes=3,
        n_envs=2,
        buffer_size=500,
        target_update_interval=70,
        learning_starts=100,
    ),
}


class Killed(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_a_killed_training_continues_to_the_same_teacher(algorithm, tmp_path):
    config, steps = TINY[algorithm], []
    whole = train_teacher("CartPole-v1", config, tmp_path / "whole", seed=5, progress=steps.append)
    assert [entry["step"] for entry in steps] == [config.eval_every * i for i in range(1, 5)]
    assert {entry["total"] for entry in steps} == {config.total_steps}

    def kill(entry):
        if entry["step"] >= 2 * config.eval_every:
            raise Killed

    with pytest.raises(Killed):
        train_teacher("CartPole-v1", config, tmp_path / "killed", seed=5, progress=kill)
    resumed_steps = []
    torch.manual_seed(99)  # the caller's generators do not matter
    resumed = train_teacher("CartPole-v1", config, tmp_path / "killed", seed=5, progress=resumed_steps.append)
    assert resumed_steps == steps[2:]
    for ours, theirs in zip(whole.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.algorithm == algorithm
    assert not torch.equal(whole.normalizer.scale, torch.ones(4, dtype=torch.float64))

    again = train_teacher("CartPole-v1", config, tmp_path / "killed", seed=5, progress=pytest.fail)  # finished: loaded
    assert torch.equal(again.body[1].weight, whole.body[1].weight)
    with pytest.raises(SortRLError, match="Choose another directory"):
        train_teacher("CartPole-v1", config, tmp_path / "killed", seed=6)
    other = train_teacher("CartPole-v1", config, seed=6)
    assert not torch.equal(other.body[1].weight, whole.body[1].weight)


def test_training_leaves_the_callers_generators_alone(tmp_path):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    raw = replace(TINY["ppo"], total_steps=128, eval_every=128, normalize_obs=False)
    teacher = train_teacher("CartPole-v1", raw, tmp_path / "raw", seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(teacher.normalizer.scale, torch.ones(4, dtype=torch.float64))
    (tmp_path / "training.safetensors").write_bytes(b"damaged")
    with pytest.raises(SortRLError, match="may be damaged"):
        train_teacher("CartPole-v1", TINY["ppo"], tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"algorithm": "sac"}, "expected 'ppo' or 'dqn'"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"learning_rate": 0.0}, "must be positive"),
        ({"n_envs": 1, "n_steps": 1}, "at least two samples"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(SortRLError, match=message):
        TeacherConfig(**fields)


BARS = {"CartPole-v1": 490.0, "Acrobot-v1": -85.0, "MountainCar-v0": -120.0, "LunarLander-v3": 240.0}


def reaches_its_bar(env_id, config):
    teacher = train_teacher(env_id, config, seed=0)
    assert greedy_returns(teacher, env_id, range(10_000, 10_100)).mean() >= BARS[env_id]


def test_cartpole_preset_reaches_its_bar():
    reaches_its_bar("CartPole-v1", teacher_preset("CartPole-v1"))


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["Acrobot-v1", "MountainCar-v0", pytest.param("LunarLander-v3", marks=needs_box2d)])
def test_presets_reach_their_bars(env_id):
    reaches_its_bar(env_id, teacher_preset(env_id))


@pytest.mark.slow
@pytest.mark.parametrize("env_id", [env_id for env_id in TASKS if "dqn" in TASKS[env_id].teachers])
def test_dqn_presets_reach_their_bars(env_id):
    reaches_its_bar(env_id, teacher_preset(env_id, "dqn"))

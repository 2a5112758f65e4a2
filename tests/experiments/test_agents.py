"""Agents that robustify has never seen: the table at its smallest scale, and how it is judged."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.experiments import agents_judgement, agents_lines, agents_table
from sortrl.experiments.agents import AGENTS, judged
from sortrl.experiments.navigation import ENV_ID, HALL


def test_the_navigation_task_is_one_episode_per_seed_and_can_be_solved():
    env = gym.make(ENV_ID)

    def play(seed, act):
        obs, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, done = total + reward, terminated or truncated
        return total, terminated

    def towards(obs):
        away = obs[2:4] - obs[:2]
        axis = int(np.abs(away).argmax())
        return 1 + 2 * axis + int(away[axis] < 0)

    assert play(3, towards) == play(3, towards)
    arrived = [play(seed, towards)[1] for seed in range(20)]
    assert 5 < sum(arrived) < 20  # straight ahead works unless the pillar is in the way
    assert not any(play(seed, lambda obs: 0)[1] for seed in range(3))
    assert env.observation_space.contains(np.array([1, 1, HALL, HALL, 50], np.float32))


def test_agents_are_of_many_kinds_with_distinct_names_and_no_settings_for_their_students():
    own = [one for one in AGENTS if not one.published]
    assert len({one.folder for one in AGENTS}) == len(AGENTS)
    assert len(own) >= 8
    assert {one.algorithm for one in own} == {"PPO", "A2C", "DQN", "QRDQN"}
    assert {one.normalised for one in own} == {True, False}
    assert {one.env_id for one in own} == {"CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3", ENV_ID}


def test_the_table_is_made_agent_by_agent_and_continued(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SORTRL_TEACHERS", raising=False)
    pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    command = ["reproduce", "agents", "--scale", "smoke", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    cli.main([*command, "--agent", "DQN Navigation"])
    document = json.loads((tmp_path / "agents.json").read_text())
    (row,) = document["rows"]
    assert (row["agent"], row["env"], row["normalised"], row["eps"]) == ("DQN Navigation", ENV_ID, True, 0.1)
    assert row["student_worst"] <= row["student"]
    assert 0 <= row["certified"] <= 1
    assert document["judgement"]["agents"] == 1
    assert "DQN Navigation" in capsys.readouterr().out
    cli.main([*command, "--agent", "PPO Acrobot, published"])
    document = json.loads((tmp_path / "agents.json").read_text())
    assert document["rows"] == [row]
    assert "SORTRL_TEACHERS" in document["skipped"][0]["why"]
    lines = agents_lines(document)
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    with pytest.raises(SortRLError, match="none is called 'nobody'"):
        agents_table("smoke", out=tmp_path, work=tmp_path / "work", agent="nobody")


def test_shares_are_of_the_agents_that_pass():
    def row(passed, env="CartPole-v1", certified=0.6, student=5.0):
        return {"passed": passed, "env": env, "certified": certified, "student_worst": student, "teacher_worst": 4.0}

    rows = [row(True), row(True, certified=0.4), row(True, "LunarLander-v3", 0.1, 3.0), row(False, certified=0.0)]
    assert judged(rows) == {"agents": 4, "passed": 0.75, "certified": 0.5, "held": 2 / 3}
    assert judged([row(False)])["certified"] is None


def test_the_sentence_below_the_table_has_the_shares_beside_what_is_asked_for():
    found = {"judgement": {"agents": 4, "passed": 0.75, "certified": 0.5, "held": None}}
    line = agents_judgement(found)
    assert f"4 of {len(AGENTS)} agents" in line
    assert "the gate passed 75% (asked for: 80%)" in line
    assert "certified in 50% (asked for: 100%)" in line
    assert "in of none (asked for: 80%)" in line

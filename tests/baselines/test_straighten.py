"""Straightening: accidents that do not matter are put back, those that won are kept, and a memory is the wider for it."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import sortrl
from sortrl.baselines.memory.remember import best_episodes
from sortrl.baselines.memory.search import SearchConfig, rows_by_start
from sortrl.baselines.memory.straighten import straightened
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import merge
from sortrl.envs import greedy_returns
from sortrl.teachers import load_teacher

SIZE, GAP = 24, 8


class Meadow(gym.Env):
    """Every step leads to the right, straight on (0), up (1) or down (2). In the eighth column there is a gap in a wall, one row
    above or one below the start: two starts, told apart by the ground."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.x, self.y = int(self.np_random.integers(2)), 0, SIZE // 2
        return self.picture(), {}

    def step(self, action):
        self.x, self.y = self.x + 1, int(np.clip(self.y + (0, -1, 1)[action], 0, SIZE - 1))
        lost = self.x == GAP and self.y != SIZE // 2 + (1, -1)[self.start]
        won = self.x == SIZE - 1
        return self.picture(), 10.0 * won, won or lost, False, {}

    def picture(self):
        frame = np.full((1, SIZE, SIZE), 50 * self.start, np.uint8)
        frame[0, self.y, self.x] = 255
        return frame


gym.register("Meadow-v0", Meadow, max_episode_steps=100)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def teacher():
    """Straight on, into the wall."""
    return load_teacher(lambda obs: np.zeros(len(obs), int), "Meadow-v0")


@pytest.fixture
def tries(teacher):
    return collect(teacher, "Meadow-v0", CollectConfig(states=600, exploration=1.0, random_actions=0.9, slots=4))


def accidents(demos, rows):
    return np.flatnonzero(demos.transitions.played[rows] != demos.actions[rows])


def test_what_need_not_differ_from_the_teacher_is_put_back(teacher, tries):
    found = straightened(teacher, tries, goal=10.0)
    by_start = rows_by_start(found)
    assert len(by_start) == 2
    for name, (rows,) in by_start.items():
        assert found.transitions.rewards[rows].sum() == 10.0
        left = accidents(found, rows)
        assert len(left) >= 1, "the teacher alone would have lost"
        assert (left < GAP).all(), "behind the wall nothing else was needed"
        before = [
            len(accidents(tries, one))
            for one in rows_by_start(tries)[name]
            if tries.transitions.rewards[one].sum() >= 10
        ]
        assert len(left) < min(before)


def test_the_plainest_episode_is_remembered_if_that_is_asked_for(teacher, tries):
    data = merge(tries, straightened(teacher, tries, goal=10.0))
    plain, short = best_episodes(data, plain=True), best_episodes(data)
    assert plain.transitions.rewards.sum() == short.transitions.rewards.sum() == 20.0
    assert (plain.actions == 0).mean() > 0.85 > (short.actions == 0).mean()


def test_nothing_is_made_of_starts_that_were_never_won(teacher):
    lost = collect(teacher, "Meadow-v0", CollectConfig(states=60, exploration=0.0))
    assert lost.transitions.rewards.sum() == 0
    assert straightened(teacher, lost, goal=10.0) is None


def test_a_straightened_memory_wins_and_is_certified_more_widely(teacher, tmp_path):
    radii = []
    for straighten in (False, True):
        changes = {
            "collect": CollectConfig(states=600, exploration=1.0, random_actions=0.9, slots=4),
            "search": SearchConfig(goal=10.0, straighten=straighten),
        }
        out = tmp_path / str(straighten)
        settings = {"preset": "memory", "out": out, "episodes": 4, "eps_grid": (0.0,), "suite": ()}
        policy = sortrl.robustify(teacher, "Meadow-v0", 0.05, **settings, **changes)
        assert greedy_returns(policy, "Meadow-v0", list(range(8))).tolist() == [10.0] * 8
        radii.append(sortrl.evaluate(policy, "Meadow-v0", episodes=8).radii.mean())
        again = sortrl.robustify(teacher, "Meadow-v0", 0.05, **settings, **changes)
        assert torch.equal(again.layers[0].weight, policy.layers[0].weight), "a finished run is read back"
    assert radii[1] > radii[0]

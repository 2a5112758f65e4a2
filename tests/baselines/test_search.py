"""Search: wins that no try of the teacher found, playable from pictures alone, and given up where there is nothing to find."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

import sortrl
from sortrl.baselines.memory import search as searching
from sortrl.baselines.memory.remember import best_episodes
from sortrl.baselines.memory.search import SearchConfig, place_of, search
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json
from sortrl.core.records import Demonstrations
from sortrl.data.collect import CollectConfig, collect
from sortrl.data.dataset import merge, select
from sortrl.envs import greedy_returns
from sortrl.teachers import load_teacher

LOCKS, SIZE, IDLE = 12, 16, 2
CONFIG = SearchConfig(steps=40_000, goal=10.0, patience=40, slots=8)


@pytest.fixture(autouse=True)
def _short_tries(monkeypatch):
    monkeypatch.setattr(searching, "_HORIZON", 20)


class Locks(gym.Env):
    """Doors one behind the other, each with two keys of which the wrong one loses; the third action waits. Three starts, the
    last of which is lost whatever is played. Random play opens all doors once in 4,096 tries."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.door = int(self.np_random.integers(3)), 0
        self.keys = np.random.default_rng(self.start).integers(2, size=LOCKS)
        return self.picture(), {}

    def step(self, action):
        right = self.start < 2 and (action == IDLE or action == self.keys[self.door])
        self.door += int(right and action != IDLE)
        won = self.door == LOCKS
        return self.picture(), 10.0 * won, won or not right, False, {}

    def picture(self):
        frame = np.full((1, SIZE, SIZE), 60 * self.start, np.uint8)
        frame[0, :, : self.door] = 255
        return frame


gym.register("Locks-v0", Locks, max_episode_steps=200)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def teacher():
    return load_teacher(lambda obs: np.zeros(len(obs), int), "Locks-v0")


@pytest.fixture
def tries(teacher):
    """What the teacher does by itself: it never gets through."""
    demos = collect(teacher, "Locks-v0", CollectConfig(states=300, exploration=1.0, random_actions=0.5, slots=4))
    assert demos.transitions.rewards.sum() == 0
    return demos


def episodes(demos: Demonstrations):
    for number in np.unique(demos.episodes):
        yield np.flatnonzero(demos.episodes == number)


def test_what_no_try_won_is_won_and_what_cannot_be_won_is_given_up(teacher, tries):
    reports = []
    found = search(teacher, tries, CONFIG, progress=reports.append)
    assert reports[-1]["step"] < CONFIG.steps, "the third start has no place but its first: no reason to go on"
    assert (reports[-1]["won"], reports[-1]["lost"]) == (2, 0)
    starts = {int(found.obs[rows[0]].max()) for rows in episodes(found)}
    assert starts == {0, 60}
    after = found.transitions
    for rows in episodes(found):
        assert after.rewards[rows].sum() == 10.0
        assert after.terminated[rows].tolist() == [False] * (len(rows) - 1) + [True]
        keys = np.random.default_rng(int(found.obs[rows[0]].max() // 60)).integers(2, size=LOCKS)
        assert after.played[rows].tolist() == keys.tolist(), "waiting is left out: a picture has one answer"
    assert (found.actions == 0).all(), "labels are the teacher's own answers"
    best = best_episodes(merge(tries, found))
    assert best.transitions.rewards.sum() == 20.0


def test_one_seed_one_result(teacher, tries):
    first, second = (search(teacher, tries, CONFIG, seed=3) for _ in range(2))
    assert np.array_equal(first.obs, second.obs)
    assert np.array_equal(first.transitions.played, second.transitions.played)


def test_starts_that_are_won_already_are_left_alone(teacher, tries):
    known = merge(tries, search(teacher, tries, CONFIG))
    reports = []
    assert search(teacher, known, CONFIG, progress=reports.append) is None
    assert reports[-1]["step"] <= CONFIG.patience + CONFIG.slots, "one step a try, of the start that cannot be won"


def test_starts_that_were_never_met_are_searched_too(teacher, tries):
    dark = [rows for rows in episodes(tries) if tries.obs[rows[0]].max() == 0]
    known = select(tries, np.isin(np.arange(len(tries)), np.concatenate(dark)))
    found = search(teacher, known, CONFIG)
    assert 0 in {int(found.obs[rows[0]].max()) for rows in episodes(found)}


def test_the_steps_are_a_limit(teacher, tries):
    assert search(teacher, tries, SearchConfig(steps=8, goal=10.0, slots=8)) is None


def test_an_actor_critic_is_sampled_more_softly(teacher, tries, monkeypatch):
    monkeypatch.setattr(searching, "_RANDOM_SHARE", 0.0)

    class Logits(torch.nn.Module):
        def forward(self, obs):
            return torch.tensor([[1.0, 0.0, -5.0]]).expand(len(obs), 3)

    stubborn = load_teacher(Logits(), "Locks-v0")
    assert search(stubborn, tries, CONFIG) is not None
    assert search(stubborn, tries, SearchConfig(steps=40_000, goal=10.0, slots=8)) is not None


def test_a_memory_with_search_wins_where_its_teacher_cannot(teacher, tmp_path):
    changes = {"collect": CollectConfig(states=300, exploration=1.0, random_actions=0.5, slots=4), "search": CONFIG}
    policy = sortrl.robustify(
        teacher, "Locks-v0", 0.05, preset="memory", out=tmp_path, episodes=4, eps_grid=(0.0,), suite=(), **changes
    )
    seeds = list(range(30))
    winnable = [seed for seed in seeds if np.random.default_rng(seed).integers(3) < 2]
    returns = greedy_returns(policy, "Locks-v0", seeds)
    assert np.flatnonzero(returns == 10.0).tolist() == winnable
    assert read_json(tmp_path / "search.json") == {"episodes": 2}


def test_places_are_coarse():
    frame = np.zeros((3, 10, 9), np.uint8)
    other = frame.copy()
    other[0, 0, 0] = 90
    assert place_of(frame) == place_of(other)
    assert place_of(frame) != place_of(frame + 50)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"patience": 0}, "patience is 0"),
        ({"slots": 0}, "slots is 0"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(SortRLError, match=message):
        SearchConfig(**fields)


def test_numbers_instead_of_pictures_are_refused():
    pole = load_teacher(lambda obs: np.zeros(len(obs), int), "CartPole-v1")
    demos = collect(pole, "CartPole-v1", CollectConfig(states=50))
    with pytest.raises(SortRLError, match="pictures of bytes"):
        search(pole, demos, SearchConfig(steps=10))

"""Fleets: games that restart by themselves, resumable, the same in one process or several."""

from __future__ import annotations

import numpy as np
import pytest

from sortrl.core.errors import SortRLError
from sortrl.envs import Fleet, ParallelFleet
from sortrl.envs.fleet import Lessons
from sortrl.envs.info import make_env

BREAKOUT = "sortrl/Breakout10-v0"


def drive(fleet, steps, seed=0):
    """Random actions; everything that came back."""
    rng, seen = np.random.default_rng(seed), []
    for _ in range(steps):
        played = fleet.step(rng.integers(fleet.info.n_actions, size=len(fleet)))
        seen.append((fleet.obs.copy(), *played[:3], played.returns))
    return seen


def equal(ours, theirs):
    return all(
        all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(ours, theirs, strict=True)
    )


def test_minatar_images_are_bytes():
    pytest.importorskip("minatar")
    for game, channels, actions in (("Breakout", 4, 3), ("SpaceInvaders", 6, 4)):
        env = make_env(f"sortrl/{game}10-v0")
        obs, _ = env.reset(seed=0)
        assert obs.shape == (channels, 10, 10)
        assert env.action_space.n == actions
        assert set(np.unique(obs)) == {0, 255}
        assert env.observation_space.contains(obs)
        assert np.array_equal(obs, env.reset(seed=0)[0])


def test_games_restart_and_report_their_returns():
    fleet = Fleet("CartPole-v1", 4, seed=1)
    seen = drive(fleet, 120)
    ended = np.stack([terminated for _, _, terminated, _, _ in seen])
    returns = [total for *_, finished in seen for total in finished]
    assert ended.sum() == len(returns) > 4
    assert min(returns) >= 8  # a reward per step
    first = np.flatnonzero(ended[:, 0])[0]
    assert np.abs(seen[first][0][0]).max() <= 0.05  # what follows the end is a new start
    assert equal(seen, drive(Fleet("CartPole-v1", 4, seed=1), 120))
    assert not equal(seen, drive(Fleet("CartPole-v1", 4, seed=2), 120))
    fleet.close()
    fleet.close()
    with pytest.raises(SortRLError, match="n is 0"):
        Fleet("CartPole-v1", 0, seed=0)


@pytest.mark.parametrize(("env_id", "options"), [(BREAKOUT, {}), ("sortrl/BankHeist84-v0", {"episodic_life": True})])
def test_a_stored_fleet_goes_on_as_if_nothing_had_happened(env_id, options):
    pytest.importorskip("minatar" if env_id == BREAKOUT else "ale_py")
    fleet = Fleet(env_id, 2, seed=3, stagger=10, options=options)
    before = drive(fleet, 220)
    assert any(terminated.any() for _, _, terminated, _, _ in before)  # lives or games were lost on the way
    again = Fleet(env_id, 2, seed=3, options=options, state=fleet.state())
    assert np.array_equal(fleet.obs, again.obs)
    assert equal(drive(fleet, 60, seed=9), drive(again, 60, seed=9))


def test_staggered_games_are_at_different_points():
    pytest.importorskip("ale_py")
    in_step, staggered = (Fleet("sortrl/Freeway84-v0", 3, seed=0, stagger=stagger) for stagger in (0, 60))
    assert in_step.state()["lengths"].tolist() == [0, 0, 0]
    assert staggered.state()["lengths"].tolist() == [0, 20, 40]


@pytest.mark.slow
def test_processes_play_the_same_games():
    alone, together = Fleet("CartPole-v1", 3, seed=5, stagger=6), ParallelFleet("CartPole-v1", 3, seed=5, stagger=6)
    try:
        assert len(together) == 3
        assert np.array_equal(alone.obs, together.obs)
        assert equal(drive(alone, 50), drive(together, 50))
        stored = together.state()
        assert all(np.array_equal(array, stored[name]) for name, array in alone.state().items())
    finally:
        together.close()
        together.close()
    again = ParallelFleet("CartPole-v1", 3, seed=5, state=stored)
    try:
        assert equal(drive(alone, 50, seed=9), drive(again, 50, seed=9))
    finally:
        again.close()


def test_a_game_without_rewards_counts_as_lost_when_patience_ends():
    fleet = Fleet("sortrl/Freeway84-v0", 1, seed=0, lessons=Lessons(patience=5))  # who stands still is never rewarded
    first = fleet.obs.copy()
    ended = [bool(fleet.step([0]).terminated[0]) for _ in range(12)]
    assert ended == [False] * 4 + [True] + [False] * 4 + [True] + [False] * 2
    assert fleet.state()["episodes"].tolist() == [2]
    fleet.step([0])
    assert not np.array_equal(fleet.obs, first)


def test_a_lost_game_goes_back_a_little():
    freeway, lessons = "sortrl/Freeway84-v0", Lessons(patience=250, retry=1.0)  # who stands still is never rewarded
    fleet = Fleet(freeway, 1, seed=0, lessons=lessons)
    shown = [fleet.obs.copy()]
    for _ in range(249):
        assert not fleet.step([0]).terminated[0]
        shown.append(fleet.obs.copy())
    assert fleet.step([0]).terminated[0]
    assert np.array_equal(fleet.obs, shown[100])
    for before in shown[101:220]:
        fleet.step([0])
        assert np.array_equal(fleet.obs, before)
    assert fleet.state()["episodes"].tolist() == [0], "it is still the same episode"
    again = Fleet(freeway, 1, seed=0, state=fleet.state(), lessons=lessons)
    assert np.array_equal(fleet.obs, again.obs)
    assert equal(drive(fleet, 20), drive(again, 20))
    never = Fleet(freeway, 1, seed=0, lessons=Lessons(patience=250))
    for _ in range(250):
        never.step([0])
    assert never.state()["episodes"].tolist() == [1]


def test_sticky_games_are_spread_over_a_fleet():
    fleet = Fleet("sortrl/Pong84-v0", 6, seed=0, lessons=Lessons(sticky=0.5))
    assert [env.unwrapped.sticky for env in fleet._envs] == [0.0, 0.25] * 3
    fleet = Fleet("sortrl/Pong84-v0", 2, seed=0, lessons=Lessons(sticky=1.0))
    assert [env.unwrapped.sticky for env in fleet._envs] == [0.25] * 2
    with pytest.raises(TypeError, match="sticky"):
        Fleet("CartPole-v1", 2, seed=0, lessons=Lessons(sticky=1.0))

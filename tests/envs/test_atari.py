"""Protocol 84, checked against the emulator's own Gymnasium environment and a plain spelling-out of the protocol."""

from __future__ import annotations

import hashlib
import sys

import gymnasium as gym
import numpy as np
import pytest

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.envs import EnvSlots, Simulator, describe
from sortrl.envs.atari import GAMES, small_frame
from sortrl.envs.info import make_env

ale_py = pytest.importorskip("ale_py")

SHIFTS = {"Pong": 10, "Freeway": 0, "RoadRunner": 20, "BankHeist": 0}
ACTIONS = {
    "Pong": ["NOOP", "FIRE", "RIGHT", "LEFT"],
    "Freeway": ["NOOP", "UP", "DOWN"],
    "RoadRunner": ["NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN"],
    "BankHeist": ["NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN"],
}
# SHA-256, cut short, of 60 frames from seed 7; any change of a pixel or of the order of random draws shows here.
GOLDEN = {
    "Pong": "f988c1a9a59f7cca",
    "Freeway": "484cc189a747bb7e",
    "RoadRunner": "c308557cd4a7c28b",
    "BankHeist": "8f96b056093a4750",
}


def task(game):
    return f"sortrl/{game}84-v0"


def spelled_out(before, last, shift):
    """The protocol's image of two RGB frames, step by step."""
    rgb = np.maximum(before, last).astype(np.int64)
    grey = (rgb @ [9798, 19235, 3735] + 2**14) // 2**15  # OpenCV's fixed-point weights
    wide = np.pad(grey, ((0, 0), (4, 4)))[21 + shift : 189 + shift]
    blocks = wide.reshape(84, 2, 84, 2).sum(axis=(1, 3))
    return ((blocks + 2) // 4).astype(np.uint8)[None]


class Published:
    """The game as the literature plays it: ale-py's own environment, wrapped by hand."""

    def __init__(self, game):
        gym.register_envs(ale_py)
        self.env, self.shift = gym.make(f"{game}NoFrameskip-v4"), SHIFTS[game]

    def reset(self, noops, fire):
        self.env.reset(seed=0)
        for _ in range(noops):
            frame = self.env.step(0)[0]
        seen = spelled_out(frame, frame, self.shift)
        for action in (1, 2) if fire else ():
            seen, _ = self.step(action)
        return seen

    def step(self, action):
        frames, total = [], 0.0
        for _ in range(4):
            frame, reward, *_ = self.env.step(action)
            frames.append(frame)
            total += reward
        return spelled_out(frames[2], frames[3], self.shift), total


@pytest.mark.parametrize("game", list(GAMES))
def test_frames_and_rewards_are_those_of_the_protocol(game):
    env, published = make_env(task(game)), Published(game)
    seed = 7
    noops = int(np.random.default_rng(seed).integers(1, 30, endpoint=True))
    fire = "FIRE" in published.env.unwrapped.get_action_meanings()
    assert fire == (game != "Freeway")
    obs, _ = env.reset(seed=seed)
    assert np.array_equal(obs, published.reset(noops, fire))
    rng, digest = np.random.default_rng(0), hashlib.sha256(obs.tobytes())
    for _ in range(60):
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, _, _ = env.step(action)
        expected, expected_reward = published.step(action)
        assert np.array_equal(obs, expected)
        assert reward == expected_reward
        assert not terminated
        digest.update(obs.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[game]


@pytest.mark.parametrize("game", list(GAMES))
def test_what_the_agent_sees_and_does(game):
    info, env = describe(task(game)), make_env(task(game))
    assert info.is_image
    assert info.obs_shape == (1, 84, 84)
    assert (info.valid_low == 0).all()
    assert (info.valid_high == 255).all()
    assert info.max_steps == 10_000
    assert env.unwrapped.get_action_meanings() == ACTIONS[game]
    obs, _ = env.reset(seed=0)
    assert obs.dtype == np.uint8
    assert not obs[..., :2].any()  # the padding
    assert not obs[..., -2:].any()
    assert obs[..., 2:-2].any()


def test_rows_are_cropped_where_the_shift_says():
    screen = np.zeros((210, 160), np.uint8)
    screen[31], screen[31 + 167] = 14, 14  # the first and the last row that Pong keeps, in the brightest grey
    frame = small_frame(screen, np.zeros_like(screen), shift=10)[0, :, 2:-2]
    assert (frame[0] == 118).all()  # half of 236
    assert (frame[-1] == 118).all()
    assert not frame[1:-1].any()


def play(env, seed, steps=80):
    obs, _ = env.reset(seed=seed)
    rng, seen = np.random.default_rng(1), [obs]
    for _ in range(steps):
        obs, _, terminated, _, _ = env.step(int(rng.integers(env.action_space.n)))
        seen.append(obs)
        if terminated:
            break
    return np.stack(seen)


@pytest.mark.parametrize("game", list(GAMES))
def test_a_seed_fixes_an_episode_whatever_was_played_before(game):
    env = make_env(task(game))
    first = play(env, seed=3)
    starts = {play(env, seed=seed, steps=0).tobytes() for seed in range(12)}
    assert len(starts) > 1  # idle frames differ between seeds
    play(env, seed=5, steps=300)
    assert np.array_equal(play(env, seed=3), first)
    with EnvSlots(task(game), 1) as slots:
        assert np.array_equal(slots.reset(0, seed=3), first[0])


def test_actions_are_never_repeated_at_random():
    # With sticky actions, two emulators with different seeds of their own would part within a few hundred steps.
    for game in GAMES:
        env = make_env(task(game))
        assert env.unwrapped._ale.getFloat("repeat_action_probability") == 0.0


def test_lives_end_training_episodes_but_not_tests():
    whole, lives = make_env(task("BankHeist")), make_env(task("BankHeist"), episodic_life=True)
    rng, ends, left = np.random.default_rng(0), [], []
    whole.reset(seed=0)
    lives.reset(seed=0)
    for step in range(1200):
        action = int(rng.integers(6))
        _, _, over, _, info = whole.step(action)
        if over:
            assert info["lives"] == 0
            break
        if len(ends) == 0:
            _, _, ended, _, state = lives.step(action)
            if ended:
                ends.append(step)
                left.append(state["lives"])
                assert state["lives"] == info["lives"] > 0
                _, again = lives.reset()
                assert again["lives"] == state["lives"]  # goes on with the next life
                assert lives.reset(seed=0)[1]["lives"] > state["lives"]  # a named episode starts from the beginning
    assert ends
    assert over
    assert step > ends[0]


def test_episodes_can_be_branched():
    here = Simulator(task("Pong"), seed=1)
    for step in range(30):
        here.step(step % 4)
    there = here.fork()
    assert np.array_equal(here.obs, there.obs)
    assert np.array_equal(here.step(2)[0], there.step(2)[0])
    twin = here.fork()
    for _ in range(5):
        here.step(2)
        twin.step(3)
    assert not np.array_equal(here.obs, twin.obs)  # two emulators


def test_games_are_drawn_in_colour():
    env = make_env(task("Freeway"), render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)


def test_unknown_games_and_missing_packages_say_what_to_do(monkeypatch):
    with pytest.raises(SortRLError, match="Did you mean sortrl/Pong84-v0"):
        describe("sortrl/Pong85-v0")
    with pytest.raises(SortRLError, match="expected one of Pong"):
        make_env(task("Pong"), game="Tennis")
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[atari\]'"):
        describe(task("Pong"))
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[minatar\]'"):
        describe("sortrl/Breakout10-v0")


def test_sticky_actions_tell_episodes_of_one_start_apart_and_are_fixed_by_the_seed():
    env, sticky = make_env(task("Pong")), make_env("sortrl/Pong84-sticky-v0")
    assert sticky.unwrapped.sticky == 0.25
    first = play(sticky, seed=3)
    assert np.array_equal(play(sticky, seed=3), first)
    assert not np.array_equal(play(env, seed=3), first)
    here = Simulator("sortrl/Pong84-sticky-v0", seed=1)
    here.step(2)
    there = here.fork()
    assert all(np.array_equal(here.step(3)[0], there.step(3)[0]) for _ in range(40))
    with pytest.raises(SortRLError, match="sticky is 1, expected a probability below 1"):
        make_env(task("Pong"), sticky=1)

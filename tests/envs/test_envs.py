"""Environments: descriptions, errors that say what to do, episodes named by their seed."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.envs import EnvSlots, describe, greedy_returns
from sortrl.envs.info import make_env

needs_box2d = pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="box2d is not installed")


@pytest.mark.parametrize(
    ("env_id", "obs_shape", "n_actions", "max_steps", "first_name"),
    [
        ("CartPole-v1", (4,), 2, 500, "cart position"),
        ("Acrobot-v1", (6,), 3, 500, "cos of angle 1"),
        ("MountainCar-v0", (2,), 3, 200, "position"),
        pytest.param("LunarLander-v3", (8,), 4, 1000, "x position", marks=needs_box2d),
    ],
)
def test_describe_classic_tasks(env_id, obs_shape, n_actions, max_steps, first_name):
    info = describe(env_id)
    assert (info.env_id, info.obs_shape, info.n_actions, info.max_steps) == (env_id, obs_shape, n_actions, max_steps)
    assert len(info.obs_names) == info.obs_size
    assert info.obs_names[0] == first_name
    assert info.valid_low.dtype == info.valid_high.dtype == np.float64
    assert info.valid_low.shape == info.valid_high.shape == obs_shape
    assert (info.valid_low < info.valid_high).all()


def test_unbounded_dimensions_are_infinite():
    info = describe("CartPole-v1")
    assert np.isinf(info.valid_high).tolist() == [False, True, False, True]
    assert np.isneginf(info.valid_low).tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="read-only"):
        info.valid_low[0] = 0.0


class _Toy(gym.Env):
    """An environment whose spaces the tests choose. The largest float32 stands for 'unbounded', as in old tasks."""

    def __init__(self, actions=None, observations=None):
        self.action_space = actions or gym.spaces.Discrete(3)
        top = np.finfo(np.float32).max
        self.observation_space = observations or gym.spaces.Box(-top, top, (2, 3), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.low * 0, {}

    def step(self, action):
        return self.observation_space.low * 0, 1.0, False, False, {}


@pytest.fixture
def toy():
    """Registers a toy environment under an id and forgets it afterwards."""
    registered = []

    def register(name, **kwargs):
        gym.register(name, entry_point=lambda: _Toy(**kwargs))
        registered.append(name)
        return name

    yield register
    for name in registered:
        gym.registry.pop(name)


def test_describe_any_registered_environment(toy):
    info = describe(toy("SortrlToy-v0"))
    assert info.obs_shape == (2, 3)
    assert info.obs_names[:4] == ("obs[0, 0]", "obs[0, 1]", "obs[0, 2]", "obs[1, 0]")
    assert np.isposinf(info.valid_high).all()
    assert info.max_steps is None
    assert not info.is_image


BAD_SPACES = [
    ({"actions": gym.spaces.Box(-1, 1, (2,))}, "continuous actions .* this is for discrete ones"),
    ({"actions": gym.spaces.MultiDiscrete([9, 9])}, "81 combinations, .* expected at most 64"),
    ({"actions": gym.spaces.Discrete(3, start=1)}, r"expected Discrete\(n\) counted from 0"),
    ({"observations": gym.spaces.Discrete(5)}, "expected one Box"),
    ({"observations": gym.spaces.Dict({"a": gym.spaces.Discrete(5)})}, "FlattenObservation"),
]


@pytest.mark.parametrize(("kwargs", "message"), BAD_SPACES)
def test_unsupported_spaces_are_refused(toy, kwargs, message):
    with pytest.raises(SortRLError, match=message):
        describe(toy("SortrlToyBad-v0", **kwargs))


BAD_IDS = [
    ("LunarLander-v2", "LunarLander-v3"),
    ("CartPol-v1", "Did you mean .*CartPole-v1"),
    ("cartpole-v1", "Did you mean .*CartPole-v1"),
    ("CartPole-v7", "Did you mean CartPole-v1"),
    ("qqqqqqqq", "gymnasium.registry"),
    ("", "gymnasium.registry"),
    ("no_such_module_xyz:Task-v0", "Cannot import the module"),
    ("Pendulum-v1", "continuous actions"),
    (None, "expected a string"),
]


@pytest.mark.parametrize(("env_id", "message"), BAD_IDS)
def test_bad_ids_say_what_to_do(env_id, message):
    with pytest.raises(SortRLError, match=message):
        describe(env_id)


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is not None, reason="ale-py is installed")
@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "PongNoFrameskip-v4"])
def test_atari_names_its_extra(env_id):
    with pytest.raises(MissingDependency, match=r"sortrl\[atari\]"):
        describe(env_id)


def test_missing_box2d_names_its_extra(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("gymnasium.envs.box2d", "Box2D"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "Box2D", None)
    with pytest.raises(MissingDependency, match=r"pip install 'sortrl\[box2d\]'"):
        describe("LunarLander-v3")


def test_making_an_outdated_environment_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_env("CartPole-v0").close()


def play(slots, slot, seed, n=20):
    trace = [slots.reset(slot, seed)]
    for step in range(n):
        obs, reward, done = slots.step(slot, step % 2)
        trace.append(obs)
        assert reward == 1.0
        if done:
            break
    return np.stack(trace)


def test_an_episode_depends_on_its_seed_alone():
    with EnvSlots("CartPole-v1", 2) as slots:
        first = play(slots, 0, seed=11)
        assert np.array_equal(first, play(slots, 1, seed=11))  # in another slot
        assert not np.array_equal(first, play(slots, 0, seed=12))
        assert np.array_equal(first, play(slots, 0, seed=11))  # after another episode


def test_slots_tell_termination_from_truncation():
    with EnvSlots("CartPole-v1", 1) as slots:
        slots.reset(0, seed=0)
        while not slots.step(0, 1)[2]:  # pushing one way drops the pole
            pass
        assert slots.terminated[0]
        assert not slots.truncated[0]
        with pytest.raises(SortRLError, match="Call reset"):
            slots.step(0, 1)
    with EnvSlots("CartPole-v1", 1, max_episode_steps=5) as slots:
        slots.reset(0, seed=0)
        steps = 1
        while not slots.step(0, steps % 2)[2]:
            steps += 1
        assert steps == 5
        assert slots.truncated[0]
        assert not slots.terminated[0]


def test_slots_refuse_misuse():
    with pytest.raises(SortRLError, match="n is 0"):
        EnvSlots("CartPole-v1", 0)
    with EnvSlots("CartPole-v1", 1) as slots:
        assert len(slots) == 1
        with pytest.raises(SortRLError, match="no episode under way"):
            slots.step(0, 0)
    slots.close()  # twice is fine
    with pytest.raises(SortRLError, match="no seeds"):
        greedy_returns(Leaner(), "CartPole-v1", [])


class Leaner:
    """Pushes the cart towards the side the pole falls to."""

    def predict(self, obs):
        return (obs[:, 2] + obs[:, 3] > 0).astype(int), None


def test_greedy_returns_do_not_depend_on_the_number_of_slots():
    seeds = range(7)
    one = greedy_returns(Leaner(), "CartPole-v1", seeds, slots=1)
    assert np.array_equal(one, greedy_returns(Leaner(), "CartPole-v1", seeds, slots=3))
    assert np.array_equal(one[::-1], greedy_returns(Leaner(), "CartPole-v1", seeds[::-1], slots=32))
    assert 100 < one.mean() <= 500


def test_raw_units_of_pixels_are_named_once():
    vector = describe("MountainCar-v0")
    assert vector.raw_units(np.array([2.0, 0.5])) == [("position", 2.0), ("velocity", 0.5)]
    shape = (1, 4, 4)
    image = replace(vector, obs_shape=shape, obs_dtype=np.dtype(np.uint8), obs_names=tuple(map(str, range(16))))
    assert image.raw_units(np.full(shape, 255.0)) == [("every pixel", 255.0)]
    assert len(image.raw_units(np.arange(1.0, 17.0).reshape(shape))) == 16

"""Environments as users bring them: functions, vectors, modules, Dicts, joint actions, images with their channels last, frames."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

import sortrl
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import as_array
from sortrl.envs import describe, env_id_of
from sortrl.envs.info import make_env

VECTOR = spaces.Box(-1, 1, (3,))
DICT = spaces.Dict({"pos": VECTOR, "aim": spaces.Box(-2, 2, (2,))})


class Toy(gym.Env):
    """Random observations of any space; refuses actions that are not of its own space."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps > 5, {}


def toy(observation_space=VECTOR, action_space=None):
    return lambda: Toy(observation_space, action_space or spaces.Discrete(2))


def play(env, n_actions):
    """What a policy that plays every action in turn returns."""
    actions = iter(range(10**6))
    return sortrl.evaluate(
        lambda obs: np.array([next(actions) % n_actions for _ in obs]), env, episodes=2, slots=1
    ).returns.tolist()


def test_a_function_is_an_environment():
    assert play(toy(), 2) == [6.0, 6.0]
    assert env_id_of(toy()) == "factory/Toy-v0"
    with pytest.raises(SortRLError, match="made a int, expected a gymnasium"):
        env_id_of(lambda: 3)
    with pytest.raises(SortRLError, match="expected an id"):
        env_id_of(3)


def test_a_dict_of_boxes_is_flattened_with_names():
    info = describe(env_id_of(toy(DICT)))
    assert info.obs_names == ("aim[0]", "aim[1]", "pos[0]", "pos[1]", "pos[2]")
    assert info.valid_high.tolist() == [2, 2, 1, 1, 1]
    assert play(toy(DICT), 2) == [6.0, 6.0]
    env = toy(DICT)()
    obs, _ = env.reset(seed=4)
    flat, _ = make_env(env_id_of(toy(DICT))).reset(seed=4)
    policy = sortrl.SortPolicy((5,), 2, width=8, depth=2)
    np.testing.assert_array_equal(as_array(obs, (5,)), flat)
    assert policy.predict(obs)[0] == policy.predict(flat)[0]
    assert policy.predict_certified(obs).radius == policy.predict_certified(flat).radius


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"picture": spaces.Box(0, 255, (8, 8, 3), np.uint8)}),
        spaces.Dict({"count": spaces.Discrete(3)}),
        spaces.Discrete(4),
    ],
)
def test_other_observations_are_refused(space):
    with pytest.raises(SortRLError, match="expected one Box"):
        describe(env_id_of(toy(space)))


def test_joint_actions_are_counted_through():
    info = describe(env_id_of(toy(action_space=spaces.MultiDiscrete([2, 3]))))
    assert info.n_actions == 6
    assert info.action_names[4] == "(1, 1)"
    assert play(toy(action_space=spaces.MultiDiscrete([2, 3])), 6) == [6.0, 6.0]
    assert describe(env_id_of(toy(action_space=spaces.MultiDiscrete([8, 8])))).n_actions == 64
    with pytest.raises(SortRLError, match="have 72 combinations"):
        describe(env_id_of(toy(action_space=spaces.MultiDiscrete([8, 9]))))


def test_images_get_their_channels_first():
    images = toy(spaces.Box(0, 255, (12, 10, 3), np.uint8))
    info = describe(env_id_of(images))
    assert info.obs_shape == (3, 12, 10)
    assert info.is_image
    assert play(images, 2) == [6.0, 6.0]
    policy = sortrl.SortPolicy((3, 12, 10), 2, width=8, depth=2)
    raw = np.random.default_rng(0).integers(0, 255, (12, 10, 3), dtype=np.uint8)
    assert policy.predict_certified(raw).radius == policy.predict_certified(np.moveaxis(raw, 2, 0)).radius
    assert policy.predict(raw[None])[0].shape == (1,)


def test_frames_are_those_of_sb3():
    theirs = VecFrameStack(DummyVecEnv([lambda: gym.make("CartPole-v1")]), 3)
    ours = make_env("frames-3/CartPole-v1")
    theirs.seed(5)
    np.testing.assert_allclose(theirs.reset()[0], ours.reset(seed=5)[0])
    for action in (0, 1, 1, 0):
        np.testing.assert_allclose(theirs.step([action])[0][0], ours.step(action)[0])
    info = describe("frames-3/CartPole-v1")
    assert (info.env_id, info.obs_shape) == ("frames-3/CartPole-v1", (12,))
    assert info.obs_names[0] == "cart position, 2 steps ago"
    assert info.obs_names[-1] == "pole angular velocity"


def test_a_vec_env_is_known_by_what_it_was_made_of():
    plain = make_vec_env("CartPole-v1", 2)  # behind SB3's Monitor
    assert env_id_of(plain) == "CartPole-v1"
    assert env_id_of(VecFrameStack(VecNormalize(plain), 4)) == "frames-4/CartPole-v1"
    with pytest.raises(SortRLError, match=r"not made by an id.*a function that makes one"):
        env_id_of(DummyVecEnv([toy()]))
    with pytest.raises(SortRLError, match="changed by TransformReward"):
        env_id_of(DummyVecEnv([lambda: gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda r: r)]))
    assert env_id_of(gym.make("CartPole-v1")) == "CartPole-v1"


def test_tasks_of_this_package_are_found_by_gymnasium():
    pytest.importorskip("minatar", reason="minatar is not installed")
    assert gym.make("sortrl.envs:sortrl/Breakout10-v0").action_space.n == 3

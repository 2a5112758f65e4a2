"""Agents with continuous actions: read from their tensors alone, they answer as Stable-Baselines3 does."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, DDPG, PPO, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sortrl.core.errors import SortRLError
from sortrl.teachers import ContinuousTeacher, load_continuous, load_teacher

SMALL = {"net_arch": [16, 8]}  # copied each time: Stable-Baselines3 writes into what it is given


class Reach(gym.Env):
    """Two sensors, three numbers of unequal ranges."""

    observation_space = gym.spaces.Box(-3.0, 3.0, (2,), np.float32)
    action_space = gym.spaces.Box(np.array([-1.0, 0.0, -5.0]), np.array([1.0, 4.0, 5.0]), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("SortrlReach-v0", Reach, max_episode_steps=5)
AGENTS = {
    "ppo": lambda: PPO("MlpPolicy", "SortrlReach-v0", policy_kwargs={**SMALL}, seed=0),
    "ppo with states of noise": lambda: PPO(
        "MlpPolicy", "SortrlReach-v0", use_sde=True, policy_kwargs={**SMALL}, seed=0
    ),
    "ppo through tanh": lambda: PPO(
        "MlpPolicy", "SortrlReach-v0", use_sde=True, policy_kwargs={**SMALL, "squash_output": True}, seed=0
    ),
    "a2c": lambda: A2C("MlpPolicy", "SortrlReach-v0", policy_kwargs={**SMALL, "activation_fn": torch.nn.ReLU}, seed=0),
    "sac": lambda: SAC("MlpPolicy", "SortrlReach-v0", policy_kwargs={**SMALL}, seed=0, buffer_size=10),
    "td3": lambda: TD3("MlpPolicy", "SortrlReach-v0", policy_kwargs={**SMALL}, seed=0, buffer_size=10),
    "ddpg": lambda: DDPG("MlpPolicy", "SortrlReach-v0", policy_kwargs={**SMALL}, seed=0, buffer_size=10),
}


def shaken(model):
    """Large enough weights that actions leave the middle of their range."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.35 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", AGENTS)
def test_the_teacher_answers_as_its_model_does(name, tmp_path):
    model = shaken(AGENTS[name]())
    model.save(tmp_path / "agent.zip")
    obs = np.random.default_rng(0).uniform(-3, 3, (200, 2)).astype(np.float32)
    expected = model.predict(obs, deterministic=True)[0]
    assert (np.ptp(expected, axis=0) > 0.1).all(), "the answers must differ"
    for source in (tmp_path / "agent.zip", tmp_path / "agent", model):
        teacher = load_continuous(source, "SortrlReach-v0")
        np.testing.assert_allclose(teacher.predict(obs)[0], expected, rtol=0, atol=2e-6)
    teacher.save(tmp_path / "kept")
    again = load_continuous(tmp_path / "kept", "SortrlReach-v0")
    np.testing.assert_array_equal(again.predict(obs)[0], teacher.predict(obs)[0])
    assert again.algorithm == teacher.algorithm
    assert teacher.predict(obs[0])[0].shape == (3,)


def test_statistics_of_vecnormalize_are_taken_along(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gym.make("SortrlReach-v0")]))
    env.obs_rms.mean, env.obs_rms.var = np.array([1.0, -1.0]), np.array([4.0, 0.25])
    model = shaken(PPO("MlpPolicy", env, policy_kwargs={**SMALL}, seed=0))
    obs = np.random.default_rng(0).uniform(-3, 3, (50, 2))
    expected = model.predict(env.normalize_obs(obs).astype(np.float32), deterministic=True)[0]
    np.testing.assert_allclose(load_continuous(model, "SortrlReach-v0").predict(obs)[0], expected, atol=1e-5)


def test_modules_and_functions():
    module = load_continuous(torch.nn.Linear(3, 1), "Pendulum-v1")
    assert module.actions(torch.zeros(2, 3, requires_grad=True)).requires_grad
    function = load_continuous(lambda obs: 100.0 * obs[:, :1], "Pendulum-v1")
    assert function.predict(np.ones(3))[0] == np.float32(2.0), "clipped to the range"
    with pytest.raises(SortRLError, match="no gradient"):
        function.actions(torch.zeros(2, 3, requires_grad=True))


WRONG = {
    "another task": (lambda: load_continuous(AGENTS["ppo"](), "Pendulum-v1"), "Is this the agent of another task"),
    "too many numbers": (
        lambda: load_continuous(lambda obs: np.zeros((len(obs), 2)), "Pendulum-v1"),
        r"expected actions \(2, 1\)",
    ),
    "discrete task": (lambda: load_continuous(torch.nn.Linear(4, 1), "CartPole-v1"), "expected continuous ones, a Box"),
    "discrete door": (
        lambda: load_teacher(AGENTS["sac"](), "CartPole-v1"),
        "continuous actions, and this is for discrete ones",
    ),
    "nothing": (lambda: load_continuous(3, "Pendulum-v1"), "Cannot make a teacher of int"),
    "absent": (lambda: load_continuous("absent.zip", "Pendulum-v1"), "no such file"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name):
    call, message = WRONG[name]
    with pytest.raises(SortRLError, match=message):
        call()


def test_a_mean_that_is_clipped_before_tanh_is_refused():
    """SAC with generalized state-dependent exploration clips its mean; what is not known exactly is not guessed."""
    model = SAC("MlpPolicy", "SortrlReach-v0", use_sde=True, policy_kwargs={**SMALL}, seed=0, buffer_size=10)
    with pytest.raises(SortRLError, match="Known are PPO"):
        load_continuous(model, "SortrlReach-v0")


def test_a_q_learner_is_no_actor(tmp_path):
    from stable_baselines3 import DQN

    DQN("MlpPolicy", "CartPole-v1", policy_kwargs={"net_arch": [4]}, buffer_size=10).save(tmp_path / "dqn.zip")
    with pytest.raises(SortRLError, match="Known are PPO"):
        load_continuous(tmp_path / "dqn.zip", "Pendulum-v1")


def test_a_teacher_stays_frozen():
    teacher = load_continuous(torch.nn.Linear(3, 1), "Pendulum-v1")
    assert isinstance(teacher, ContinuousTeacher)
    assert not teacher.train().training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())

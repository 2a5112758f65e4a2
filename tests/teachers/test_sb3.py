"""Stable-Baselines3 agents: read from tensors alone, faithful to the original, harmless when hostile."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
from torch import nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Policy
from sortrl.teachers import load_normalizer, load_teacher
from sortrl.teachers.load import archives


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def image_env():
    return FakeImageEnv(screen_height=48, screen_width=40, n_channels=3, discrete=True)


def small_ppo(policy="MlpPolicy", env="CartPole-v1", **kwargs):
    return PPO(policy, env, n_steps=8, batch_size=8, device="cpu", seed=1, **kwargs)


AGENTS = {
    "ppo": (small_ppo, "ppo"),
    "ppo relu": (
        lambda: small_ppo(policy_kwargs={"activation_fn": nn.ReLU, "net_arch": {"pi": [7], "vf": [5, 3]}}),
        "ppo",
    ),
    "ppo no hidden": (lambda: small_ppo(policy_kwargs={"net_arch": []}), "ppo"),
    "ppo images": (lambda: small_ppo("CnnPolicy", image_env()), "ppo"),
    "ppo unshared": (
        lambda: small_ppo("CnnPolicy", image_env(), policy_kwargs={"share_features_extractor": False}),
        "ppo",
    ),
    "a2c": (lambda: A2C("MlpPolicy", "Acrobot-v1", device="cpu", seed=1), "a2c"),
    "dqn": (lambda: DQN("MlpPolicy", "CartPole-v1", device="cpu", buffer_size=10, seed=1), "dqn"),
    "dqn images": (lambda: DQN("CnnPolicy", image_env(), device="cpu", buffer_size=10, seed=1), "dqn"),
    "qrdqn": (lambda: contrib().QRDQN("MlpPolicy", "CartPole-v1", device="cpu", buffer_size=10, seed=1), "qrdqn"),
    "trpo": (lambda: contrib().TRPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu", seed=1), "trpo"),
    "ars": (lambda: contrib().ARS("LinearPolicy", "CartPole-v1", device="cpu", seed=1), "ars"),
    "ars with layers": (lambda: contrib().ARS("MlpPolicy", "CartPole-v1", device="cpu", seed=1), "ars"),
}


def contrib():
    return pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")


def reference_scores(model, raw):
    obs, _ = model.policy.obs_to_tensor(raw)
    if hasattr(model, "q_net"):
        return model.q_net(obs)
    if hasattr(model, "quantile_net"):
        return model.quantile_net(obs).mean(dim=1)
    if not hasattr(model.policy, "get_distribution"):
        return model.policy.action_net(model.policy.extract_features(obs, model.policy.features_extractor))
    return model.policy.get_distribution(obs).distribution.logits


@pytest.mark.parametrize("name", AGENTS)
def test_converted_agents_act_as_the_original(name, tmp_path):
    make, algorithm = AGENTS[name]
    model = make()
    model.save(tmp_path / "agent")
    model.observation_space.seed(0)
    raw = np.stack([model.observation_space.sample() for _ in range(64)])
    if raw.dtype != np.uint8:
        raw = np.random.default_rng(0).normal(size=raw.shape).astype(np.float32)
    with torch.no_grad():
        expected = reference_scores(model, raw)
    for teacher in (load_teacher(tmp_path / "agent"), load_teacher(tmp_path / "agent.zip"), load_teacher(model)):
        assert teacher.algorithm == algorithm
        assert isinstance(teacher, Policy)
        scores = teacher.scores(teacher.normalize(raw))
        if algorithm in ("ppo", "a2c", "trpo", "ars"):
            if algorithm != "ars":  # logits are known up to a constant
                scores = scores.log_softmax(dim=1)
            assert teacher.values(teacher.normalize(raw)) is None
        else:
            assert torch.equal(teacher.values(teacher.normalize(raw)), scores)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)
        assert np.array_equal(teacher.predict(raw)[0], model.predict(raw, deterministic=True)[0])


def test_a_live_model_brings_its_vecnormalize(tmp_path):
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), clip_obs=3.0)
    model = small_ppo(env=env)
    model.learn(64)
    teacher = load_teacher(model, "CartPole-v1")
    assert teacher.normalizer.clip == 3.0
    raw = np.random.default_rng(0).normal(size=(50, 4)) * 5
    assert np.allclose(teacher.normalize(raw), env.normalize_obs(raw), atol=1e-6)
    assert np.array_equal(teacher.predict(raw)[0], model.predict(env.normalize_obs(raw), deterministic=True)[0])

    env.save(str(tmp_path / "stats.pkl"))
    model.save(tmp_path / "agent.zip")
    reloaded = load_teacher(tmp_path / "agent.zip", vecnormalize=tmp_path / "stats.pkl", allow_pickle=True)
    assert torch.equal(reloaded.normalizer(raw), teacher.normalizer(raw))
    assert torch.equal(load_teacher(tmp_path / "agent.zip", vecnormalize=env).normalizer(raw), teacher.normalizer(raw))


def test_only_an_agent_behind_vecnormalize_is_said_to_lack_its_statistics(tmp_path, recwarn):
    """Off-policy agents keep the last original observation whatever they were trained behind."""
    dqn = DQN("MlpPolicy", "CartPole-v1", buffer_size=200, learning_starts=50, device="cpu", seed=0).learn(60)
    dqn.save(tmp_path / "dqn.zip")
    assert b"_last_original_obs" in zipfile.ZipFile(tmp_path / "dqn.zip").read("data")
    load_teacher(tmp_path / "dqn.zip", "CartPole-v1")
    assert not [one for one in recwarn if "VecNormalize" in str(one.message)]
    ppo = small_ppo(env=VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")])))
    ppo.learn(64).save(tmp_path / "ppo.zip")
    with pytest.warns(UserWarning, match="trained behind VecNormalize"):
        load_teacher(tmp_path / "ppo.zip", "CartPole-v1")


def test_unnormalised_observations_behind_vecnormalize():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]), norm_obs=False)
    teacher = load_teacher(small_ppo(env=env))
    raw = np.ones((1, 4))
    assert torch.equal(teacher.normalize(raw), torch.ones(1, 4))
    with pytest.raises(SortRLError, match="norm_obs is False"):
        load_teacher(small_ppo(), vecnormalize=env)


def test_old_layout_with_shared_layers(tmp_path):
    """Stable-Baselines3 before 1.8 could share layers between policy and value; no ``data`` is needed to read them."""
    torch.manual_seed(0)
    shared, own, last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
    state = {}
    for prefix, layer in (
        ("mlp_extractor.shared_net.0", shared),
        ("mlp_extractor.policy_net.0", own),
        ("action_net", last),
    ):
        state |= {f"{prefix}.weight": layer.weight.data, f"{prefix}.bias": layer.bias.data}
    state |= {"value_net.weight": torch.zeros(1, 6), "value_net.bias": torch.zeros(1)}
    teacher = load_teacher(write_agent(tmp_path / "old.zip", state))
    raw = torch.randn(9, 4)
    expected = last(own(shared(raw).tanh()).tanh())
    torch.testing.assert_close(teacher.scores(raw), expected.detach())
    assert teacher.algorithm == "actor-critic"


# --- hostile and broken files -----------------------------------------------------------------------------------------


class Trap:
    """A pickle that makes a file when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def write_agent(path, state, data=None):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("policy.pth", buffer.getvalue())
        if data is not None:
            archive.writestr("data", data if isinstance(data, str) else json.dumps(data))
    return path


def mlp_state(**more):
    weights = {"q_net.q_net.0.weight": torch.ones(2, 4), "q_net.q_net.0.bias": torch.zeros(2)}
    return weights | more


def test_nothing_in_an_agent_is_executed(tmp_path):
    import base64

    mark = tmp_path / "executed"
    text = base64.b64encode(pickle.dumps(Trap(mark))).decode()
    assert pickle.loads(base64.b64decode(text)) is not None
    assert mark.exists()  # the trap works
    mark.unlink()
    data = {"policy_kwargs": {":type:": "dict", ":serialized:": text}, "observation_space": {":serialized:": text}}
    teacher = load_teacher(write_agent(tmp_path / "agent.zip", mlp_state(), data))
    assert teacher.n_actions == 2
    with pytest.raises(SortRLError, match="something else than tensors"):
        load_teacher(write_agent(tmp_path / "trap.zip", mlp_state(extra=Trap(mark))))
    (tmp_path / "stats.pkl").write_bytes(pickle.dumps(Trap(mark)))
    for allow_pickle in (False, True):
        with pytest.raises(SortRLError):
            load_normalizer(tmp_path / "stats.pkl", allow_pickle)
    assert not mark.exists()


BAD_AGENTS = [
    (mlp_state(log_std=torch.zeros(1)), None, "continuous actions, and this is for discrete ones"),
    ({"actor.mu.weight": torch.ones(1, 1)}, None, "continuous actions, and this is for discrete ones"),
    ({"lstm_actor.weight_ih_l0": torch.ones(4, 4)}, None, r"unknown network layout.*lstm_actor.weight_ih_l0 \(4, 4\)"),
    (mlp_state(**{"q_net.extra.weight": torch.ones(3)}), None, "unknown network layout"),
    ({}, None, "no tensors"),
    ([1, 2], None, "not a dictionary of tensors"),
    ({"a": 3}, None, "not a dictionary of tensors"),
    (mlp_state(**{"q_net.q_net.0.weight": torch.full((2, 4), float("nan"))}), None, "NaN"),
    (mlp_state(**{"q_net.q_net.0.weight": torch.ones(2)}), None, "unknown layer"),
    (
        mlp_state(**{"q_net.q_net.2.weight": torch.ones(2, 9), "q_net.q_net.2.bias": torch.ones(2)}),
        None,
        r"shapes .* expected",
    ),
    (mlp_state(), "not json", "data member is not valid JSON"),
    (mlp_state(), {"observation_space": {"_shape": [5]}}, "do not fit a first layer with 4 inputs"),
    (mlp_state(), {"policy_kwargs": {"activation_fn": "<class 'my.Snake'>"}}, "'Snake' is not known"),
    (
        {"quantile_net.quantile_net.0.weight": torch.ones(6, 4), "quantile_net.quantile_net.0.bias": torch.ones(6)},
        {"n_quantiles": 4},
        "cannot be 4 quantiles",
    ),
    (
        {"quantile_net.quantile_net.0.weight": torch.ones(6, 4), "quantile_net.quantile_net.0.bias": torch.ones(6)},
        None,
        "quantiles is unknown",
    ),
    (mlp_state(**{"q_net.q_net.0.weight": torch.ones(1).expand(2**15, 2**15)}), None, "claims tensors of more"),
]


@pytest.mark.parametrize(("state", "data", "message"), BAD_AGENTS)
def test_bad_agents_are_refused_with_a_reason(tmp_path, state, data, message):
    with pytest.raises(SortRLError, match=message):
        load_teacher(write_agent(tmp_path / "bad.zip", state, data))


def test_a_zip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MOST_BYTES", 2**20)
    with zipfile.ZipFile(tmp_path / "outer.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("policy.pth", bytes(2**21))
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**21))
    with zipfile.ZipFile(tmp_path / "inner.zip", "w") as archive:
        archive.writestr("policy.pth", inner.getvalue())
    for name, message in (("outer", "declares 2097152 bytes"), ("inner", "unpacks to more")):
        assert (tmp_path / f"{name}.zip").stat().st_size < 2**14
        with pytest.raises(SortRLError, match=message):
            load_teacher(tmp_path / f"{name}.zip")


def test_sources_that_are_no_agents(tmp_path):
    (tmp_path / "text.zip").write_text("hello")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "hello")
    cases = [
        (tmp_path / "text.zip", "not a readable zip"),
        (tmp_path / "other.zip", "no policy.pth in it, found readme"),
        (tmp_path / "empty", r"holds no teacher\.safetensors"),
        (tmp_path / "absent.zip", "no such file"),
        (42, "Cannot make a teacher of int"),
        (nn.Linear(4, 2), "pass env_id"),
        (lambda obs: obs, "pass env_id"),
    ]
    for source, message in cases:
        with pytest.raises(SortRLError, match=message):
            load_teacher(source)
    whole = write_agent(tmp_path / "whole.zip", mlp_state()).read_bytes()
    for cut in (100, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.zip").write_bytes(whole[:cut])
        with pytest.raises(SortRLError, match="not a readable zip"):
            load_teacher(tmp_path / "cut.zip")


def test_agents_are_checked_against_the_task_and_the_normalisation(tmp_path):
    path = write_agent(tmp_path / "agent.zip", mlp_state())
    with pytest.raises(SortRLError, match="agent of another task"):
        load_teacher(path, "Acrobot-v1")
    with pytest.raises(SortRLError, match=r"shape \(3,\), but the agent sees \(4,\)"):
        load_teacher(path, normalizer=Normalizer.identity((3,)))
    with pytest.raises(SortRLError, match="Give one"):
        load_teacher(path, normalizer=Normalizer.identity((4,)), vecnormalize="x.pkl")


SPACES = {
    "joint actions": (spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([2, 3]), "MlpPolicy"),
    "dict": (
        spaces.Dict({"b": spaces.Box(-1, 1, (3,)), "a": spaces.Box(-2, 2, (2,))}),
        spaces.Discrete(3),
        "MultiInputPolicy",
    ),
    "channels last": (spaces.Box(0, 255, (48, 40, 3), np.uint8), spaces.Discrete(3), "CnnPolicy"),
}


@pytest.mark.parametrize("name", SPACES)
def test_agents_of_other_spaces_act_as_the_original(name, tmp_path):
    observations, actions, policy = SPACES[name]

    class Bare(gym.Env):
        observation_space, action_space = observations, actions

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

    model = small_ppo(policy, Bare())
    model.save(tmp_path / "agent")
    observations.seed(0)
    for teacher in (load_teacher(tmp_path / "agent.zip", env_id=Bare), load_teacher(model, env_id=Bare)):
        seen = set()
        for _ in range(32):
            obs = observations.sample()
            action, _ = teacher.predict(obs)
            joint = isinstance(actions, spaces.MultiDiscrete)
            own = np.array(np.unravel_index(int(action), actions.nvec)) if joint else action
            np.testing.assert_array_equal(own, model.predict(obs, deterministic=True)[0])
            seen.add(int(action))
        assert len(seen) > 1


def test_an_agent_of_stacked_frames_says_how_to_name_its_environment():
    stacked = VecFrameStack(DummyVecEnv([lambda: gym.make("CartPole-v1")]), 4)
    model = small_ppo(env=stacked)
    with pytest.raises(SortRLError, match="name the environment frames-4/CartPole-v1"):
        load_teacher(model, env_id="CartPole-v1")
    assert load_teacher(model, env_id=stacked).obs_shape == (16,)

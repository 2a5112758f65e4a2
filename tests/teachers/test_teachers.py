"""Teachers: the contract of predict and scores, their files, and every kind of source but zips (see test_sb3.py)."""

from __future__ import annotations

import importlib.util
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.envs import greedy_returns
from sortrl.teachers import Architecture, Teacher, load_normalizer, load_teacher, save_normalizer

PUBLISHED = Path(os.environ.get("SORTRL_TEACHERS") or Path(__file__).parents[3] / "shared" / "teachers") / "sb3"
needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no published agents; set SORTRL_TEACHERS")
needs_box2d = pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="box2d is not installed")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# --- published agents -------------------------------------------------------------------------------------------------

KNOWN_RETURNS = [
    ("ppo-CartPole-v1", "CartPole-v1", False, 500.0, 0.5),
    ("ppo-Acrobot-v1", "Acrobot-v1", True, -70.7, 3.0),
    ("ppo-MountainCar-v0", "MountainCar-v0", True, -106.9, 4.0),
    pytest.param("ppo-LunarLander-v2", "LunarLander-v3", False, 251.4, 8.0, marks=needs_box2d),
]


@needs_published
@pytest.mark.teachers
@pytest.mark.parametrize(("name", "env_id", "normalised", "expected", "tolerance"), KNOWN_RETURNS)
def test_published_agents_reach_their_known_return(name, env_id, normalised, expected, tolerance):
    statistics = PUBLISHED / f"{name}-vecnormalize.pkl" if normalised else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        teacher = load_teacher(PUBLISHED / f"{name}.zip", env_id, vecnormalize=statistics, allow_pickle=True)
    assert teacher.algorithm == "ppo"
    assert teacher.architecture.hidden == (64, 64)
    assert teacher.architecture.activation == "Tanh"
    assert teacher.normalizer.clip == (10.0 if normalised else np.inf)
    assert greedy_returns(teacher, env_id, range(30)).mean() == pytest.approx(expected, abs=tolerance)


@needs_published
@pytest.mark.teachers
def test_published_agent_without_its_statistics_is_warned_about():
    with pytest.warns(UserWarning, match="trained behind VecNormalize"):
        load_teacher(PUBLISHED / "ppo-Acrobot-v1.zip", "Acrobot-v1")


# --- the teacher itself -----------------------------------------------------------------------------------------------


def small_teacher(algorithm="ppo", clip=np.inf):
    torch.manual_seed(3)
    architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(8,), activation="Tanh")
    normalizer = Normalizer(np.arange(4.0), np.array([1.0, 2.0, 0.5, 1.0]), clip)
    return Teacher(architecture.build(), normalizer, 2, "small", algorithm, architecture)


def test_predict_follows_the_contract_of_stable_baselines():
    teacher = small_teacher()
    raw = np.random.default_rng(0).normal(size=(30, 4)) * 4
    actions, state = teacher.predict(raw, state="memory", episode_start=np.ones(30, bool), deterministic=True)
    assert state == "memory"
    assert actions.shape == (30,)
    assert actions.dtype == np.int64
    assert set(actions) == {0, 1}
    for row, action in zip(raw, actions, strict=True):
        single, state = teacher.predict(row)
        assert single.shape == ()
        assert state is None
        assert int(single) == action
    assert np.array_equal(teacher.predict(torch.from_numpy(raw))[0], actions)
    with pytest.raises(SortRLError, match="expected"):
        teacher.predict(np.zeros((2, 5)))


def test_stochastic_predictions_follow_the_softmax():
    teacher = small_teacher()
    raw = np.repeat(np.arange(4.0)[None] + 0.5, 4000, axis=0)
    chance = teacher.scores(teacher.normalize(raw[:1])).softmax(dim=1)[0, 1].item()
    assert 0.05 < chance < 0.95
    torch.manual_seed(0)
    assert teacher.predict(raw, deterministic=False)[0].mean() == pytest.approx(chance, abs=0.03)
    greedy = small_teacher("dqn")
    assert len(set(greedy.predict(raw, deterministic=False)[0])) == 1


def test_a_teacher_is_frozen_yet_differentiable():
    teacher = small_teacher()
    teacher.train()
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    unit = torch.randn(5, 4, requires_grad=True)
    teacher.scores(unit).sum().backward()
    assert (unit.grad.abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize("clip", [4.0, np.inf])
def test_save_and_load(tmp_path, clip):
    teacher = small_teacher(clip=clip)
    teacher.save(tmp_path / "t")
    raw = np.random.default_rng(0).normal(size=(30, 4)) * 9
    for read in (Teacher.load(tmp_path / "t"), load_teacher(tmp_path / "t", "CartPole-v1")):
        assert (read.name, read.algorithm, read.architecture) == ("small", "ppo", teacher.architecture)
        assert read.normalizer.clip == clip
        assert torch.equal(read.scores(read.normalize(raw)), teacher.scores(teacher.normalize(raw)))
    shifted = load_teacher(tmp_path / "t", normalizer=Normalizer.identity((4,)))
    assert torch.equal(shifted.normalize(raw), torch.from_numpy(raw).float())


def test_damaged_teachers_are_refused(tmp_path):
    from sortrl.core.files import read_tensors, write_tensors

    small_teacher().save(tmp_path)
    path = tmp_path / "teacher.safetensors"
    tensors, metadata = read_tensors(path)
    cases = [
        (tensors, metadata | {"format": "other"}, "not a saved teacher"),
        (tensors, metadata | {"architecture": {"x": 1}}, "Not the description"),
        (tensors, metadata | {"architecture": metadata["architecture"] | {"hidden": [9]}}, "does not fit"),
        (tensors, metadata | {"architecture": metadata["architecture"] | {"activation": "Exp"}}, "'Exp' is not known"),
        (tensors, metadata | {"architecture": metadata["architecture"] | {"hidden": [-1]}}, "positive integer"),
        ({name: tensor for name, tensor in tensors.items() if "mean" not in name}, metadata, "lacks or garbles"),
    ]
    for some_tensors, some_metadata, message in cases:
        write_tensors(path, some_tensors, some_metadata)
        with pytest.raises(SortRLError, match=message):
            Teacher.load(tmp_path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(SortRLError, match="not a readable safetensors"):
        Teacher.load(tmp_path)


# --- modules and callables --------------------------------------------------------------------------------------------


def test_a_torch_module_is_copied_and_frozen():
    module = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    teacher = load_teacher(module, "CartPole-v1")
    assert module.training
    assert module[0].weight.requires_grad  # the caller's own module is untouched
    unit = torch.randn(8, 4, requires_grad=True)
    torch.testing.assert_close(teacher.scores(unit), module[0](unit))
    teacher.scores(unit).sum().backward()
    assert unit.grad is not None
    with pytest.raises(SortRLError, match="cannot be saved"):
        teacher.save("nowhere")
    with pytest.raises(SortRLError, match=r"returned \(2, 3\).*expected scores \(2, 2\)"):
        load_teacher(nn.Linear(4, 3), "CartPole-v1")
    with pytest.raises(SortRLError, match="failed on a batch"):
        load_teacher(nn.Linear(5, 2), "CartPole-v1")


def test_callables_give_actions_or_scores_but_no_gradient():
    normalizer = Normalizer(np.ones(4), np.full(4, 2.0))
    raw = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    expected = (raw[:, 2] > 0).astype(int)
    kinds = {
        "actions": lambda obs: (obs[:, 2] > 0).astype(np.int32),
        "scores": lambda obs: np.stack([-obs[:, 2], obs[:, 2]], axis=1),
        "predict": lambda obs: ((obs[:, 2] > 0).astype(int), None),
    }
    for name, function in kinds.items():
        teacher = load_teacher(function, "CartPole-v1", normalizer=normalizer)
        assert np.array_equal(teacher.predict(raw)[0], expected), name  # the callable sees raw observations
        unit = teacher.normalize(raw).requires_grad_()
        with pytest.raises(SortRLError, match="no gradient"):
            teacher.scores(unit)
        with torch.no_grad():
            assert teacher.scores(unit).shape == (20, 2)
    one_hot = load_teacher(kinds["actions"], "CartPole-v1").scores(torch.tensor([[0.0, 0.0, 1.0, 0.0]]))
    assert one_hot.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda obs: np.full(len(obs), 2), r"actions 2\.\.2, expected 0\.\.1"),
        (lambda obs: np.zeros((len(obs), 3)), "expected integer actions"),
        (lambda obs: np.zeros(len(obs)), "expected integer actions"),
        (lambda obs: 1 / 0, "failed on a batch"),
    ],
)
def test_bad_callables(function, message):
    with pytest.raises(SortRLError, match=message):
        load_teacher(function, "CartPole-v1")


# --- normalisation files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("clip", [5.0, np.inf])
def test_normalizer_files_round_trip(tmp_path, suffix, clip):
    original = Normalizer(np.array([1 / 3, -2.0]), np.array([1e-3, 1 / 7]), clip)
    save_normalizer(tmp_path / f"n{suffix}", original)
    read = load_normalizer(tmp_path / f"n{suffix}")
    assert torch.equal(read.mean, original.mean)
    assert torch.equal(read.scale, original.scale)
    assert read.clip == clip


def test_a_pickle_needs_the_flag(tmp_path):
    (tmp_path / "stats.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(SortRLError, match=r"can run code.*--allow-pickle"):
        load_normalizer(tmp_path / "stats.pkl")
    with pytest.raises(SortRLError, match=r"obs_rms\.mean"):
        load_normalizer(tmp_path / "stats.pkl", allow_pickle=True)
    (tmp_path / "noise.pkl").write_bytes(b"\x80\x05garbage")
    with pytest.raises(SortRLError, match="something else than tensors or arrays, or is damaged"):
        load_normalizer(tmp_path / "noise.pkl", allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a saved normaliser"),
        ('{"format": "sortrl-normalizer-1", "mean": [0]}', "lacks or garbles"),
        ('{"format": "sortrl-normalizer-1", "mean": [0], "scale": [0], "clip": 1}', "scale positive"),
    ],
)
def test_bad_normalizer_files(tmp_path, content, message):
    (tmp_path / "n.json").write_text(content)
    with pytest.raises(SortRLError, match=message):
        load_normalizer(tmp_path / "n.json")

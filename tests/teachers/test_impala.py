"""Agents published for ProcGen: read from tensors alone, faithful to the original, equivalent actions as one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.envs import describe
from sortrl.evaluate.returns import evaluate
from sortrl.teachers import Architecture, Teacher, load_teacher, sampled

JUMPER, COINRUN = "sortrl/Jumper-train-v0", "sortrl/Coinrun-train-v0"
simulated = pytest.mark.usefixtures("procgen")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


class ReferenceBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.model = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, x):
        return x + self.model(x)


@pytest.fixture
def checkpoint(tmp_path):
    """A file laid out as the published ones, with narrower layers, and its network."""
    torch.manual_seed(0)
    layers, channels = [], 3
    for out in (4, 6, 5):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
        layers += [ReferenceBlock(out), ReferenceBlock(out)]
        channels = out
    layers += [nn.Flatten(), nn.ReLU(), nn.Linear(5 * 64, 8), nn.ReLU(), nn.Linear(8, 16)]
    model = nn.Sequential(*layers)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"logits_fc.{part}": state[f"model.16.{part}"] for part in ("weight", "bias")}
    torch.save(state, tmp_path / "agent.pt")
    return tmp_path / "agent.pt", model


def frames(n=16):
    return np.random.default_rng(0).integers(0, 256, (n, 3, 64, 64), dtype=np.uint8)


def test_checkpoints_act_as_the_original(checkpoint, tmp_path):
    path, model = checkpoint
    teacher = load_teacher(path)
    with torch.no_grad():
        expected = model(torch.from_numpy(frames()) / 255)[:, :15]
    torch.testing.assert_close(teacher.scores(teacher.normalize(frames())), expected)
    assert (teacher.algorithm, teacher.is_stochastic, teacher.n_actions, teacher.name) == ("ppo", True, 15, "agent")
    teacher.save(tmp_path / "saved")
    again = Teacher.load(tmp_path / "saved")
    assert again.architecture == teacher.architecture
    assert torch.equal(again.scores(teacher.normalize(frames())), teacher.scores(teacher.normalize(frames())))


@simulated
@pytest.mark.parametrize("env_id", [JUMPER, COINRUN])
def test_equivalent_actions_share_one_probability(env_id, checkpoint, tmp_path):
    path, _ = checkpoint
    info = describe(env_id)
    raw, teacher = load_teacher(path), load_teacher(path, env_id)
    assert teacher.n_actions == info.n_actions
    all_actions = raw.scores(raw.normalize(frames())).softmax(1)
    merged = teacher.scores(teacher.normalize(frames())).softmax(1)
    for action, group in enumerate(info.action_groups):
        torch.testing.assert_close(merged[:, action], all_actions[:, list(group)].sum(1))
    greedy = load_teacher(path, env_id, merge="max")
    of_original = np.array(info.merged_action)[all_actions.argmax(1).numpy()]
    assert np.array_equal(greedy.predict(frames())[0], of_original)
    teacher.save(tmp_path / "saved")
    saved = load_teacher(tmp_path / "saved", env_id)
    assert saved.architecture == teacher.architecture
    assert np.array_equal(saved.predict(frames())[0], teacher.predict(frames())[0])
    unit = teacher.normalize(frames()).requires_grad_()
    teacher.scores(unit).sum().backward()
    assert unit.grad.abs().sum() > 0


class Hostile:
    def __reduce__(self):
        return (os.mkdir, ("hostile-was-here",))


def test_hostile_or_foreign_checkpoints_are_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, _ = checkpoint
    state = torch.load(path, weights_only=True)
    bad = {
        "hostile": ({**state, "model.0.weight": Hostile()}, "something else than tensors"),
        "mlp": ({"model.0.weight": torch.zeros(3, 4)}, "not an IMPALA network"),
        "extra": ({**state, "model.17.weight": torch.zeros(3)}, "not an IMPALA network"),
        "shape": ({**state, "model.2.model.1.weight": torch.zeros(3)}, "not an IMPALA network"),
        "nan": ({**state, "model.16.bias": torch.full((16,), torch.nan)}, "NaN"),
    }
    for name, (content, message) in bad.items():
        torch.save(content, tmp_path / f"{name}.pt")
        with pytest.raises(SortRLError, match=message):
            load_teacher(tmp_path / f"{name}.pt")
    assert not (tmp_path / "hostile-was-here").exists()
    (tmp_path / "noise.pt").write_bytes(b"noise")
    with pytest.raises(SortRLError, match="damaged"):
        load_teacher(tmp_path / "noise.pt")


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (1, 2)), ((0,), (2,))])
def test_groups_must_split_the_outputs(groups):
    with pytest.raises(SortRLError, match="do not split the outputs"):
        Architecture((4,), 2, (), "Tanh", action_groups=groups)


def test_sampling_follows_the_probabilities():
    architecture = Architecture((2,), 3, (), "ReLU")
    body = architecture.build()
    with torch.no_grad():
        body[1].weight.zero_()
        body[1].bias.copy_(torch.tensor([0.6, 0.3, 0.1]).log())
    teacher = Teacher(body, Normalizer.identity((2,)), 3, "agent", "ppo", architecture)
    first, again, other = (sampled(teacher, seed).scores(torch.zeros(20_000, 2)).argmax(1) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    shares = torch.bincount(first, minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.6, 0.3, 0.1]), atol=0.015, rtol=0.0)
    teacher.algorithm = "dqn"
    with pytest.raises(SortRLError, match="not logits"):
        sampled(teacher)


@simulated
@pytest.mark.teachers
def test_the_published_teacher_plays_jumper(published_teachers):
    path = published_teachers / "procgen" / "Jumper_ppo.pt"
    if not path.exists():
        pytest.skip(f"no {path}")
    teacher = sampled(load_teacher(path, JUMPER))
    result = evaluate(teacher, JUMPER, episodes=6)
    assert result.returns.tolist() == [10.0] * 5 + [0.0]  # level 5 is lost at its first step, whatever is played

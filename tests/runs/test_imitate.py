"""Imitation: an agent that wins by chance learns to win on purpose, from the best of its own tries."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from sortrl.cli import main
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json
from sortrl.core.normalizer import Normalizer
from sortrl.envs import greedy_returns
from sortrl.nets.cards import _teacher_lines
from sortrl.runs.imitate import ImitationConfig, imitate
from sortrl.runs.zoo import _training
from sortrl.teachers import Architecture, Teacher, load_teacher

SIZE = 8
CONFIG = ImitationConfig(states=3000, steps=300, batch_size=64, eval_every=100, eval_episodes=12)


class Turns(gym.Env):
    """From each of four starts, six turns to the left or to the right, of which no wrong one is forgiven."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.turn = int(self.np_random.integers(4)), 0
        return self.picture(), {}

    def step(self, action):
        right = action == np.random.default_rng(self.start).integers(2, size=6)[self.turn]
        self.turn += int(right)
        return self.picture(), 10.0 * (self.turn == 6), self.turn == 6 or not right, False, {}

    def picture(self):
        frame = np.zeros((1, SIZE, SIZE), np.uint8)
        frame[0, self.start, self.turn] = 255
        return frame


gym.register("Turns-v0", Turns, max_episode_steps=50)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def teacher():
    """Tosses a coin; if it is greedy, it always turns the same way."""
    architecture = Architecture((1, SIZE, SIZE), 2, (32,), "Tanh")
    torch.manual_seed(0)
    body = architecture.build()
    with torch.no_grad():
        body[-1].weight.mul_(0.01)
        body[-1].bias.copy_(torch.tensor([0.1, 0.0]))
    return Teacher(body, Normalizer.from_pixels((1, SIZE, SIZE)), 2, "coin", "ppo", architecture)


def test_an_agent_learns_to_play_the_best_of_its_tries(teacher, tmp_path):
    before = greedy_returns(teacher, "Turns-v0", list(range(20))).mean()
    reports = []
    weights = [weight.clone() for weight in teacher.parameters()]
    better = imitate(teacher, "Turns-v0", tmp_path, CONFIG, earlier={"history": []}, progress=reports.append)
    assert before < 5
    assert greedy_returns(better, "Turns-v0", list(range(20))).tolist() == [10.0] * 20
    assert all(torch.equal(one, two) for one, two in zip(weights, teacher.parameters(), strict=True)), "not its own"
    assert better.is_stochastic
    log = read_json(tmp_path / "training.json")
    assert log["done"] is True
    assert log["before"] == {"history": []}
    assert log["best"] == max(row["return"] for row in log["history"]) == 10.0
    assert [row["step"] for row in log["history"]] == [report["step"] for report in reports] == [100, 200, 300]


def test_one_seed_one_agent_and_a_finished_one_is_read_back(teacher, tmp_path, monkeypatch):
    def scores(agent):
        return agent.scores(torch.ones(1, 1, SIZE, SIZE))

    first = imitate(teacher, "Turns-v0", tmp_path / "a", CONFIG)
    assert torch.equal(scores(first), scores(imitate(teacher, "Turns-v0", tmp_path / "b", CONFIG)))
    monkeypatch.setattr("sortrl.runs.imitate._trained", lambda *_: pytest.fail("it was there already"))
    assert torch.equal(scores(first), scores(imitate(teacher, "Turns-v0", tmp_path / "a", CONFIG)))
    with pytest.raises(SortRLError, match="another teacher"):
        imitate(teacher, "Turns-v0", tmp_path / "a", CONFIG, seed=1)


def test_the_command_goes_on_from_a_saved_teacher(teacher, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sortrl.runs.imitate.ImitationConfig", lambda: CONFIG)
    teacher.save(tmp_path / "before")
    arguments = ["--imitate", str(tmp_path / "before"), "--out", str(tmp_path / "after")]
    main(["teach", "Turns-v0", *arguments])
    assert "10.0 ± 0.0" in capsys.readouterr().out
    assert Teacher.load(tmp_path / "after").name == "coin"


def test_cards_say_what_came_before():
    history = [{"step": 500, "return": 9.5}, {"step": 1000, "return": 9.0}]
    training = _training({"history": history, "before": {"history": [{"step": 70_000, "return": 7.0}]}})
    assert _teacher_lines(training) == [
        "- the teacher had 7.0 after 70,000 steps of training",
        "- it had 9.5 after 500 steps of imitating the best of its own tries",
    ]


def test_only_networks_of_actor_critics_can_imitate(tmp_path):
    black_box = load_teacher(lambda obs: np.zeros(len(obs), int), "Turns-v0")
    with pytest.raises(SortRLError, match="no actor-critic"):
        imitate(black_box, "Turns-v0", tmp_path)


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("states", 0), ("learning_rate", 0.0)])
def test_bad_configs(field, value):
    with pytest.raises(SortRLError, match=f"{field} is {value}"):
        ImitationConfig(**{field: value})

"""robustify with continuous actions, from an agent to a report; data, training, attacks and evaluation on the way."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import sortrl
from sortrl import cli, report
from sortrl.attacks.continuous import ACTION_ATTACKS, Moved, WorstDirection, action_attack
from sortrl.core.errors import SortRLError, SortRLWarning
from sortrl.core.files import read_json
from sortrl.core.normalizer import Normalizer
from sortrl.data.continuous import Answers, Visit, collect_answers
from sortrl.distill.config import DistillConfig
from sortrl.distill.continuous import distill_continuous, in_units_of, mean_error
from sortrl.distill.units import standardised
from sortrl.envs import describe
from sortrl.evaluate.continuous import evaluate_continuous
from sortrl.nets import ContinuousPolicy
from sortrl.runs.continuous import Rung, choose_rung, continuous_settings, descend, read_continuous
from sortrl.teachers import load_continuous


class Slide(gym.Env):
    """A point to be held at 0 by pushing it: one linear rule solves it, so a test need not train a teacher."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (as Gymnasium has it)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self.place.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.place[1] = 0.8 * self.place[1] + 0.3 * action[0]
        self.place[0] += 0.3 * self.place[1]
        return self.place.astype(np.float32), -float(np.abs(self.place[0])), False, False, {}


gym.register("SortrlSlide-v0", Slide, max_episode_steps=30)
TASK = "SortrlSlide-v0"
SMALL = DistillConfig(
    width=24, depth=3, rho=0.0, steps=400, batch=128, learning_rate=0.05, final_share=0.5, exact_share=0.5
)
FEW = {"states": 600, "dagger_rounds": 1, "dagger_states": 200, "choose_episodes": 4, "episodes": 4}
FEW |= {"distill": SMALL, "quick": True, "keep": 0.85}  # a minute of training would do better


def holder():
    """Pushes back; steeper than most students may be."""
    module = torch.nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[-1.5, -1.0]]))
        module.bias.zero_()
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "slide"
    return folder, sortrl.robustify(holder(), TASK, 0.1, out=folder, quiet=True, **FEW)


def test_robustify_gives_a_policy_that_keeps_the_skill(run):
    folder, policy = run
    found = read_json(folder / "results.json")
    assert isinstance(policy, ContinuousPolicy)
    assert found["gate"]["passed"]
    assert found["gate"]["kept_test"] >= 0.85
    assert found["policy"]["lipschitz"] == policy.lipschitz.tolist()
    rows = [row for row in found["evaluation"] if row["policy"] == "student"]
    assert {row["attack"] for row in rows} == {"none", *ACTION_ATTACKS}
    attacked = [row for row in rows if row["eps"] > 0]
    assert all(row["beyond"] == 0 for row in rows)
    assert all(np.array(row["moved"]) <= np.array(row["bound"]) for row in attacked)
    assert max(row["moved"][0] for row in attacked) > 0.3 * min(row["bound"][0] for row in attacked), "they try hard"


def test_the_report_says_what_was_found(run):
    folder, policy = run
    page, lines = (folder / "report.html").read_text(), report.summary_lines(read_json(folder / "results.json"))
    assert "How far an action can be moved" in page
    assert "push-up-10" in page
    assert "moved beyond its bound: 0 actions" in lines
    assert f"{policy.lipschitz[0]:.3g}"[:3] in lines[0]
    before = page
    report.render(read_json(folder / "results.json"), folder)
    assert (folder / "report.html").read_text() == before


def test_a_finished_run_is_read_and_not_made_again(run):
    folder, policy = run
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    again = sortrl.robustify(holder(), TASK, 0.1, out=folder, quiet=True, **FEW)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == files
    obs = np.random.default_rng(0).normal(size=(20, 2))
    env_id, read, teacher = read_continuous(folder)
    assert env_id == TASK
    assert teacher is None, "a module of the caller's own is kept by the caller"
    for other in (again, read, sortrl.load(folder)):
        np.testing.assert_array_equal(other.predict(obs)[0], policy.predict(obs)[0])
    with pytest.raises(SortRLError, match="other settings"):
        sortrl.robustify(holder(), TASK, 0.2, out=folder, quiet=True, **FEW)


def test_the_command_line_evaluates_it(run, tmp_path, capsys):
    folder, _ = run
    cli.main(["evaluate", str(folder), "--eps", "0.1", "--episodes", "2", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["policy"], row["attack"]) for row in rows] == [("student", "none"), ("student", "farthest-10")]
    assert "L = " in capsys.readouterr().out
    for command in (["certify", str(folder)], ["export", str(folder), "--onnx", str(tmp_path / "p.onnx")]):
        with pytest.raises(SystemExit):
            cli.main(command)
        assert "continuous actions" in capsys.readouterr().err


def test_a_student_that_lost_the_skill_is_named():
    lost = {**FEW, "steps": 1, "dagger_rounds": 0}
    with pytest.warns(SortRLWarning, match="of the teacher's skill, less than 85%"):
        sortrl.robustify(holder(), TASK, quiet=True, **lost)


def test_options_of_discrete_tasks_are_refused():
    with pytest.raises(SortRLError, match="harden has no meaning for continuous actions"):
        sortrl.robustify(holder(), TASK, harden=0.1)
    with pytest.raises(SortRLError, match="eps is 7"):
        continuous_settings(7.0)


# --- the parts --------------------------------------------------------------------------------------------------------


def test_states_are_those_of_seeded_episodes_and_answers_have_no_noise(tmp_path):
    teacher = load_continuous(holder(), TASK)
    data = collect_answers(teacher, TASK, Visit(states=200, slots=3, eps_unit=0.2), seed=1)
    np.testing.assert_array_equal(data.actions, teacher.predict(data.obs)[0])
    again = collect_answers(teacher, TASK, Visit(states=200, slots=3, eps_unit=0.2), seed=1)
    np.testing.assert_array_equal(data.obs, again.obs)
    assert not np.array_equal(data.obs, collect_answers(teacher, TASK, Visit(states=200, slots=3), seed=1).obs)
    data.save(tmp_path / "data.safetensors")
    read = Answers.load(tmp_path / "data.safetensors")
    np.testing.assert_array_equal(read.actions, data.actions)
    training, held = data.split(0.3, 0)
    assert len(training) + len(held) == len(data)
    assert not np.intersect1d(training.episodes, held.episodes).size
    assert len(np.unique(data.joined(data).episodes)) == 2 * len(np.unique(data.episodes))


def test_the_student_is_as_steep_as_it_may_be_and_no_more():
    teacher = load_continuous(holder(), TASK)
    data = collect_answers(teacher, TASK, Visit(states=600))
    box, errors = describe(TASK, continuous=True).action_box, []
    for steepness in (0.2, 3.0):
        policy, history = distill_continuous(data, standardised(data.obs), box, steepness, SMALL)
        assert policy.lipschitz[0] == pytest.approx(steepness * data.spread[0], rel=1e-6)
        errors.append(mean_error(policy, data))
        assert history[-1]["step"] == SMALL.steps
    assert errors[1] < 0.2 < errors[0], "what may not be steep cannot follow"


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    teacher = load_continuous(holder(), TASK)
    data, box = collect_answers(teacher, TASK, Visit(states=300)), describe(TASK, continuous=True).action_box
    config = DistillConfig(width=16, depth=3, rho=0.3, steps=40, batch=32, final_share=0.5, exact_share=0.5)
    whole, _ = distill_continuous(data, teacher.normalizer, box, 2.0, config, eps=0.1)

    def stop(row):
        if row["step"] == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill_continuous(data, teacher.normalizer, box, 2.0, config, eps=0.1, out_dir=tmp_path, progress=stop)
    resumed, _ = distill_continuous(data, teacher.normalizer, box, 2.0, config, eps=0.1, out_dir=tmp_path)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_the_same_agent_in_other_units():
    teacher = load_continuous(holder(), TASK)
    other = in_units_of(teacher, Normalizer(np.array([1.0, -2.0]), np.array([0.5, 3.0])))
    obs = np.random.default_rng(0).normal(size=(20, 2))
    np.testing.assert_allclose(other.predict(obs)[0], teacher.predict(obs)[0], atol=1e-6)


def test_attacks_move_a_linear_agent_as_far_as_can_be():
    """|w| eps, which is known: the worst direction finds it, within the action's range and the valid one of the observation."""
    teacher, unit = load_continuous(holder(), TASK), 0.1 * torch.randn(20, 2)
    moved = WorstDirection()(teacher, unit, 0.05)
    torch.testing.assert_close(moved.distance, torch.full((20, 1), 0.125, dtype=torch.float64), atol=1e-5, rtol=0)
    held = WorstDirection()(teacher, unit, 0.05, low=unit.amin(0) - 1, high=torch.minimum(unit[0], unit.amin(0)))
    assert bool((held.perturbed <= unit).all())
    for attack in ACTION_ATTACKS.values():
        found = attack(teacher, unit, torch.linspace(0, 0.2, 20, dtype=torch.float64))
        assert float(found.distance[0]) == 0.0, "an eps of 0"
        assert bool(((found.perturbed - unit).abs().amax(1) <= torch.linspace(0, 0.2, 20) + 1e-7).all())
    with pytest.raises(SortRLError, match=r"No attack 'pgd-10' .*worst-direction-10"):
        action_attack("pgd-10")


def test_an_evaluation_counts_moves_beyond_the_bound(run, monkeypatch):
    _, policy = run
    honest = evaluate_continuous(policy, TASK, WorstDirection(), 0.2, 3)
    assert honest.beyond == 0
    assert (honest.moved <= honest.bound).all()
    monkeypatch.setattr(ContinuousPolicy, "_steepness", lambda self, constant: 0.5 * np.array(self.config.slope))
    assert evaluate_continuous(policy, TASK, WorstDirection(), 0.2, 3).beyond > 0


def test_moves_are_measured_on_what_is_played():
    moved = Moved(torch.zeros(1, 2), torch.tensor([[1.0]]), torch.tensor([[-0.5]]))
    assert moved.distance.tolist() == [[1.5]]


def rung(number, kept, surely=None):
    return Rung(number, 2.0 ** (5 - number), [1.0], 0.0, kept, kept if surely is None else surely, 0.0)


@pytest.mark.parametrize(
    ("kept", "tried", "chosen"),
    [
        ([0, 0, 1.0, 1.0, 0.9, 1.0], [2, 3, 4], 3),
        ([0, 1.0, 0.5, 1.0, 1.0, 1.0], [2, 1], 1),
        ([1.0, 0.9, 0.5, 0, 0, 0], [2, 1, 0], 0),
        ([0.6, 0.9, 0.5, 0, 0, 0], [2, 1, 0], 1),
        ([1.0] * 6, [2, 3, 4, 5], 5),
    ],
)
def test_the_ladder_goes_down_while_the_skill_is_kept(kept, tried, chosen):
    found = descend(lambda number: rung(number, kept[number]), 6, 2, 0.95)
    assert [one.rung for one in found] == tried
    assert choose_rung(found, 0.95).rung == chosen


def test_a_rung_that_keeps_the_skill_for_sure_goes_first():
    assert choose_rung([rung(2, 1.0, 0.99), rung(3, 0.96, 0.7)], 0.95).rung == 2


def test_the_command_line_and_the_experiment(tmp_path, monkeypatch):
    from sortrl.experiments import continuous

    small = continuous.Agent("PPO", TASK, 64, {"n_steps": 32, "batch_size": 32, "policy_kwargs": {"net_arch": [8]}})
    monkeypatch.setattr(continuous, "AGENTS", (small,))
    found = continuous.continuous_table("smoke", None, tmp_path, tmp_path / "work", progress=lambda line: None)
    assert [row["agent"] for row in found["rows"]] == ["ppo-sortrlslide"]
    assert json.loads((tmp_path / "continuous.json").read_text()) == found
    lines = continuous.continuous_table_lines(found)
    assert len(lines) == 4
    assert "| ppo-sortrlslide | student |" in lines[3]
    again = continuous.continuous_table("smoke", None, tmp_path, tmp_path / "work", progress=lambda line: None)
    assert again["rows"][0]["results"]["evaluation"] == found["rows"][0]["results"]["evaluation"]
    with pytest.raises(SortRLError, match="no agent  of CartPole-v1"):
        continuous.continuous_table("smoke", "CartPole-v1", tmp_path)

"""A suite of attacks: complete, paired, resumable, and honest about what was not run; and the checks that catch masking."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from helpers import Balancer, balancer
from sortrl import attacks, cli
from sortrl.attacks import sanity as checks
from sortrl.core.errors import SortRLError
from sortrl.core.records import PROTOCOL
from sortrl.data.collect import CollectConfig, collect
from sortrl.distill.loop import DistillConfig, distill
from sortrl.evaluate import suite
from sortrl.teachers import Teacher, load_teacher

ENV = "CartPole-v1"


class Rounded(nn.Module):
    """The same decisions as a network's (nearly), with scores in steps: no gradient anywhere."""

    def __init__(self, body: nn.Module, step: float) -> None:
        super().__init__()
        self.body, self.step = body, step

    def forward(self, unit):
        return torch.round(self.body(unit) / self.step) * self.step


@pytest.fixture(scope="module")
def student():
    data = collect(balancer(), ENV, CollectConfig(states=4000), seed=0)
    config = DistillConfig(eps=0.05, steps=300, batch=256, width=48, depth=3, lambda_end=0.1)
    return distill(data, balancer().normalizer, config).policy


@pytest.fixture(scope="module")
def quick(student, tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "quick.json"
    return suite.evaluate_suite(student, balancer(), ENV, "quick", (0.5,), 1, path=path), path


def test_every_attack_meets_every_agent_at_every_eps_on_the_same_episodes(quick):
    result, _ = quick
    wanted = set(attacks.suite("quick", balancer()))
    for agent, met in (("student", wanted), ("teacher", wanted - {"PGD-10-p32"})):
        assert result.clean(agent)["attack"] == "none"
        assert {row["attack"] for row in result.at(agent, 0.5)} == met
    assert {(row["first_seed"], row["episodes"]) for row in result.rows} == {(0, 1)}
    (said,) = result.skipped
    assert (said["policy"], said["attacks"]) == ("teacher", "PGD-10-p32"), "an ordinary network has no surrogate"


def test_the_worst_is_the_lowest_mean_and_names_its_attack(quick):
    result, _ = quick
    for agent in result.policies:
        worst = result.worst(agent, 0.5)
        assert worst["mean"] == min([row["mean"] for row in result.at(agent, 0.5)] + [result.clean(agent)["mean"]])
    assert result.worst("teacher", 0.5)["mean"] < result.clean("teacher")["mean"]
    assert result.worst("teacher", 0.5)["attack"] != "none"


def test_rows_say_how_they_were_made(quick):
    result, path = quick
    document = json.loads(path.read_text())
    assert document["protocol"] == PROTOCOL
    assert {"torch", "numpy", "sortrl"} <= set(document["versions"])
    assert document["worst"] == result.to_json()["worst"]
    rows = {(row["policy"], row["attack"], row["eps"]): row for row in document["rows"]}
    assert len(rows) == len(result.rows)
    pgd = rows["student", "PGD-10-p32", 0.5]
    assert pgd["attack_parameters"]["surrogate_p"] == 32.0
    assert pgd["spread"]["sem"]
    assert pgd["iqm_interval"][0] <= pgd["iqm"] <= pgd["iqm_interval"][1]
    assert 0 <= pgd["changed_share"] <= pgd["attacked_share"] <= 1
    transfer = rows["student", "transfer-PGD-10", 0.5]["attack_parameters"]
    assert transfer == {"source": "balancer", "inner": {"kind": "PGD", **attacks_json(attacks.PGD(10))}}


def attacks_json(attack):
    return {name: getattr(attack, name) for name in attack.__dataclass_fields__}


def test_a_stopped_suite_goes_on_point_by_point(student, tmp_path):
    path, names, eps = tmp_path / "rows.json", ["fgsm", "noise"], (0.05, 0.5)
    whole = suite.evaluate_suite(student, balancer(), ENV, names, eps, 2, path=path)
    assert [(row["policy"], row["attack"], row["eps"]) for row in whole.rows] == [
        ("student", "none", 0.0),
        ("teacher", "none", 0.0),
        *((agent, attack, size) for size in eps for attack in ("FGSM", "noise") for agent in ("student", "teacher")),
    ]
    half = json.loads(path.read_text())
    half["rows"] = half["rows"][:4]
    half["rows"][0]["mean"] = marked = -12.5  # a row that is taken over is not played again
    path.write_text(json.dumps(half))
    again = suite.evaluate_suite(student, balancer(), ENV, names, eps, 2, path=path)
    assert again.clean("student")["mean"] == marked
    assert [row["mean"] for row in again.rows[1:]] == [row["mean"] for row in whole.rows[1:]]
    with pytest.raises(SortRLError, match="other agents, episodes or seeds"):
        suite.evaluate_suite(student, balancer(), ENV, names, eps, 3, path=path)
    other = Teacher(Balancer(), balancer().normalizer, 2, "balancer")
    with pytest.raises(SortRLError, match="other agents"):
        suite.evaluate_suite(student, other, ENV, names, eps, 2, path=path)


def test_rows_of_another_suite_are_kept(student, tmp_path):
    path = tmp_path / "rows.json"
    for names in (["fgsm"], ["noise"]):
        result = suite.evaluate_suite(student, None, ENV, names, (0.1,), 1, path=path)
    assert [row["attack"] for row in result.rows] == ["none", "noise"]
    assert {row["attack"] for row in json.loads(path.read_text())["rows"]} == {"none", "noise", "FGSM"}


def test_a_black_box_meets_only_attacks_without_gradient(student):
    source = balancer()
    black_box = load_teacher(lambda obs: source.predict(obs)[0], env_id=ENV, normalizer=source.normalizer)
    result = suite.evaluate_suite(student, black_box, ENV, "quick", (0.5,), 1)
    met = {row["attack"] for row in result.at("teacher", 0.5)}
    assert met == {"noise", "Square-50"}
    assert {row["attack"] for row in result.at("student", 0.5)} > met
    (said,) = result.skipped
    assert said["policy"] == "teacher"
    assert "PGD-10" in said["attacks"]
    assert said["why"] in suite.table(result)


def test_the_full_suite_has_everything(student):
    teacher = balancer()
    found = suite.entries("full", teacher, ENV, student)
    for part in ("quick", "paper", "auto"):
        assert set(attacks.suite(part, teacher)) <= set(found)
    assert {"gaussian", "dropout", "salt-and-pepper", "MinBest-10", "RI-FGSM-Multi-T", "auto"} <= set(found)
    assert {"strategic", "critical points", "learned adversary"} <= set(found)
    assert found["learned adversary"].attack is None
    assert found["strategic"].when.steps == found["critical points"].when.steps == 125
    without = suite.entries("full", None, ENV, student)
    assert "MinQ-10" not in without
    assert "strategic" in without


def test_timed_and_trained_entries_are_played(student, tmp_path, monkeypatch):
    wanted = {
        label: suite.entries("full", balancer(), ENV, student)[label] for label in ("strategic", "learned adversary")
    }
    monkeypatch.setattr(suite, "entries", lambda *_: wanted)
    path = tmp_path / "some.json"
    result = suite.evaluate_suite(student, None, ENV, "full", (0.3,), 1, path=path, adversary_steps=1)
    assert [row["attack"] for row in result.rows] == ["none", *wanted]
    assert result.rows[1]["timing"] == "strategic-0.5-125"
    assert (tmp_path / "some" / "adversary-student-0.3" / "adversary.safetensors").exists()


def test_the_table_shows_agents_costs_and_the_worst(quick):
    result, _ = quick
    text = suite.table(result)
    lines = text.splitlines()
    assert lines[0].split()[:4] == ["eps", "attack", "student", "changed"]
    row = result.at("student", 0.5)[1]
    line = next(line for line in lines if line.split()[:2] == ["0.5", row["attack"]])
    assert f"{row['mean']:.1f} ± {row['sem']:.1f}" in line
    assert f"{row['gradients'] / row['steps']:.1f}" in line
    worst = result.worst("teacher", 0.5)
    assert f"teacher {worst['mean']:.1f} ± {worst['sem']:.1f} ({worst['attack']})" in text


def test_checks_pass_on_honest_policies(student):
    for policy in (student, balancer()):
        found = checks.check_run(policy, ENV, 0.3, states=300)
        assert all(check.passed for check in found), [check for check in found if not check.passed]
    names = [check.name for check in checks.check_run(student, ENV, 0.3, states=100)]
    assert "no certified action changes" in names


def test_masked_gradients_are_flagged():
    honest = balancer()
    masked = Teacher(Rounded(honest.body, 0.25), honest.normalizer, 2, "masked")
    unit = checks.visited_states(honest, ENV, 300)
    # It looks robust to PGD, which sees no gradient ...
    assert attacks.PGD(10)(masked, unit, 0.5).changed.mean() < 0.2 < attacks.PGD(10)(honest, unit, 0.5).changed.mean()
    failed = {check.name for check in checks.check_attacks(masked, unit, 0.5) if not check.passed}
    # ... and is found out.
    assert {
        "gradients do not vanish",
        "gradients beat random search",
        "an unbounded attack changes nearly all",
    } <= failed


def test_visited_states_are_those_of_greedy_play():
    policy = balancer()
    unit = checks.visited_states(policy, ENV, states=40, slots=4)
    assert unit.shape == (40, 4)
    assert torch.equal(unit, checks.visited_states(policy, ENV, states=40, slots=4))
    assert len(np.unique(unit.numpy(), axis=0)) == 40


BAD_INPUT = {
    "no eps": (lambda s: suite.evaluate_suite(s, None, ENV, "quick", ()), r"eps \[\]"),
    "eps 0": (lambda s: suite.evaluate_suite(s, None, ENV, "quick", (0.0,)), r"eps \[0\.0\]"),
    "no attacks": (lambda s: suite.evaluate_suite(s, None, ENV, []), "no attacks named"),
    "unknown suite": (lambda s: suite.evaluate_suite(s, None, ENV, "huge"), "Unknown suite 'huge'"),
    "unknown attack": (lambda s: suite.evaluate_suite(s, None, ENV, ["pdg-10"]), "Unknown attack 'pdg-10'"),
    "checks eps": (lambda s: checks.check_attacks(s, torch.zeros(1, 4), 0.0), r"eps=0\.0"),
    "checks of a black box": (
        lambda s: checks.check_attacks(
            load_teacher(lambda o: np.zeros(len(o), int), env_id=ENV), torch.zeros(1, 4), 0.1
        ),
        "no gradients",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case, student):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call(student)


@pytest.fixture
def run(student, tmp_path):
    """All that the command needs of a run; its hand-written teacher cannot be saved."""
    student.save(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"identity": {"env": ENV}}))
    return str(tmp_path / "run")


def test_the_command_prints_what_it_writes_and_checks(run, tmp_path, capsys):
    out = tmp_path / "attack.json"
    cli.main(["attack", run, "--eps", "0.3", "--episodes", "1", "--check", "--threads", "1", "--json", str(out)])
    printed, document = capsys.readouterr().out, json.loads(out.read_text())
    (worst,) = document["worst"]
    assert f"worst at eps 0.3: student {worst['mean']:.1f}" in printed
    assert (
        printed.count("  ok    ") == len(checks.check_run(balancer(), ENV, 0.3, states=20)) + 1
    )  # and the certificates


def test_a_failed_check_is_an_exit_code(run, monkeypatch, capsys):
    monkeypatch.setattr(checks, "check_run", lambda *_, **__: [checks.Check("sense", False, "none")])
    monkeypatch.setattr(suite, "entries", lambda *_: {"noise": suite.Entry(attacks.UniformNoise())})
    with pytest.raises(SystemExit) as stop:
        cli.main(["attack", run, "--eps", "0.3", "--episodes", "1", "--check", "--threads", "1"])
    assert stop.value.code == 1
    assert "FAIL  sense: none" in capsys.readouterr().out

"""The leaderboard: frozen protocols, entries from one end to the other, what is refused, and what is shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import balancer, restless
from sortrl import cli
from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.pieces import Here
from sortrl.core.workers import Processes
from sortrl.envs import describe
from sortrl.experiments import leaderboard
from sortrl.experiments.leaderboard import PROTOCOLS, Entrant, Player, Protocol, Task, Trial, enter, read_board
from sortrl.experiments.leaderboard.entries import path_of, read_entry
from sortrl.experiments.leaderboard.units import InUnits, in_units
from sortrl.nets import SortPolicy

# Whoever changes one of these changes what entries that are published already were measured by: give it the next number instead.
FROZEN = {
    "classic-1": "41c2d134ea2e061d",
    "minatar-1": "97e16844ba7360bd",
    "atari84-1": "f79bb8b229a3447f",
    "procgen-1": "903e241230f5a044",
}
TINY = Protocol(
    "tiny-1",
    (Task("CartPole-v1", 0.1, (0.02, 0.1), (0.7, 0.61, 0.052, 0.35)),),
    (
        Trial("none", 4),
        Trial("pgd-2", 3),
        Trial("square-5", 2, only_answers=True),
        Trial("value-aware", 2),
        Trial("learned", 2),
    ),
    seed=1700,
    certify_states=200,
    adversary_steps=1,
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(PROTOCOLS, "tiny-1", TINY)
    return TINY


def entrant(policy, name="someone", kind="SortRL", teacher=None):
    return Entrant(name, "CartPole-v1", kind, f"{name} of the tests", lambda: Player(policy, teacher), 1.5)


def test_protocols_with_entries_are_what_they_were():
    assert {name: protocol.mark for name, protocol in PROTOCOLS.items()} == FROZEN
    assert replace(PROTOCOLS["classic-1"], seed=1).mark != FROZEN["classic-1"]


def test_an_entry_is_made_trial_by_trial_continued_and_shown(student, tiny, tmp_path, capsys):
    lines = []
    entry = enter(entrant(student, teacher=balancer()), tiny, tmp_path / "board", tmp_path / "work", lines.append)
    assert len(lines) == 4
    assert [row["attack"] for row in entry["attacks"]] == ["pgd-2", "value-aware", "learned"]
    assert (entry["clean"]["episodes"], [row["eps"] for row in entry["attacks"]]) == (4, [0.1] * 3)
    rows = [entry["clean"], *entry["attacks"]]
    assert entry["worst"]["mean"] == min(row["mean"] for row in rows)
    assert all(row["iqm_interval"][0] <= row["iqm"] <= row["iqm_interval"][1] for row in rows)
    assert 0 < entry["certified"]["0.02"] <= 1
    assert entry["certified"]["0.02"] > entry["certified"]["0.1"]
    assert entry["seconds_per_decision"] > 0
    assert (entry["training_minutes"], entry["missing"], entry["spared"]) == (1.5, [], [])
    path = path_of(tmp_path / "board", "tiny-1", "CartPole-v1", "someone")
    assert read_entry(path) == entry

    (tmp_path / "work").rename(tmp_path / "elsewhere")
    stopped = tmp_path / "elsewhere" / f"tiny-1-{tiny.mark}" / "CartPole-v1-someone"
    (stopped / "cells" / "CartPole-v1-someone-pgd-2.json").unlink()
    (stopped / "someone.json").unlink()
    lines.clear()
    again = enter(entrant(student, teacher=balancer()), tiny, tmp_path / "board", tmp_path / "elsewhere", lines.append)
    assert [line.split(":")[1] for line in lines] == [" CartPole-v1-someone-pgd-2"]
    assert again["attacks"] == entry["attacks"]

    cli.main(["leaderboard", "--folder", str(tmp_path / "board"), "--json", str(tmp_path / "shown.json")])
    out = capsys.readouterr().out
    assert "someone" in out
    assert json.loads((tmp_path / "shown.json").read_text()) == [again]


def test_workers_make_the_entry_that_one_process_makes(tiny, tmp_path):
    few = replace(tiny, trials=tiny.trials[:2])
    alone, shared = (
        enter(entrant(restless(), kind="teacher"), few, tmp_path / name, tmp_path / name / "work", print, engine)
        for name, engine in (("alone", Here(threads=1)), ("shared", Processes(2)))
    )
    timed = {"seconds_per_decision": 0.0, "machine": {}}
    assert {**alone, **timed} == {**shared, **timed}
    assert len(shared["attacks"]) == 1


def test_another_agent_of_the_same_name_is_refused(student, tiny, tmp_path):
    board, work = tmp_path / "board", tmp_path / "work"
    only_clean = replace(tiny, trials=tiny.trials[:1])
    enter(entrant(student), only_clean, board, work, print)
    with pytest.raises(SortRLError, match=r"entry of another agent.*Choose another --name"):
        enter(entrant(restless()), only_clean, board, work, print)
    with pytest.raises(SortRLError, match=r"sees observations .* Is this the agent of another task"):
        enter(entrant(SortPolicy((3,), 2, width=8, depth=2)), only_clean, board, work, print)


def test_entries_of_another_version_are_not_ranked_and_damaged_ones_are_named(student, tiny, tmp_path, monkeypatch):
    only_clean = replace(tiny, trials=tiny.trials[:1])
    monkeypatch.setitem(PROTOCOLS, "tiny-1", only_clean)
    enter(entrant(student), only_clean, tmp_path, tmp_path / "work", print)
    assert len(read_board(tmp_path).entries) == 1
    monkeypatch.setitem(PROTOCOLS, "tiny-1", replace(only_clean, seed=1))
    board = read_board(tmp_path)
    assert board.entries == ()
    assert f"another version ({only_clean.mark} there, {PROTOCOLS['tiny-1'].mark} now)" in board.refused[0][1]
    assert "not ranked: someone on CartPole-v1" in leaderboard.text(board)
    assert "Not ranked: someone on CartPole-v1" in leaderboard.page(board)
    monkeypatch.delitem(PROTOCOLS, "tiny-1")
    assert "none of classic-1" in read_board(tmp_path).refused[0][1]

    (path,) = tmp_path.glob("*.json")
    whole = json.loads(path.read_text())
    for field, value in (("worst", None), ("certified", {"0.1": 2.0}), ("kind", "wizard"), ("attacks", [{}])):
        path.write_text(json.dumps({**whole, field: value}))
        with pytest.raises(SortRLError, match=f"lacks or garbles .*{field}"):
            read_board(tmp_path)
    path.write_text(json.dumps({**whole, "format": "something"}))
    with pytest.raises(SortRLError, match="no entry of a leaderboard"):
        read_board(tmp_path)


LOADERS = """
import numpy as np
import torch

class Module(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
        with torch.no_grad():
            self.bias.zero_()
            self.weight.copy_(torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.5, 3.0, 1.5]]))

class Predicts:
    def predict(self, obs):
        return (obs @ np.array([0.1, 0.5, 3.0, 1.5]) > 0).astype(int), None

def module(task):
    return Module() if task == "CartPole-v1" else None

def answers():
    return Predicts()

def nothing(task):
    return None

def broken(task):
    raise RuntimeError("no weights here")

def greedy(task, weights):
    return None

number = 3
"""


def test_anybodys_policy_is_entered_by_module_and_function(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PROTOCOLS, "tiny-1", replace(tiny, trials=tiny.trials[:4]))  # a learned adversary takes longest
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outsiders.py").write_text(LOADERS)
    folders = ["--out", str(tmp_path / "board"), "--work", str(tmp_path / "work"), "--protocol", "tiny-1"]
    cli.main(["evaluate", "--policy", "outsiders:module", *folders, "--name", "open", "--kind", "baseline"])
    cli.main(["evaluate", "--policy", "outsiders:answers", *folders, "--name", "closed"])
    assert "outsiders" not in capsys.readouterr().err
    open_one, closed = (
        read_entry(path_of(tmp_path / "board", "tiny-1", "CartPole-v1", name)) for name in ("open", "closed")
    )
    assert (open_one["kind"], open_one["source"], open_one["certified"]) == ("baseline", "outsiders:module", None)
    assert [row["attack"] for row in open_one["attacks"]] == ["pgd-2", "value-aware"]
    assert len(open_one["weights"]) == 64
    assert closed["clean"]["mean"] == open_one["clean"]["mean"] > 100
    assert [row["attack"] for row in closed["attacks"]] == ["square-5"]
    assert [one["attack"] for one in closed["spared"]] == ["pgd-2", "value-aware"]
    assert "no gradients" in closed["spared"][0]["why"]
    assert (closed["weights"], closed["kind"]) == (None, "outside")
    assert "(1 of 3)" in leaderboard.text(read_board(tmp_path / "board"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "outsiders"], "expected package.module:load"),
        (["--policy", "outsiders:number"], "outsiders:number is int, expected a function"),
        (["--policy", "outsiders:nothing"], "returned None for CartPole-v1"),
        (["--policy", "outsiders:broken"], "failed for CartPole-v1: RuntimeError: no weights here"),
        (["--policy", "outsiders:greedy"], "needs 2 arguments (task, weights)"),
        (["--policy", "outsiders:module", "--task", "Pong-v5"], "tiny-1 has no task 'Pong-v5'"),
        (["--policy", "outsiders:module", "--task", "Acrobot-v1"], "Acrobot-v1 belongs to classic-1"),
        (["--policy", "outsiders:module", "--seed", "3", "--eps", "0.3"], "--eps, --seed cannot be chosen"),
        (["zoo:cartpole", "--policy", "outsiders:module"], "either a run (or zoo:NAME) or --policy"),
        (["zoo:breakout"], "belongs to minatar-1"),
        (["zoo:cartpole", "--task", "Acrobot-v1"], "is a run of CartPole-v1"),
    ],
)
def test_mistakes_are_explained(tiny, tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outsiders.py").write_text(LOADERS)
    with pytest.raises(SystemExit) as stop:
        cli.main(
            ["evaluate", *options, "--protocol", "tiny-1", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
        )
    assert stop.value.code == 1
    assert message in capsys.readouterr().err


def test_a_loader_without_argument_must_be_told_its_task(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outsiders.py").write_text(LOADERS)
    with pytest.raises(SortRLError, match=r"takes no argument.*--task CartPole-v1"):
        leaderboard.of_loader("outsiders:answers", PROTOCOLS["classic-1"], None, None, "outside")
    with pytest.raises(SortRLError, match="no protocol 'classic-9'; choose one of classic-1"):
        leaderboard.protocol_of("classic-9")


def test_a_run_enters_its_policy_and_its_teacher_once(tmp_path):
    entrants = leaderboard.of_run("zoo:cartpole", None, None)
    assert [(one.name, one.kind) for one in entrants] == [
        ("zoo:cartpole", "SortRL"),
        ("teacher of zoo:cartpole", "teacher"),
    ]
    student, teacher = (one.load() for one in entrants)
    assert isinstance(student.policy, SortPolicy)
    assert student.teacher.name == teacher.policy.name
    assert leaderboard.same_agent(entrants[1], tmp_path / "absent") is None
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    (memory, _) = leaderboard.of_run("zoo:pong-memory", None, "remembers")
    assert (memory.kind, memory.name) == ("memory", "remembers")
    assert leaderboard.of_run("zoo:pong-rounded", None, None)[0].kind == "threshold"


def test_the_same_eps_is_the_same_change_of_raw_observations_whatever_the_agents_units(student):
    """And what is certified in the protocol's units is not changed by an attack there."""
    units = Normalizer(np.zeros(4), np.array([0.7, 0.61, 0.052, 0.35]))
    raw = torch.randn(400, 4, dtype=torch.float64) * torch.tensor([0.5, 0.5, 0.05, 0.5])
    for policy in (student, balancer(), restless()):
        same = in_units(policy, units)
        unit = same.normalize(raw)
        assert (same.scores(unit).argmax(1) == policy.scores(policy.normalize(raw)).argmax(1)).double().mean() > 0.99
        result = PGD(10)(same, unit, 0.3)
        moved = (units.to_raw(result.perturbed) - units.to_raw(unit)).abs() / units.scale
        assert 0.29 < float(moved.max()) <= 0.3 + 1e-6
        assert result.changed.any()
    seen = InUnits(student, units)
    unit = seen.normalize(raw)
    radius = seen.certify_unit(unit).radius
    proven = radius > 0.02
    assert 0.02 < proven.mean() < 1
    assert not PGD(10)(seen, unit[proven], torch.from_numpy(radius[proven])).changed.any()
    assert PGD(10)(seen, unit, torch.from_numpy(30 * radius)).changed.any(), "or the attack shows nothing"
    assert not hasattr(InUnits(restless(), units), "certify_unit")
    assert not hasattr(InUnits(restless(), units), "surrogate_scores")


def test_eps_of_images_is_a_share_of_black_to_white():
    task = PROTOCOLS["minatar-1"].task("sortrl/Breakout10-v0")
    info = describe(task.env_id)
    assert float(task.units(info).scale.min()) == 255.0


def made(agent, returns, worst, certified, task="CartPole-v1", minutes=None):
    def row(attack, values):
        values = np.asarray(values, float)
        middle = float(np.median(values))
        found = {"attack": attack, "eps": 0.2, "episodes": len(values), "mean": float(values.mean()), "sem": 1.0}
        return found | {
            "iqm": middle,
            "iqm_interval": [middle - 1, middle + 1],
            "changed_share": 0.1,
            "returns": [*values],
        }

    protocol = PROTOCOLS["classic-1"]
    return {
        "format": "sortrl-leaderboard-1",
        "protocol": {"name": protocol.name, "mark": protocol.mark},
        "agent": agent,
        "kind": "SortRL" if certified else "teacher",
        "task": task,
        "source": "made up",
        "weights": "a" * 64,
        "parameters": 3,
        "clean": row("none", returns),
        "attacks": [row("auto", worst)],
        "worst": row("auto", worst),
        "spared": [],
        "missing": ["learned"],
        "certified": None if certified is None else {"0.2": certified},
        "seconds_per_decision": 0.00123,
        "training_minutes": minutes,
        "versions": {},
        "machine": {},
    }


def test_the_board_is_sorted_filtered_and_written_out(tmp_path, capsys):
    entries = [
        made("<weak>", [500, 500], [10, 20], None),
        made("strong", [490, 500], [400, 420], 0.87654, minutes=12.345),
        made("other", [-80], [-90], None, "Acrobot-v1"),
    ]
    for number, entry in enumerate(entries):
        (tmp_path / f"{number}.json").write_text(json.dumps(entry))
    finished = {**made("<weak>", [500, 500], [10, 20], None), "missing": []}
    (tmp_path / "0.json").write_text(json.dumps(finished))
    assert [entry["agent"] for entry in read_board(tmp_path).entries] == ["<weak>", "strong", "other"]
    (tmp_path / "0.json").write_text(json.dumps(entries[0]))
    board = read_board(tmp_path)
    assert [entry["agent"] for entry in board.entries] == ["strong", "<weak>", "other"]
    assert [entry["agent"] for entry in board.chosen(certified=True).entries] == ["strong"]
    assert [entry["agent"] for entry in board.chosen("Acrobot-v1", "classic-1").entries] == ["other"]
    assert board.chosen(protocol="minatar-1").entries == ()
    with pytest.raises(SortRLError, match="no task 'Pong'; there is CartPole-v1, Acrobot-v1"):
        board.chosen("Pong")
    with pytest.raises(SortRLError, match="no leaderboard in"):
        read_board(tmp_path / "absent")

    cli.main(["leaderboard", "--folder", str(tmp_path), "--task", "CartPole-v1"])
    out = capsys.readouterr().out
    assert re.search(
        r"strong\s+SortRL\s+495\.0 \[494\.0, 496\.0\]\s+410\.0 \[409\.0, 411\.0\]\s+auto \(1 of 2\)\s+87\.6 %\s+1\.23\s+12\.3",
        out,
    )
    assert out.index("strong") < out.index("<weak>")
    assert "other" not in out

    html = leaderboard.page(board)
    assert "<weak>" not in html
    assert "&lt;weak&gt;" in html
    assert html.count("<tr data-task=") == 3
    rows = re.findall(r'<tr data-task="([^"]+)" data-certified="(\w+)">(.*)</tr>', html)
    assert [(task, certified) for task, certified, _ in rows] == [
        ("CartPole-v1", "yes"),
        ("CartPole-v1", "no"),
        ("Acrobot-v1", "no"),
    ]
    assert {row.count("<td ") for *_, row in rows} == {html.count('<th scope="col">')}
    assert "\n\n" not in html, "an empty line would end the HTML block of the page"

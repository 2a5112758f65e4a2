"""The table of baselines at its smallest scale."""

from __future__ import annotations

import json
import sys

import pytest

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.experiments import baseline_lines, baselines
from sortrl.experiments.baselines import SEEDS, SORTRL, SORTRL_BCL, SORTRL_RADIAL, TASKS, TITLES, cells, table_lines
from sortrl.experiments.cells import figure


@pytest.fixture
def one_seed(monkeypatch):
    monkeypatch.setattr(sys.modules[cells.__module__], "SEEDS", (0,))


@pytest.mark.usefixtures("one_seed")
def test_the_table_is_made_cell_by_cell_and_continued(tmp_path, published_teachers, capsys):
    options = ["--scale", "smoke", "--task", "Acrobot-v1", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    command = ["reproduce", "baselines", *options, "--agent", "radial-dqn", "--teachers", str(published_teachers)]
    cli.main(command)
    results = json.loads((tmp_path / "baselines.json").read_text())
    found = {entry["cell"]["attack"]: entry for entry in results["cells"]}
    assert list(found) == ["none", "PGD-10", "suite quick"]
    assert found["suite quick"]["mean"] <= found["none"]["mean"]
    assert found["none"]["decisions"] == 400
    assert found["none"]["start"] == "distilled from its play"
    assert set(found["none"]["acr"]) == {"RADIAL", "SA-DQN", "SortRL"}
    assert "RADIAL-DQN" in capsys.readouterr().out
    cli.main(command)  # nothing is computed again
    assert json.loads((tmp_path / "baselines.json").read_text())["cells"] == results["cells"]
    lines = baseline_lines(results)
    assert len(lines) == 3
    assert lines[2].startswith("| Acrobot-v1 | 0.1 | RADIAL-DQN | 1 |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_every_agent_of_every_task_has_its_cells():
    names = [cell.name for cell in cells()]
    others = len(TITLES) - 1  # the teacher is one for all seeds
    assert len(set(names)) == len(names) == len(TASKS) * (2 * len(SEEDS) * others + 2 + others + 1)


@pytest.mark.usefixtures("one_seed")
def test_students_stand_in_the_same_table(tmp_path, monkeypatch):
    students = (SORTRL, SORTRL_BCL, SORTRL_RADIAL)
    wanted = [cell for cell in cells() if cell.agent in students and cell.attack == "none"]  # attacks take long
    monkeypatch.setattr(sys.modules[cells.__module__], "cells", lambda: wanted)
    results = baselines("smoke", "CartPole-v1", tmp_path, tmp_path / "work")
    made = [set(found["agents"].values()) for found in results["cells"]]
    assert len(made) == len(set.union(*made)) == 3, "two rows show one student"
    assert all(0 <= found["acr"]["RADIAL"] <= 1 for found in results["cells"])
    lines = table_lines(results)
    assert len(lines) == 2 + 3
    assert "SortRL-RADIAL" in lines[-1]
    last = results["cells"][-1]
    second = {**last, "mean": last["mean"] - 2.0, "cell": {**last["cell"], "seed": 1}}
    both = table_lines({**results, "cells": [*results["cells"], second]})[-1]
    assert f"| 2 | {figure(last['mean'] - 1.0)} [{figure(last['mean'] - 2.0)}] |" in both


def test_an_unknown_task_is_refused(tmp_path):
    with pytest.raises(SortRLError, match="no game 'Pong'"):
        baselines("smoke", "Pong", tmp_path, tmp_path)

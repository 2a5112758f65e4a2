"""The table of baselines at its smallest scale."""

from __future__ import annotations

import json

import pytest

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.experiments import baseline_lines, baselines
from sortrl.experiments.baselines import TASKS, TITLES, cells


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
    assert lines[2].startswith("| Acrobot-v1 | 0.1 | RADIAL-DQN |")
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_every_agent_of_every_task_has_its_cells():
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names) == 3 * len(TASKS) * len(TITLES)


def test_an_unknown_task_is_refused(tmp_path):
    with pytest.raises(SortRLError, match="no game 'Pong'"):
        baselines("smoke", "Pong", tmp_path, tmp_path)

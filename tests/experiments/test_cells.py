"""Tables and suites on several workers are those of one process, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch

from sortrl.attacks import PGD
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json
from sortrl.core.pieces import Here
from sortrl.core.workers import Processes
from sortrl.evaluate.returns import evaluate
from sortrl.evaluate.suite import evaluate_suite
from sortrl.experiments.cells import CellTable, measured


@dataclass(frozen=True)
class Cell:
    game: str
    agent: str
    level: int

    @property
    def name(self):
        return f"{self.game}-{self.agent}-{self.level}"


def untimed(value):
    """A document without what differs from one computation to the next: how long it took."""
    if isinstance(value, dict):
        return {name: untimed(part) for name, part in value.items() if name != "seconds"}
    return [untimed(part) for part in value] if isinstance(value, list) else value


def test_a_table_filled_by_workers_is_that_of_one_process_although_one_is_killed(student, tmp_path):
    cells = [Cell("CartPole-v1", agent, level) for agent in ("first", "second") for level in (0, 1, 2)]

    def filled(engine, folder, fatal):
        def agent_of(cell):
            assert (folder / "begun").exists(), "what agents start from comes before them"
            return student

        def compute(cell, player):
            if fatal and cell == cells[1] and not (folder / "tried").exists():
                (folder / "tried").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            return measured(cell, evaluate(player, cell.game, PGD(2), cell.level / 100, 2, 0), (1,))

        def start_of(cell):
            (folder / "begun").write_text(cell.game)

        folder.mkdir()
        table = CellTable("small", "smoke", cells, folder / "work", folder / "out", {})
        lines = []
        made_of = lambda cell, player: {cell.agent: player}  # noqa: E731
        results = table.fill(agent_of, compute, made_of, lines.append, start_of=start_of, engine=engine)
        assert len(lines) == len(cells)
        assert read_json(folder / "out" / "small.json") == results
        return results

    alone = filled(Here(threads=1), tmp_path / "alone", fatal=False)
    shared = filled(Processes(2), tmp_path / "shared", fatal=True)
    assert (tmp_path / "shared" / "tried").exists()
    assert [found["cell"]["level"] for found in alone["cells"]] == [0, 1, 2, 0, 1, 2]
    assert untimed(shared["cells"]) == untimed(alone["cells"])
    assert shared["missing"] == []


def test_workers_that_make_different_agents_are_found_out(tmp_path):
    """As on machines that do not share a file system, and train each their own."""
    cells = [Cell("Pong", agent, level) for level in (0, 1) for agent in ("sortrl", "PQN")]
    table = CellTable("small", "smoke", cells, tmp_path / "work", tmp_path, {})
    with pytest.raises(
        SortRLError, match=r"two workers made different agents \(sortrl of Pong\).* file system that they"
    ):
        table.fill(
            lambda _: torch.nn.Linear(1, 1),  # other weights each time
            lambda cell, _: {"cell": vars(cell), "mean": 1.0},
            lambda cell, player: {cell.agent: player},
            print,
        )
    assert [found["cell"]["agent"] for found in table.found()] == ["sortrl", "PQN"]


def test_a_suite_shared_out_is_the_suite_of_one_process(student, tmp_path):
    """Rows stand in the order of the suite, whoever was first; and a suite that was stopped goes on with any engine."""
    asked = ("CartPole-v1", ("fgsm", "noise", "pgd-10"), (0.02, 0.05), 2, 0)
    alone = evaluate_suite(student, None, *asked, path=tmp_path / "alone.json", engine=Here(threads=1))
    shared = evaluate_suite(student, None, *asked, path=tmp_path / "shared.json", engine=Processes(2))
    assert len(alone.rows) == 7
    assert untimed(list(shared.rows)) == untimed(list(alone.rows))
    assert untimed(read_json(tmp_path / "shared.json")) == untimed(read_json(tmp_path / "alone.json"))
    more = evaluate_suite(student, None, *asked[:2], (0.02, 0.05, 0.1), 2, 0, path=tmp_path / "shared.json")
    assert list(more.rows[:7]) == list(shared.rows)
    assert len(more.rows) == 10

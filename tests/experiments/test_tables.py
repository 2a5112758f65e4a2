"""Tables 2 and 4: which cells there are, that they resume, and what the rendered table says."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

import sortrl
from sortrl.baselines.memory.remember import remember
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, write_json
from sortrl.core.identity import fingerprint
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations, Transitions
from sortrl.envs import EnvSlots
from sortrl.experiments import procgen as tables
from sortrl.experiments import quoted
from sortrl.experiments.cells import CellTable
from sortrl.experiments.procgen import MEMORY, OURS, STUDENT, TEACHER, Cell
from sortrl.nets import HybridPolicy, zoo
from sortrl.teachers import Architecture, Teacher


def test_cells_cover_the_tables():
    with_rivals, alone = (tables.cells("table2", tables.GAMES, published) for published in (True, False))
    assert len({cell.name for cell in with_rivals}) == len(with_rivals)
    jumper = [cell for cell in with_rivals if cell.game == "Jumper" and cell.attack in ("none", "pgd-10")]
    assert {cell.level for cell in jumper} == {0, 1, 3, 5}
    assert {cell.agent for cell in jumper} == {*OURS, "PPO", "PPO, sampled", "RADIAL-PPO", "BCL-MOS(V)-AT"}
    assert not any(cell.agent.startswith(("RADIAL", "BCL")) for cell in alone)
    assert {cell.level for cell in tables.cells("table4", ["Jumper"], True)} == {0, 10, 20, 40}
    assert with_rivals[0].agent == STUDENT
    assert tables.SCALES["cpu"].student >= 200


def test_the_paper_is_quoted_for_every_row_and_column():
    for _, levels, figures in tables.COLUMNS.values():
        printed = levels if figures is quoted.TABLE2 else levels[1:]  # the other one has no clean column
        assert all(len(row) == len(printed) for row in figures.values())
        assert {where for _, where, _ in figures} == set(tables.LEVELS)


@pytest.fixture
def tiny() -> HybridPolicy:
    torch.manual_seed(0)
    shape = (3, 64, 64)
    conv = ((4, 8, 8), (8, 8, 1))
    policy = HybridPolicy(
        shape, 6, width=8, depth=1, hidden=(), bounded_conv=conv, normalizer=Normalizer.from_pixels(shape)
    )
    policy.calibrate(torch.rand(64, *shape))
    policy.requires_grad_(False).head.layers[-1].bias[0] = 1e3  # always to the left
    return policy


@pytest.mark.usefixtures("procgen")
def test_cells_are_computed_once_and_written_as_they_come(tiny, tmp_path, monkeypatch, capsys):
    """In the real game, on its first level, where one step to the left wins: the table grows cell by cell, and a second run
    computes nothing."""
    monkeypatch.setitem(tables.SCALES, "smoke", tables.Episodes(1, 1, 1, 1))
    few = [Cell("Jumper", "train", STUDENT, "none", 0), Cell("Jumper", "train", STUDENT, "pgd-10", 3)]
    monkeypatch.setattr(tables, "cells", lambda *_: few)
    monkeypatch.setattr(tables, "_agent", lambda *_: tiny)
    monkeypatch.setattr(tables, "teacher_of", lambda *_: None)  # no cell asks for it
    monkeypatch.delenv("SORTRL_TEACHERS", raising=False)
    results = tables.procgen_table("table2", "smoke", "Jumper", tmp_path / "out", tmp_path / "work")
    assert results["missing"] == []
    assert read_json(tmp_path / "out" / "table2.json") == results
    clean = results["cells"][0]
    assert clean["episodes"] == 1
    assert clean["mean"] == 10.0
    assert clean["certified"].keys() == clean["proven"].keys() == {"1", "3", "5", "10", "20", "40"}
    assert clean["proven"]["40"] in (0.0, 10.0)
    monkeypatch.setattr(tables, "_compute", lambda *_: pytest.fail("it was there already"))
    again = tables.procgen_table("table2", "smoke", "Jumper", tmp_path / "out", tmp_path / "work")
    assert again == results
    elsewhere = tables.procgen_table("table2", "smoke", "Jumper", tmp_path / "out", tmp_path / "another machine")
    assert elsewhere["cells"] == results["cells"], "the table itself is kept"
    text = "\n".join(tables.table_lines(results))
    assert "| Jumper | train | **sortrl** |" in text
    assert "| Jumper | train | **sortrl**, *proven, whatever the attack* |" in text
    assert "quoted from the paper" in text
    assert "(1 episodes)" in text


def test_a_table_keeps_its_cells_and_never_mixes_two_students(tmp_path):
    """Cells of other games stay as they are; of the same game, only those of the same weights are added to."""
    cells = [Cell("Jumper", "train", STUDENT, "none", 0), Cell("Jumper", "train", STUDENT, "pgd-10", 1)]
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    old = {"cell": {**vars(cells[0]), "game": "Coinrun"}, "mean": 9.0, "agents": {STUDENT: "someone else"}}
    known = {"cell": vars(cells[0]), "mean": 7.0, "agents": {STUDENT: fingerprint(first)}}
    write_json(tmp_path / "table2.json", {"scale": "cpu", "cells": [old, known]})
    table = CellTable("table2", "cpu", cells, tmp_path / "work", tmp_path, {})

    def fill(network, **changes):
        return table.fill(
            lambda _: network,
            lambda cell, _: {"cell": vars(cell), "mean": 5.0, **changes},
            lambda cell, agent: {cell.agent: agent},
            print,
        )

    with pytest.raises(SortRLError, match="cells of another sortrl of Jumper"):
        fill(second)
    assert [entry["mean"] for entry in fill(first)["cells"]] == [7.0, 5.0, 9.0]
    assert fill(second)["missing"] == [], "nothing was left to do"
    with pytest.raises(SortRLError, match="is a table of scale cpu; one of scale smoke needs another --out"):
        CellTable("table2", "smoke", cells, tmp_path / "work", tmp_path, {}).write()


def test_other_attacks_stand_in_a_table_of_their_own(tmp_path):
    cell = {"game": "Jumper", "levels": "train", "agent": STUDENT, "attack": "fgsm", "level": 5}
    results = {"cells": [{"cell": cell, "mean": 7.0, "sem": 0.5, "episodes": 50}]}
    assert tables.other_attacks_lines(results)[-1] == "| Jumper, sortrl | 7.00 ± 0.50 (50 episodes) |"
    assert tables.other_attacks_lines({"cells": []}) == []


def test_bad_requests_are_named(tmp_path):
    with pytest.raises(SortRLError, match="no game 'Pong'"):
        tables.procgen_table("table2", game="Pong")
    with pytest.raises(SortRLError, match=r"no agent 'DQN'; choose one of sortrl, sortrl, memory, PPO"):
        tables.procgen_table("table2", agent="DQN")
    write_json(tmp_path / "other.json", {})
    with pytest.raises(SortRLError, match=r"does not hold the published agents \(no Jumper_ppo.pt\)"):
        tables.procgen_table("table2", teachers=tmp_path)


def test_the_tables_have_both_students():
    """One is trained, one remembers; they are kept in different places, and each attack meets both."""
    wanted = tables.cells("table4", ["Jumper"], published=False)
    assert {(cell.agent, cell.level) for cell in wanted} >= {(agent, k) for agent in OURS for k in (0, 10, 20, 40)}
    assert Cell("Jumper", "train", MEMORY, "none", 0).name == "Jumper-train-sortrl--memory-none-0"


@pytest.mark.usefixtures("procgen")
def test_the_agents_of_the_zoo_play_unless_others_were_made(tmp_path, monkeypatch):
    def player(agent, game="Coinrun", scale="cpu"):
        return tables._agent(Cell(game, "train", agent, "none", 0), tmp_path, None, scale, print)

    assert fingerprint(player(MEMORY)) == fingerprint(sortrl.load("zoo:coinrun"))
    assert fingerprint(player(STUDENT)) == fingerprint(sortrl.load("zoo:coinrun-distilled"))
    assert fingerprint(player(TEACHER)) == fingerprint(Teacher.load(zoo.entry("coinrun") / "teacher"))
    trained = Teacher.load(zoo.entry("coinrun") / "teacher")
    monkeypatch.setattr(tables, "train_teacher", lambda *_: trained)
    monkeypatch.setattr(tables.Run, "student", lambda self, teacher: teacher)
    for agent in (MEMORY, STUDENT):
        assert player(agent, "Jumper") is trained, "the zoo's was made from the published agent, which is not here"
    (tmp_path / "students" / "Coinrun-cpu-memory").mkdir(parents=True)
    assert isinstance(player(MEMORY), Teacher), "the one that was made here, from the zoo's teacher"


@pytest.mark.usefixtures("procgen")
def test_return_against_compute(tmp_path, monkeypatch):
    """In the real game, on one level, where one step to the left wins: every share of eight tries is enough to know it."""
    module = importlib.import_module("sortrl.experiments.compute")
    env_id, tries = "sortrl/Jumper-train-v0", 8
    with EnvSlots(env_id, 1) as slots:
        start = np.asarray(slots.reset(0, tables.TEST_SEED))
    ones = np.ones(tries, bool)
    after = Transitions(
        np.zeros(tries, np.int64), 10.0 * ones.astype(np.float32), ones, ~ones, np.stack([start] * tries)
    )
    logits = np.zeros((tries, 6), np.float32)
    data = Demonstrations(env_id, np.stack([start] * tries), after.played, logits, np.arange(tries), after)
    architecture = Architecture(start.shape, 6, (), "ReLU")
    teacher = Teacher(architecture.build(), Normalizer.from_pixels(start.shape), 6, architecture=architecture)
    source = module._Source(teacher, data, lambda episodes: remember(episodes, Normalizer.from_pixels(start.shape)))
    monkeypatch.setattr(module, "_source", lambda *_: source)
    monkeypatch.setattr(module, "teacher_of", lambda *_: teacher)
    monkeypatch.setitem(tables.SCALES, "smoke", tables.Episodes(1, 1, 1, 1))
    monkeypatch.delenv("SORTRL_TEACHERS", raising=False)
    results = module.compute("smoke", "Jumper", tmp_path / "out", tmp_path / "work")
    assert [cell["tries"] for cell in results["cells"]] == [2, 4, 8]
    assert all(cell["mean"] == 10.0 and cell["memories"] == 1 for cell in results["cells"])
    assert "| Jumper | 8 | 8 | 1 | 10.00" in module.table_lines(results)[-1]
    assert read_json(tmp_path / "out" / "compute.json") == results

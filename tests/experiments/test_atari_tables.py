"""Tables 1 and 3, figures 2 and 3: a game from teacher to picture with episodes cut short, and arithmetic by hand."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from sortrl import cli
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, write_json
from sortrl.core.normalizer import Normalizer
from sortrl.data.collect import CollectConfig
from sortrl.envs import describe
from sortrl.envs.info import make_env
from sortrl.evaluate.returns import episode_seeds
from sortrl.experiments import atari, atari_figures, quoted
from sortrl.experiments.atari import AGENTS, GAMES, MEMORY, QUANTIZED, ROUNDED, STICKY, STRONGER, STUDENT, TEACHER, Cell
from sortrl.experiments.teachers import table_lines as teachers_lines
from sortrl.experiments.teachers import teachers_table
from sortrl.nets import HybridPolicy, SortPolicy
from sortrl.runs.config import robustify_config
from sortrl.runs.tasks import TASKS
from sortrl.teachers import Architecture, Teacher

SHAPE = (1, 84, 84)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def save_teacher(folder, seed):
    """A fresh network for Pong: it plays badly, but no action is its favourite everywhere."""
    torch.manual_seed(seed)
    architecture = Architecture(SHAPE, 4, (16,), "ReLU", "norm_cnn", channels=(4,))
    teacher = Teacher(architecture.build(), Normalizer.from_pixels(SHAPE), 4, "fresh", "pqn", architecture)
    env = make_env(atari.env_id_of("Pong"))
    frames = [env.reset(seed=0)[0], *(env.step(k % 4)[0] for k in range(9))]
    with torch.no_grad():
        teacher.body[-1].bias -= teacher.scores(teacher.normalize(np.stack(frames))).mean(0)
    teacher.save(folder)


@pytest.fixture
def short_pong(monkeypatch):
    """Pong that ends after 10 steps, with students that learn from 60 or remember 1,200; table 3 has one eps."""
    pytest.importorskip("ale_py")
    describe(atari.env_id_of("Pong"))  # registers it
    for env_id in (atari.env_id_of("Pong"), "sortrl/Pong84-sticky-v0"):
        monkeypatch.setattr(gym.spec(env_id), "max_episode_steps", 10)
    small = {"collect": CollectConfig(states=60), "width": 8}
    rounded = {**atari.SMOKE_STUDENTS[ROUNDED], "collect": CollectConfig(states=60), "conv": ((4, 8, 4),)}
    students = {STUDENT: {**atari.SMOKE_STUDENTS[STUDENT], **small}, ROUNDED: rounded}
    students[MEMORY] = {"collect": CollectConfig(states=1200)}
    monkeypatch.setattr(atari, "SMOKE_STUDENTS", students)
    monkeypatch.setitem(atari.STRONGER_LEVELS, "Pong", (10,))


def test_cells_cover_the_tables():
    weak, strong = atari.cells("table1"), atari.cells("table3")
    assert len({cell.name for cell in weak + strong}) == len(weak) + len(strong)
    assert len(weak) == 4 * 5 * 5 + 4, "and of SortNets the suite auto"
    assert len(strong) == 4 * 5 * 3 * 4
    assert {cell.level for cell in strong if cell.game == "BankHeist"} == {5, 10, 15}
    assert {cell.level for cell in strong if cell.game == "Pong"} == {10, 15, 20}
    assert {cell.attack for cell in weak if cell.level} == {"pgd-10", "auto"}
    assert episode_seeds(atari.SEED, 20) == tuple(range(20))
    for scale in ("cpu", "paper"):
        assert atari.SIZES[scale].episodes == 20
    assert (atari.SIZES["paper"].stronger_episodes, atari.SIZES["paper"].starts) == (20, 1000)


def test_the_paper_is_quoted_for_every_row_and_column():
    assert all(len(row) == len(atari.LEVELS) for row in quoted.TABLE1.values())
    assert all(len(row) == 3 for row in quoted.TABLE3.values())
    assert quoted.TABLE1_ACR.keys() == {key for key in quoted.TABLE1 if key[1] != "RS-DQN"}
    assert {game for game, _ in quoted.TABLE1} == set(GAMES)
    assert quoted.TABLE3_LEVELS.keys() == {game for game, _ in quoted.TABLE3}
    assert atari_figures.QUOTED_COLOURS.keys() == {agent for _, agent in (*quoted.TABLE1, *quoted.TABLE3)}


def test_quoted_figures_and_the_formula_give_what_the_paper_says_of_them():
    """Under 5/255, SortRL loses less than 1.7 % (1.71 as its table has it) and RADIAL about 18 % of nominal performance."""
    printed = atari_figures._printed(atari._facts("table1", atari.SIZES["paper"]))
    for agent, lost in (("SortRL-DQN", 0.017), ("RADIAL-DQN", 0.178)):
        points = atari_figures._scores(printed, agent, list(GAMES), [0, 5], "nominal")
        assert points[0]["score"] == 1.0
        assert 1.0 - points[1]["score"] == pytest.approx(lost, abs=5e-4)


@pytest.mark.parametrize("game", GAMES)
def test_students_see_the_whole_image_and_are_small(game):
    task = TASKS[atari.env_id_of(game)]
    config = robustify_config(task.env_id, train_teacher=False)
    assert task.eps == pytest.approx(2 / 255)
    assert config.collect.states == 60_000
    made = config.student.distill
    assert made.ramps
    assert made.head is None, "sort layers alone"
    # Pong offers the most: 9,362 ramps.
    shape = {"width": made.width, "depth": made.depth, "pixels": (0,) * 9362, "ramp_width": 30 / 255}
    assert 2 * SortPolicy(SHAPE, 6, **shape).parameter_count < 5_000_000, "bytes in half precision"


@pytest.mark.parametrize("env_id", ["sortrl/Pong84-v0", "sortrl/Jumper-train-v0"])
def test_the_printed_recipe_for_images_is_a_preset(env_id):
    """Six sort layers of 1280, two linear ones of 256, theta = 2.2 eps, 100,000 states, batches of 512, 2,000 iterations."""
    config = robustify_config(env_id, preset="paper", train_teacher=False)
    made = config.student.distill
    assert (made.width, made.depth, made.head, made.rho) == (1280, 6, (256, 256), 0.3)
    assert made.theta == pytest.approx(2.2 * config.eps)
    assert (config.collect.states, made.batch, made.steps, config.dagger_rounds) == (100_000, 512, 2000, 0)
    policy = HybridPolicy((1, 12, 12), 4, width=made.width, depth=made.depth, hidden=made.head)
    assert [tuple(layer.weight.shape) for layer in policy.head.layers] == [(256, 1280), (256, 256), (4, 256)]


def test_a_game_from_teacher_to_picture(short_pong, tmp_path, monkeypatch, capsys):
    save_teacher(tmp_path / "teachers" / "pong", seed=0)
    options = ["--task", "Pong", "--scale", "smoke", "--workers", "1", "--teachers", str(tmp_path / "teachers")]
    options += ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    for table in ("table1", "table3"):
        cli.main(["reproduce", table, *options])
    weak, strong = (read_json(tmp_path / "out" / f"{name}.json") for name in ("table1", "table3"))
    assert len(weak["cells"]) == 5 * 5 + 1
    assert len(strong["cells"]) == 5 * 4
    assert {name.split("-")[0] for name in weak["missing"]} == set(GAMES) - {"Pong"}
    clean = weak["cells"][0]
    assert clean["cell"] == {"game": "Pong", "agent": STUDENT, "attack": "none", "level": 0}
    assert (clean["first_seed"], clean["steps"], clean["episodes"]) == (0, 10, 1)
    assert "1" in clean["certified"]
    sticky = [entry for entry in weak["cells"] if entry["cell"]["attack"] == STICKY]
    assert [entry["cell"]["agent"] for entry in sticky] == [*AGENTS]
    assert {entry["env_id"] for entry in sticky} == {"sortrl/Pong84-sticky-v0"}
    assert len(atari.sticky_lines(weak)) == 2 + len(AGENTS)
    starts = {entry["cell"]["attack"]: entry["attack_parameters"]["attack"].get("starts") for entry in strong["cells"]}
    assert starts == {"pgd-30": None, "fgsm": None, "ri-fgsm-multi": 2, "ri-fgsm-multi-t": 2}
    assert all(row["attacks_tried"] == 4 for row in strong["worst"])
    assert {row["agent"] for row in strong["worst"]} == {*AGENTS}
    out = capsys.readouterr().out
    assert "| Pong | **sortrl** |" in out
    assert "| Pong | SortRL-DQN, *quoted from the paper* | 21.00 ± 0.00 |" in out
    assert "Freeway" not in out, "nothing of it was measured"
    assert "2 random starts (the literature: 20 episodes, 1000 starts)" in out

    monkeypatch.setattr(atari, "_compute", lambda *_: pytest.fail("it was there already"))
    cli.main(["reproduce", "table1", *options])
    assert read_json(tmp_path / "out" / "table1.json") == weak
    for name in ("fig2", "fig3"):
        cli.main(["reproduce", name, "--out", str(tmp_path / "out")])
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert read_json(tmp_path / "out" / "fig2.json")["games"] == ["Pong"]
    drawn = read_json(tmp_path / "out" / "fig3.json")["games"]["Pong"]
    assert {(curve["attack"], curve["agent"]) for curve in drawn if not curve["quoted"]} == {
        (attack, agent) for attack in ("PGD-10", "worst of four") for agent in AGENTS
    }

    save_teacher(tmp_path / "teachers" / "pong", seed=1)
    missing = "Pong-PQN-pgd-10-5"
    (tmp_path / "work" / "smoke" / f"{missing}.json").unlink()
    write_json(tmp_path / "out" / "table1.json", {**weak, "cells": weak["cells"][:5]})  # the student's
    with pytest.raises(SortRLError, match="cells of another PQN of Pong"):
        atari.atari_table("table1", "smoke", "Pong", tmp_path / "out", tmp_path / "work", tmp_path / "teachers")


def entry(game, agent, attack, level, mean, sem=1.0, **more):
    cell = {"game": game, "agent": agent, "attack": attack.lower(), "level": level}
    return {"cell": cell, "attack": attack, "mean": mean, "sem": sem, "episodes": 20, **more}


def test_the_worst_of_four_is_reported_once_there_are_four():
    means = (30.0, 12.0, 25.0, 20.0)
    found = [entry("Pong", STUDENT, attack.upper(), 10, mean) for attack, mean in zip(STRONGER, means, strict=True)]
    found.append(entry("Pong", TEACHER, "PGD-30", 10, -21.0))
    rows = atari.worst(found)
    assert rows[0] == {
        "game": "Pong",
        "agent": STUDENT,
        "level": 10,
        "attack": "FGSM",
        "mean": 12.0,
        "sem": 1.0,
        "episodes": 20,
        "attacks_tried": 4,
    }
    results = {**atari._facts("table3", atari.SIZES["paper"]), "cells": found, "worst": rows}
    lines = atari.table_lines(results)
    assert "| Pong | **sortrl** |  | 12.00 ± 1.00 (FGSM) |  |  |" in lines
    assert "| Pong | PQN |  | -21.00 ± 1.00 (PGD-30; 1 of 4 attacks) |  |  |" in lines
    assert [row["agent"] for row in atari_figures._entries(results)] == [STUDENT]


@pytest.fixture
def table1(tmp_path):
    """Two games by hand: everyone scores a human's return when clean, and random play's at 5/255."""
    cells = []
    for game in ("Pong", "Freeway"):
        floor, human = quoted.RANDOM_AND_HUMAN[game]
        for agent in AGENTS:
            steps = zip(atari.LEVELS, (human, human, (floor + human) / 2, floor), strict=True)
            cells += [entry(game, agent, "PGD-10", level, mean, sem=human - floor) for level, mean in steps]
    cells.append(entry("BankHeist", STUDENT, "PGD-10", 0, 1000.0, certified={"1": 0.99998}))
    facts = atari._facts("table1", atari.SIZES["cpu"])
    results = {"table": "table1", "scale": "cpu", **facts, "missing": ["more"], "cells": cells}
    write_json(tmp_path / "table1.json", results)
    return results


def test_normalised_scores_by_hand(table1, tmp_path):
    results = atari_figures.fig2(tmp_path)
    assert results["games"] == ["Freeway", "Pong"], "BankHeist is not complete"
    ours = results["curves"]["human"][0]
    assert ours["agent"] == STUDENT
    assert [point["score"] for point in ours["points"]] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert ours["points"][0]["sem"] == pytest.approx(2**0.5 / 2)  # of two games with an error of 1 each
    assert results["curves"]["nominal"][0]["points"] == ours["points"]
    compared = [curve["agent"] for curve in results["curves"]["human"] if curve["quoted"]]
    assert compared == ["DQN", "SA-DQN", "WocaR-DQN", "RADIAL-DQN", "SortRL-DQN"], "those with all cells of both games"
    alone = atari_figures.fig2(tmp_path, "Pong")
    assert alone["games"] == ["Pong"]
    assert "A3C" in [curve["agent"] for curve in alone["curves"]["human"]]


def test_an_agent_at_random_play_has_nothing_to_lose():
    curves = {("Pong", QUANTIZED): {0: (-20.7, 0.0), 5: (-21.0, 0.0)}}
    assert atari_figures._scores(curves, QUANTIZED, ["Pong"], [0, 5], "nominal") is None
    assert atari_figures._scores(curves, QUANTIZED, ["Pong"], [0, 5], "human")[0]["score"] == 0.0


def test_the_table_shows_what_is_certified_and_never_rounds_it_up(table1):
    lines = atari.table_lines(table1)
    assert "| BankHeist | **sortrl** | 1000.0 ± 1.0 |  |  |  |  | 99.99% |  |" in lines
    assert "| Freeway | RS-DQN, *quoted from the paper* | 32.93 | 32.53 |  |  |  |  |  |" in lines
    assert not any("RoadRunner" in line for line in lines)


def test_bad_requests_are_named(tmp_path, table1):
    with pytest.raises(SortRLError, match="no game 'Jumper'"):
        atari.atari_table("table1", game="Jumper")
    with pytest.raises(SortRLError, match=r"holds no teacher of Pong.*sortrl teach sortrl/Pong84-v0"):
        atari._player(Cell("Pong", TEACHER, "none", 0), tmp_path, "smoke", tmp_path, print)
    with pytest.raises(SortRLError, match=r"Run first: sortrl reproduce table1$"):
        atari_figures.fig2(tmp_path / "empty")
    with pytest.raises(SortRLError, match="Run first: sortrl reproduce table1 or sortrl reproduce table3"):
        atari_figures.fig3(tmp_path / "empty")
    with pytest.raises(SortRLError, match="has no game with all its cells yet; 1 are missing"):
        atari_figures.fig2(tmp_path, "BankHeist")
    with pytest.raises(SortRLError, match="no game 'Tennis'"):
        atari_figures.fig3(tmp_path, "Tennis")


def test_teachers_are_measured_once_with_what_is_known_of_their_training(tmp_path, short_pong):
    save_teacher(tmp_path / "teachers" / "pong", 1)
    history = [{"step": 64, "return": 3.0, "hours": 0.5}, {"step": 128, "return": -2.0, "hours": 1.0}]
    write_json(tmp_path / "teachers" / "pong" / "training.json", {"identity": {"seed": 0}, "history": history})
    told = []
    asked = ("smoke", "Pong", tmp_path, tmp_path / "teachers", told.append)
    (row,) = teachers_table(*asked)["teachers"]
    assert (row["game"], row["episodes"], len(row["clean"]["returns"])) == ("Pong", 1, 1)
    assert row["training"] == {"settings": {"seed": 0}, "step": 64, "hours": 0.5, "curve": history}
    assert len(told) == 1
    teachers_table(*asked)
    assert len(told) == 1, "the same weights are not measured again"
    save_teacher(tmp_path / "teachers" / "pong", 2)
    (other,) = teachers_table(*asked)["teachers"]
    assert other["weights"] != row["weights"]
    assert "| Pong |" in teachers_lines({"teachers": [other]})[-1]

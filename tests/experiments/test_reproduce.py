"""Figure 1 on the smallest scale: real agents, real attacks, a resumable run and a figure."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sortrl.core.errors import SortRLError
from sortrl.core.files import write_json
from sortrl.core.identity import plain
from sortrl.experiments import experts, figure1
from sortrl.runs.config import robustify_config
from sortrl.runs.tasks import TASKS
from sortrl.teachers import HardenConfig


def test_units_cover_the_figure():
    plan = figure1.PLANS["cpu"]
    wanted = figure1.units(plan, figure1.TASKS)
    expected = 2 * 4 * (1 + plan.seeds) + 4 * plan.paper_seeds + 4  # experts, our students; the printed recipe; suites
    assert len({unit.name for unit in wanted}) == len(wanted) == expected
    assert plan.episodes >= 50
    assert plan.seeds >= 3
    assert {unit.task for unit in wanted if unit.adversary == "suite"} == set(figure1.TASKS)
    assert plan.eps_grid == figure1.EPS_GRID
    assert all("paper" in TASKS[task].figure1 for task in figure1.TASKS)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory, published_teachers):
    work = tmp_path_factory.mktemp("work")
    plan, folder = figure1.PLANS["smoke"], work / "smoke"
    wanted = figure1.units(plan, ("MountainCar-v0",), ("paper",))
    for unit in wanted:
        found = figure1.compute(unit, plan, work, folder, published_teachers / "sb3")
        write_json(folder / f"{unit.name}.json", found)
    return figure1.assemble(wanted, plan, folder, "smoke", True), folder


def test_smoke_scale_end_to_end(reproduced, tmp_path):
    results, _ = reproduced
    agents = results["curves"]["paper"]["MountainCar-v0"]
    expert = agents["expert"]["curve"]
    assert expert[0]["mean"] > -130
    assert expert[1]["mean"] < expert[0]["mean"], "PGD-10 at 0.1 must hurt the undefended expert"
    for agent in ("expert", "ours"):
        (pgd,), (paper,), (full,) = (agents[agent]["suites"][name] for name in ("PGD-10", "paper", "full"))
        assert full["mean"] <= paper["mean"] <= pgd["mean"], "all attacks are at least as strong as some of them"
        assert full["eps"] == 0.1
    figure1.draw(results, tmp_path / "fig1.png")
    assert (tmp_path / "fig1.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(results, allow_nan=False)


def test_students_are_kept_for_the_suites(reproduced):
    _, folder = reproduced
    kept = {path.parent.name for path in (folder / "students").glob("*/policy.safetensors")}
    assert kept == {"paper-MountainCar-v0-ours-0", "paper-MountainCar-v0-paper-0"}


def test_bad_requests_are_named(tmp_path):
    with pytest.raises(SortRLError, match="no task 'Pong'"):
        figure1.fig1(task="Pong")
    with pytest.raises(SortRLError, match="does not hold the published agents"):
        experts.find_teachers(tmp_path)


def test_a_published_figure_is_continued_where_its_settings_are_todays(reproduced, tmp_path, published_teachers):
    """The units of a figure whose runs are gone are kept; those of other settings, or of another expert, are not."""
    results, _ = reproduced
    plan, folder = figure1.PLANS["smoke"], tmp_path / "smoke"
    wanted = figure1.units(plan, ("MountainCar-v0",), ("paper",))
    write_json(tmp_path / "fig1.json", results)
    published = figure1.earlier_units(tmp_path / "fig1.json", "smoke")
    figure1._keep_earlier(wanted, plan, folder, published)
    assert figure1.assemble(wanted, plan, folder, "smoke", True)["curves"] == results["curves"]

    changed = replace(plan, changes=(*plan.changes, ("lambda_end", 0.77)))
    figure1._keep_earlier(wanted, changed, folder, published)
    assert {path.stem for path in folder.glob("*.json")} == {"paper-MountainCar-v0-expert-0-pgd"}
    (suite,) = (unit for unit in wanted if unit.adversary == "suite")
    known = figure1._known_expert(suite, folder)
    assert {row["policy"] for row in json.loads(known.read_text())} == {"teacher"}

    mark = published[0]["expert"]
    figure1._drop_others(wanted, "paper", "MountainCar-v0", mark, True, folder)
    assert any(folder.glob("*.json"))
    figure1._drop_others(wanted, "paper", "MountainCar-v0", "another", True, folder)
    assert not any(folder.glob("*.json"))
    assert not known.exists()


def test_of_another_student_only_the_student_meets_the_suite_again(reproduced, tmp_path, published_teachers):
    results, folder = reproduced
    plan, work = figure1.PLANS["smoke"], folder.parent
    unit = figure1.Unit("paper", "MountainCar-v0", "ours", 0, "suite")
    earlier_suite = next(entry for entry in results["units"] if entry["unit"] == asdict(unit))
    rows = [{**row, "mean": -199.0} for row in earlier_suite["rows"] if row["policy"] == "teacher"]
    shutil.copytree(folder / "students", tmp_path / "students")
    write_json(figure1._known_expert(unit, tmp_path), rows)
    found = figure1.compute(unit, plan, work, tmp_path, published_teachers / "sb3")
    assert [row for row in found["rows"] if row["policy"] == "teacher"] == rows
    played = [row for row in found["rows"] if row["policy"] == "student"]
    before = [row for row in earlier_suite["rows"] if row["policy"] == "student"]
    assert [(row["attack"], row["mean"]) for row in played] == [(row["attack"], row["mean"]) for row in before]
    assert {point["policy"]: point["mean"] for point in found["worst"]["full"]}["teacher"] == -199.0


def test_units_that_do_not_name_their_expert_are_only_trusted_if_it_is_published(reproduced, tmp_path):
    results, _ = reproduced
    unit = figure1.Unit("paper", "MountainCar-v0", "expert", 0)
    entry = {**results["units"][0], "expert": None}
    for published in (True, False):
        write_json(tmp_path / f"{unit.name}.json", entry)
        figure1._drop_others([unit], "paper", "MountainCar-v0", "mark", published, tmp_path)
        assert (tmp_path / f"{unit.name}.json").exists() == published


def test_settings_in_older_files_are_read_as_what_they_were():
    config = robustify_config("MountainCar-v0", train_teacher=False, scale=2.0)
    stored = json.loads(json.dumps(plain(config)))
    for name in ("harden", "steady", "candidates", "start_radius"):
        del stored[name]  # did not exist then
    stored["distill"]["given_up"] = 0.0  # does not exist any more, and was off
    assert figure1.is_current(stored, config)
    assert not figure1.is_current({**stored, "given_up": 0.5}, config)
    assert not figure1.is_current(stored, replace(config, harden=HardenConfig(eps=0.1)))
    assert not figure1.is_current(None, config)
    assert figure1.is_current(None, None)


def test_a_file_that_is_no_such_figure_is_named(tmp_path):
    assert figure1.earlier_units(tmp_path / "fig1.json", "cpu") == []
    write_json(tmp_path / "fig1.json", {"scale": "smoke", "units": []})
    with pytest.raises(SortRLError, match="scale smoke; one of scale cpu needs another --out"):
        figure1.earlier_units(tmp_path / "fig1.json", "cpu")
    write_json(tmp_path / "fig1.json", {"scale": "cpu", "units": [3]})
    with pytest.raises(SortRLError, match="not a figure made of units"):
        figure1.earlier_units(tmp_path / "fig1.json", "cpu")


def test_what_is_published_is_of_todays_settings():
    """Otherwise the next reproduction would throw it away."""
    results = Path(__file__).resolve().parents[2] / "results" / "fig1.json"
    plan = figure1.PLANS["cpu"]
    for entry in figure1.earlier_units(results, "cpu"):
        unit = figure1.Unit(**entry["unit"])
        config = None if unit.agent == "expert" else figure1.config_of(unit, plan)
        assert figure1.is_current(entry["config"], config), unit.name

"""Figure 1 on the smallest scale: real agents, real attacks, a resumable run and a figure."""

from __future__ import annotations

import json

import pytest

from sortrl.errors import SortRLError
from sortrl.reproduce import draw, experts, figure1


def test_units_cover_the_figure():
    plan = figure1.PLANS["cpu"]
    wanted = figure1.units(plan, figure1.TASKS)
    expected = 2 * 4 * (1 + plan.seeds) + 4 * plan.paper_seeds + 4  # experts, our students; the printed recipe; suites
    assert len({unit.name for unit in wanted}) == len(wanted) == expected
    assert plan.episodes >= 50
    assert plan.seeds >= 3
    assert {unit.task for unit in wanted if unit.adversary == "suite"} == set(figure1.TASKS)
    assert plan.eps_grid == figure1.EPS_GRID
    assert {task for protocol, task in figure1.SETTINGS if protocol == "paper"} == set(figure1.TASKS)


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory, published_teachers):
    work = tmp_path_factory.mktemp("work")
    plan, folder = figure1.PLANS["smoke"], work / "smoke"
    wanted = figure1.units(plan, ("MountainCar-v0",), ("paper",))
    for unit in wanted:
        figure1._compute_to_file((unit, plan, work, published_teachers / "sb3", folder))
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
    draw.draw(results, tmp_path / "fig1.png")
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

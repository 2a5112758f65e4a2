"""Figure 1 on the smallest scale: real agents, real attacks, a resumable run and a figure."""

from __future__ import annotations

import json

import pytest

from sortrl import reproduce
from sortrl.errors import SortRLError


def test_units_cover_the_figure():
    plan = reproduce.PLANS["cpu"]
    wanted = reproduce.units(plan, reproduce.TASKS)
    assert len({unit.name for unit in wanted}) == len(wanted) == 2 * 4 * (1 + plan.seeds + plan.paper_seeds)
    assert plan.episodes >= 50
    assert plan.seeds >= 3
    assert plan.eps_grid == reproduce.EPS_GRID
    assert set(reproduce.SETTINGS) == {(p, t) for p in reproduce.PROTOCOLS for t in reproduce.TASKS}


def test_smoke_scale_end_to_end(tmp_path, published_teachers):
    teachers = published_teachers / "sb3"
    plan = reproduce.PLANS["smoke"]
    wanted = reproduce.units(plan, ("MountainCar-v0",), ("paper",))
    folder = tmp_path / "work" / "smoke"
    for unit in wanted:
        reproduce._compute_to_file((unit, plan, tmp_path / "work", teachers, folder))
    results = reproduce.assemble(wanted, plan, folder, "smoke", True)
    expert = results["curves"]["paper"]["MountainCar-v0"]["expert"]["curve"]
    assert expert[0]["mean"] > -130
    assert expert[1]["mean"] < expert[0]["mean"], "PGD-10 at 0.1 must hurt the undefended expert"
    reproduce.draw(results, tmp_path / "fig1.png")
    assert (tmp_path / "fig1.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(results, allow_nan=False)


def test_bad_requests_are_named(tmp_path):
    with pytest.raises(SortRLError, match="no task 'Pong'"):
        reproduce.fig1(task="Pong")
    with pytest.raises(SortRLError, match="does not hold the published agents"):
        reproduce.find_teachers(tmp_path)

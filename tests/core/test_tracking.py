"""What a training measures reaches the tools that it is kept in."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas
import pytest

from helpers import make_results
from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.progress import stage
from sortrl.core.tracking import tracking

ROWS = [{"step": step, "total": 20, "seconds_left": 1.0, "loss": 1.0 / step, "note": "ignored"} for step in (10, 20)]


def work():
    with stage("Distilling", quiet=True) as report:
        for row in ROWS:
            report(row)
    with stage("Measuring", quiet=True) as report:
        report({"episodes": 3, "return": 500.0})


def test_a_csv_file_has_every_number_and_a_run_that_goes_on_adds_to_it(tmp_path):
    for _ in range(2):
        with tracking("csv", tmp_path, "mine"):
            work()
    work()  # not tracked any more
    found = pandas.read_csv(tmp_path / "progress.csv")
    once = [("Distilling", 10, "loss", 0.1), ("Distilling", 20, "loss", 0.05), ("Measuring", 3, "return", 500.0)]
    assert list(found[["stage", "step", "name", "value"]].itertuples(index=False, name=None)) == once * 2


def test_a_function_gets_each_row_and_parts_of_a_stage_are_not_told_twice(capsys):
    seen = []
    with tracking(lambda title, row: seen.append((title, row)), None, ""), stage("Whole") as report:
        report({"step": 1})
        work()
    assert seen == [("Whole", {"step": 1})]


def test_weights_and_biases_gets_one_axis_per_stage(tmp_path, monkeypatch):
    calls = []

    class Run:
        def define_metric(self, name, step_metric):
            calls.append(("axis", name, step_metric))

        def log(self, values):
            calls.append(values)

        def finish(self):
            calls.append("finished")

    module = ModuleType("wandb")
    module.init = lambda project, name: calls.append((project, name)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    with tracking("wandb", tmp_path, "mine"):
        work()
    assert calls == [
        ("sortrl", "mine"),
        ("axis", "Distilling/*", "Distilling/step"),
        {"Distilling/step": 10, "Distilling/loss": 0.1},
        {"Distilling/step": 20, "Distilling/loss": 0.05},
        ("axis", "Measuring/*", "Measuring/step"),
        {"Measuring/step": 3, "Measuring/return": 500.0},
        "finished",
    ]


@pytest.mark.parametrize("tool", ["wandb", "mlflow"])
def test_the_tools_themselves_take_it(tool, tmp_path, monkeypatch):
    """Where they are installed; without a server."""
    module = pytest.importorskip(tool, reason=f"{tool} is not installed: pip install {tool}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with tracking(tool, tmp_path, "mine"):
        work()
    if tool == "wandb":
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        return
    (run,) = module.search_runs(search_all_experiments=True, output_format="list")
    assert run.data.metrics == {"Distilling/loss": 0.05, "Measuring/return": 500.0}
    history = module.MlflowClient().get_metric_history(run.info.run_id, "Distilling/loss")
    assert [(point.step, point.value) for point in history] == [(10, 0.1), (20, 0.05)]


def test_what_is_missing_or_unknown_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with (
        pytest.raises(MissingDependency, match="--track mlflow needs a package: pip install mlflow"),
        tracking("mlflow", tmp_path, "mine"),
    ):
        pass
    with (
        pytest.raises(SortRLError, match="track is 'tensorflow', expected csv, wandb, mlflow or a function"),
        tracking("tensorflow", tmp_path, "mine"),
    ):
        pass


def test_the_documented_line_makes_a_frame_of_results(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "track.md").read_text()
    documented: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.S)[-1], documented)
    results = make_results()
    (tmp_path / "results.json").write_text(json.dumps(results))
    found = documented["frame"](tmp_path)
    assert len(found) == len(results["evaluation"])
    table = found.pivot_table("mean", ["attack", "eps"], "policy")
    assert table.loc[("none", 0.0), "teacher"] == 500.0
    assert {"student", "teacher"} <= {*table.columns}
    assert len(pandas.json_normalize(results, ["ladder", "rungs"])) == 3
    assert len(pandas.json_normalize(results, "training")) == len(results["training"])

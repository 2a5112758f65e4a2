"""Measurements of trainings for the tools that people keep them in: a CSV file, Weights & Biases, MLflow, or a function of one's own.

TensorBoard's log needs none of this: every distillation writes one beside its checkpoint.
"""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.progress import Tracker, counter, measurements, tracked

Kind = Literal["csv", "wandb", "mlflow"]
CSV_FILE = "progress.csv"
COLUMNS = ("time", "stage", "step", "name", "value")


@contextmanager
def tracking(to: Kind | Tracker | None, folder: Path, name: str) -> Iterator[None]:
    """Give the measurements of every stage within the block to a tool, or to a function ``to(stage, row)``.

    ``name`` is what the tool calls the run. A CSV file lies in ``folder``; a run that goes on adds to it.

    >>> seen = []
    >>> from sortrl.core.progress import stage
    >>> with tracking(lambda title, row: seen.append((title, row["loss"])), Path("."), "mine"):
    ...     with stage("Training", quiet=True) as report:
    ...         report({"step": 1, "total": 2, "loss": 0.5})
    >>> seen
    [('Training', 0.5)]
    """
    if to is None:
        yield
    elif callable(to):
        with tracked(to):
            yield
    elif to in _OPENED:
        with _OPENED[to](folder, name) as tracker, tracked(tracker):
            yield
    else:
        raise SortRLError(f"track is {to!r}, expected {', '.join(_OPENED)} or a function of a stage and a row.")


@contextmanager
def _csv(folder: Path, name: str) -> Iterator[Tracker]:
    """One line per number, so that stages with different measurements share a file."""
    path = folder / CSV_FILE
    folder.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(COLUMNS)

        def track(stage: str, row: dict[str, Any]) -> None:
            now = round(time.time(), 3)
            writer.writerows((now, stage, counter(row), key, value) for key, value in measurements(row).items())
            file.flush()

        yield track


@contextmanager
def _wandb(folder: Path, name: str) -> Iterator[Tracker]:
    run = _module("wandb", "wandb").init(project="sortrl", name=name)
    known: set[str] = set()

    def track(stage: str, row: dict[str, Any]) -> None:
        if stage not in known:  # each stage counts its own steps
            known.add(stage)
            run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        run.log({f"{stage}/{key}": value for key, value in {"step": counter(row), **measurements(row)}.items()})

    try:
        yield track
    finally:
        run.finish()


@contextmanager
def _mlflow(folder: Path, name: str) -> Iterator[Tracker]:
    mlflow = _module("mlflow", "mlflow")
    with mlflow.start_run(run_name=name):
        yield lambda stage, row: mlflow.log_metrics(
            {f"{stage}/{key}": value for key, value in measurements(row).items()}, step=counter(row)
        )


_OPENED: dict[str, Callable[[Path, str], Any]] = {"csv": _csv, "wandb": _wandb, "mlflow": _mlflow}


def _module(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(f"--track {name} needs a package: pip install {package}") from error

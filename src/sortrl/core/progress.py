"""Progress of long work: one bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.progress

Progress = Callable[[dict[str, Any]], None]  # receives rows with a counter, ``total`` and measurements
Tracker = Callable[[str, dict[str, Any]], None]  # receives the title of a stage and a row: sortrl.core.tracking
SECONDS_BETWEEN_LINES = 10.0
_showing = ContextVar("showing", default=False)  # a part of a stage is not shown besides the whole
_trackers: ContextVar[tuple[Tracker, ...]] = ContextVar("trackers", default=())
_COUNTERS = ("step", "episodes", "states")


def describe_row(row: dict[str, Any]) -> str:
    """The measurements of a progress report, without the counter.

    >>> describe_row({"step": 3, "total": 9, "loss": 0.51234, "p": 1e9})
    'loss 0.512  p inf'
    """
    shown = {
        k: ("inf" if k == "p" and v >= 1e9 else f"{v:.3g}")
        for k, v in measurements(row).items()
        if k != "cross_entropy"
    }
    return "  ".join(f"{name} {value}" for name, value in shown.items())


def measurements(row: dict[str, Any]) -> dict[str, int | float]:
    """The numbers of a progress report that were measured.

    >>> measurements({"step": 3, "total": 9, "seconds_left": 1.0, "loss": 0.5, "note": "warm-up"})
    {'loss': 0.5}
    """
    hidden = {*_COUNTERS, "total", "seconds_left"}
    return {name: value for name, value in row.items() if name not in hidden and isinstance(value, (int, float))}


@contextmanager
def tracked(tracker: Tracker) -> Iterator[None]:
    """Give the tracker every row of the stages within the block, shown or not."""
    token = _trackers.set((*_trackers.get(), tracker))
    try:
        yield
    finally:
        _trackers.reset(token)


@contextmanager
def stage(title: str, quiet: bool = False) -> Iterator[Progress]:
    """Report one stage of work. The body receives a callable that takes rows with a counter and ``total``."""
    trackers = () if _showing.get() else _trackers.get()
    with _on_screen(title, quiet) as report:

        def everywhere(row: dict[str, Any]) -> None:
            report(row)
            for tracker in trackers:
                tracker(title, row)

        yield everywhere if trackers else report


@contextmanager
def _on_screen(title: str, quiet: bool) -> Iterator[Progress]:
    if quiet or _showing.get():
        yield lambda row: None
        return
    token = _showing.set(True)
    try:
        with _shown(title) as report:
            yield report
    finally:
        _showing.reset(token)


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """:func:`stage` for what Python calls directly: a bar on a terminal, and nothing elsewhere."""
    with stage(title, quiet=not sys.stderr.isatty()) as report:
        yield report


@contextmanager
def _shown(title: str) -> Iterator[Progress]:
    if sys.stderr.isatty():
        with _bar() as progress:
            task = progress.add_task(title, total=None, detail="")

            def on_terminal(row: dict[str, Any]) -> None:
                progress.update(task, completed=counter(row), total=row.get("total"), detail=describe_row(row))

            yield on_terminal
        return
    started = last = time.monotonic()
    print(f"{title} ...", file=sys.stderr, flush=True)

    def in_lines(row: dict[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES:
            last = now
            print(f"  {counter(row)}/{row.get('total', '?')}  {describe_row(row)}", file=sys.stderr, flush=True)

    yield in_lines
    print(f"{title}: done in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)


def counter(row: dict[str, Any]) -> int:
    """How far the work was."""
    return next((int(row[name]) for name in _COUNTERS if name in row), 0)


def _bar() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=Console(stderr=True),
    )

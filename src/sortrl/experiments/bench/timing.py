"""Timing that treats all contenders alike: they take turns, so that noise hits all of them; the best time counts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOW_S = 0.25  # a call this long needs no warm-up of its own ...
SLOW_REPEATS = 3  # ... and is timed this often at most
ENDLESS_S = 2.0  # a call this long is timed once
TURNS_S = 1.5  # a contender whose turns took this long together gets no more than SLOW_REPEATS
SHORT_S = 0.01  # shorter calls are timed several in a row
PAUSE_S = 0.02  # idle worker threads of one contender may spin this long; they must not disturb the next
TOLERANCE = 1e-3  # results may differ this much, relative to the largest entry, before a note says so
TIED = 1e-4  # the share of entries that may differ more


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Contender:
    """One way to compute the result. ``before`` restores whatever ``call`` changes, and is not timed; nor is the first call of
    what has to be ``compiled`` first."""

    call: Callable[[], Tensor]
    before: Callable[[], None] = _nothing
    compiled: bool = False


@dataclass
class Timing:
    """Best seconds per call (None where the contender failed), all of them, each contender's first result, what went wrong."""

    best_s: dict[str, float | None] = field(default_factory=dict)
    all_s: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def median_s(self) -> dict[str, float]:
        return {name: statistics.median(seconds) for name, seconds in self.all_s.items()}


def take_turns(
    ours: Contender, rivals: Mapping[str, Contender], repeats: int, each_turn: Callable[[], None] = _nothing
) -> Timing:
    """Best of ``repeats`` for each contender, under the name ``ours`` for the first. A failing rival gets a note."""
    timing = Timing()
    loops: dict[str, int] = {}
    spent: dict[str, float] = {}
    for turn in range(repeats):
        each_turn()
        for name, contender in {"ours": ours, **rivals}.items():
            best = timing.best_s.get(name, math.inf)
            if best is None or (best < math.inf and turn >= _most_turns(name, best, spent[name])):
                continue
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            try:
                if turn == 0:
                    seconds, loops[name] = _first_call(name, contender, timing)
                if turn > 0 or seconds < SLOW_S:  # a fast contender's first call is only its warm-up
                    seconds = _seconds(contender, loops[name], warm_up=turn > 0 and best < SLOW_S)
            except Exception as error:
                if name == "ours":
                    raise
                timing.best_s[name] = None
                timing.notes.append(
                    f"{name} failed: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
                )
                continue
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began
            timing.best_s[name] = min(best, seconds)
            timing.all_s.setdefault(name, []).append(seconds)
    return timing


def _most_turns(name: str, best_s: float, spent_s: float) -> float:
    if best_s > ENDLESS_S and name != "ours":  # a first call may have to import, or to start threads
        return 1
    return SLOW_REPEATS if best_s > SLOW_S or spent_s > TURNS_S else math.inf


def _first_call(name: str, contender: Contender, timing: Timing) -> tuple[float, int]:
    if contender.compiled:
        contender.call()
    contender.before()
    start = time.perf_counter()
    timing.first[name] = contender.call()
    seconds = time.perf_counter() - start
    return seconds, max(1, min(1000, math.ceil(SHORT_S / seconds)))


def _seconds(contender: Contender, loops: int, warm_up: bool) -> float:
    if warm_up:  # the other contenders have emptied the caches
        contender.before()
        contender.call()
    contender.before()
    start = time.perf_counter()
    for _ in range(loops):
        contender.call()
    return (time.perf_counter() - start) / loops


def disagreements(first: Mapping[str, Tensor]) -> dict[str, str]:
    """The rivals whose first result is not ours, and how it differs: their time is no time for this task.

    Equal distances may be ranked either way, which moves a few entries of a gradient: ``TIED`` of them may differ.
    """
    ours, found = first["ours"].double(), {}
    allowed = TOLERANCE * float(ours.abs().max())
    for name, result in first.items():
        infinite = float((~torch.isfinite(result)).double().mean())
        different = float(((result.double() - ours).abs() > allowed).double().mean())
        if infinite > 0:
            found[name] = f"{infinite:.0%} of its result is not finite (overflow); timed all the same"
        elif different > TIED:
            found[name] = f"{different:.2%} of its result differs from ours by over {TOLERANCE:g}; timed all the same"
    return found

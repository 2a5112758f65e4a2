"""Benchmarks: our operators against what torch offers and against what the machine can do at most, in one run.

>>> print(table({"cases": [{"op": "max_forward", "shape": [512, 640, 640], "p": None, "ours_s": 0.01,
...     "rivals": {"cdist": 0.38, "compile": None}, "limit_s": 0.008, "wrong": [], "notes": []}]}))
| op | batch x in x out | p | ours (ms) | speed-up | of limit |
|---|---|---|---|---|---|
| max_forward | 512 x 640 x 640 |  | 10 | 38x cdist, no compile | 80% |
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sortrl.core import files
from sortrl.core.errors import SortRLError
from sortrl.core.workers import cores
from sortrl.experiments.bench import games, growth, images, latency, operators, policies, spread, whole
from sortrl.experiments.bench.attacked import attacked_play
from sortrl.experiments.bench.figure import draw, draw_all
from sortrl.experiments.bench.images import ImageSize
from sortrl.experiments.bench.operators import Shape
from sortrl.experiments.bench.policies import Size
from sortrl.experiments.bench.timing import ENDLESS_S, SLOW_REPEATS, SLOW_S
from sortrl.ops import cpu

__all__ = ["draw", "draw_all", "run", "table", "write"]

SEED = 0
NAMES = {
    operators.LIMIT_MAX: "maximum",
    operators.LIMIT_POWER8: "p = 8",
    operators.LIMIT_POWER8_TRAIN: "p = 8, with gradients",
}
MIN_REPEATS = 5


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    main: Shape = (512, 640, 640)
    larger: tuple[Shape, ...] = ((512, 1280, 1280), (512, 7056, 1280))
    policy: Size = field(default_factory=Size)
    inference_batch: int = 64
    calls: int = 2000
    images: ImageSize = field(default_factory=ImageSize)
    attacked: Size = field(default_factory=lambda: Size(batch=8))
    games: int = 64
    pieces: int = 16
    scaling_middle: Shape = (512, 640, 640)
    scaling_sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    compiled: bool = True


QUICK = Plan(
    main=(16, 24, 20),
    larger=((8, 40, 40),),
    policy=Size(width=24, depth=3, batch=16),
    inference_batch=4,
    calls=20,
    images=ImageSize(
        side=12,
        width=16,
        batch=40,
        printed_width=24,
        printed_depth=3,
        printed_head=(8,),
        games=3,
        starts=20,
        fit_steps=10,
    ),
    attacked=Size(width=24, depth=3, batch=4),
    games=0,  # new processes alone would take seconds
    pieces=0,
    scaling_middle=(8, 16, 16),
    scaling_sizes=(16, 256),
    compiled=False,
)


def run(
    quick: bool = False,
    repeats: int = MIN_REPEATS,
    progress: Callable[[str], None] | None = None,
    whole_jobs: bool = False,
) -> dict[str, Any]:
    """Run everything with all cores; ``quick`` takes tiny sizes, whose figures say only that the benchmarks work. ``whole_jobs``
    adds `sortrl robustify CartPole-v1` and the demo, each a few minutes."""
    if repeats < MIN_REPEATS:
        raise SortRLError(f"bench: {repeats} repeats, expected at least {MIN_REPEATS}: the best of fewer is noise.")
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        tell = progress or (lambda _: None)
        results = _run(QUICK if quick else Plan(), quick, repeats, tell)
        for job in whole.JOBS if whole_jobs else ():
            results["cases"].append(whole.timed(job))
            tell(_line(results["cases"][-1]))
        return results
    finally:
        torch.set_num_threads(threads)


def _run(plan: Plan, quick: bool, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    rows: list[dict[str, Any]] = []
    limits, loops = operators.Limits(), []
    for case in operators.cases(plan.main, plan.larger, plan.compiled, generator):
        rows.append(operators.measure(case, repeats, limits))
        loops.append(case.limit)
        progress(_line(rows[-1]))
    for row, loop in zip(rows, loops, strict=True):
        limits.apply(row, loop)
    rows.append(policies.train_step(plan.policy, repeats))
    progress(_line(rows[-1]))
    rows.append(operators.measure(policies.inference(plan.policy, plan.inference_batch), repeats, limits))
    progress(_line(rows[-1]))
    for row in latency.decisions(plan.policy, plan.images, plan.calls, repeats):
        rows.append(row)
        progress(_line(row))
    for name, with_rival in (("train_step_images", True), ("train_step_printed", False)):
        rows.append(images.train_step(name, plan.images, repeats, limits, with_rival))
        progress(_line(rows[-1]))
    rows.append(images.distillation(plan.images, repeats))
    progress(_line(rows[-1]))
    for name in ("attacked_images", "ri_fgsm_multi"):
        rows.append(images.attacked(name, plan.images, repeats))
        progress(_line(rows[-1]))
    rows.append(attacked_play(plan.attacked, repeats))
    progress(_line(rows[-1]))
    for case_of in (games.random_play, games.teach_step) if plan.games else ():
        played = case_of(plan.games, cores(), repeats)
        if played is not None:
            rows.append(played)
            progress(_line(rows[-1]))
    if plan.pieces:
        rows.append(spread.shared_out(plan.pieces, cores(), repeats))
        progress(_line(rows[-1]))
    scaling = growth.scaling(plan.scaling_middle, plan.scaling_sizes, repeats, generator)
    progress("scaling measured")
    memory = growth.memory(plan.policy)
    progress("memory measured")
    slow = {"slow_s": SLOW_S, "slow_repeats": SLOW_REPEATS, "endless_s": ENDLESS_S}
    config = {"repeats": repeats, **slow, "seed": SEED, "quick": quick}
    return {
        "machine": machine(),
        "config": config,
        "limits": {
            "elements_per_s": {NAMES[loop]: rate for loop, rate in limits.rate.items()},
            "bytes_per_s": bandwidth(),
        },
        "cases": rows,
        "scaling": scaling,
        "memory": memory,
    }


def bandwidth() -> float:
    """Bytes per second that all cores together read and write, in a copy of what no cache holds."""
    source = torch.ones(1 << 25)
    target = torch.empty_like(source)
    seconds = min(_seconds_of(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.numel() * source.element_size() / seconds


def _seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    """The cases as a markdown table: our time, how many times faster than each rival, and the share of the limit."""
    lines = ["| op | batch x in x out | p | ours (ms) | speed-up | of limit |", "|---|---|---|---|---|---|"]
    for case in results["cases"]:
        shape = " x ".join(str(size) for size in case["shape"])
        p = "" if case["p"] is None else f"{case['p']:g}"
        limit = "" if case["limit_s"] is None else f"{case['limit_s'] / case['ours_s']:.0%}"
        lines.append(f"| {case['op']} | {shape} | {p} | {1e3 * case['ours_s']:.3g} | {_speed_ups(case)} | {limit} |")
    return "\n".join(lines)


def write(results: dict[str, Any], path: str | Path) -> None:
    """Write the results as strict JSON."""
    files.write_json(path, results)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    try:
        own = version("sortrl")
    except PackageNotFoundError:
        own = "not installed"
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "isa": cpu.select().isa,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sortrl": own,
    }


def _speed_ups(case: dict[str, Any]) -> str:
    ours: float = case["ours_s"]
    parts = []
    for name, seconds in case["rivals"].items():
        speed_up = f"no {name}" if seconds is None else f"{_two_digits(seconds / ours)}x {name}"
        parts.append(f"{speed_up} (wrong result)" if name in case["wrong"] else speed_up)
    return ", ".join(parts)


def _two_digits(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _line(case: dict[str, Any]) -> str:
    return f"{case['op']} {tuple(case['shape'])}: {1e3 * case['ours_s']:.3g} ms, {_speed_ups(case) or 'no rival'}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())

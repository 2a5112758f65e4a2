"""The cases about single operators: each is ours, its rivals, and the arithmetic limit it is held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sortrl import ops
from sortrl.experiments.bench import rivals
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import truncated_mix
from sortrl.ops import cpu

Shape = tuple[int, int, int]  # batch, in, out

BOX = 0.05  # half the side of the boxes whose range is measured
WINDOW_S, WINDOWS = 0.005, 10  # how long to run a register-only loop, and how often per turn
LIMIT_MAX, LIMIT_POWER8, LIMIT_POWER8_TRAIN = 0, 1, 2  # csrc/kernels.h


@dataclass(frozen=True)
class Case:
    """One row of the results."""

    op: str
    shape: Shape
    p: float | None
    ours: Callable[[], Tensor]
    rivals: dict[str, Callable[[], Tensor]]
    limit: int | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    """Rivals that are not run, and why."""


class Limits:
    """The machine's ceilings: the best rate of each register-only loop over a whole run.

    Short windows, and many: a window in which another program ran would lower the ceiling and flatter us.
    """

    def __init__(self) -> None:
        self.rate: dict[int, float] = {}  # elements per second

    def sample(self, limit: int | None) -> None:
        if limit is None or cpu.select().module is None:
            return
        rates = [cpu.limit(limit, torch.get_num_threads(), WINDOW_S) for _ in range(WINDOWS)]
        self.rate[limit] = max(*rates, self.rate.get(limit, 0.0))

    def apply(self, row: dict[str, Any], limit: int | None) -> None:
        """Fill in ``limit_s``; to be called when the run is over."""
        if limit is None:
            return
        if limit not in self.rate:
            row["notes"].append(f"no limit: {cpu.select().reason}")
            return
        row["limit_s"] = math.prod(row["shape"]) / self.rate[limit]
        if row["limit_s"] > row["ours_s"]:
            row["notes"].append("faster than the limit: the machine was too busy to measure it; run again")


def measure(case: Case, repeats: int, limits: Limits) -> dict[str, Any]:
    """Time a case; the register-only loop that is its limit takes turns with the contenders."""
    contenders = {name: Contender(call, compiled=name == "compile") for name, call in case.rivals.items()}
    timing = take_turns(Contender(case.ours), contenders, repeats, each_turn=lambda: limits.sample(case.limit))
    wrong = disagreements(timing.first)
    best = {**timing.best_s, **dict.fromkeys(case.skipped)}
    return {
        "op": case.op,
        "shape": list(case.shape),
        "p": case.p,
        "ours_s": best.pop("ours"),
        "median_s": timing.median_s["ours"],
        "rivals": best,
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": timing.notes + [f"{name}: {why}" for name, why in {**wrong, **case.skipped}.items()],
    }


def data(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x (batch, in), w (out, in) and a gradient (batch, out), all normal."""
    batch, fan_in, out = shape
    sizes = ((batch, fan_in), (out, fan_in), (batch, out))
    x, w, grad = (torch.randn(size, generator=generator) for size in sizes)
    return x, w, grad


def cases(main: Shape, larger: tuple[Shape, ...], compiled: bool, generator: torch.Generator) -> Iterator[Case]:
    """All operator cases: maxima at ``main`` and ``larger`` shapes, the others at ``main``."""
    for shape in (main, *larger):
        yield max_forward(shape, compiled, generator)
    yield max_bounds(main, compiled, generator)
    yield sort_forward(main, generator)
    for p in (8.0, 1024.0):
        yield lp_forward(main, p, compiled, generator)
    yield lp_train(main, 8.0, compiled, generator)
    yield sort_grad_x(main, generator)


def max_forward(shape: Shape, compiled: bool, generator: torch.Generator) -> Case:
    x, w, _ = data(shape, generator)
    others: dict[str, Callable[[], Tensor]] = {"cdist": lambda: torch.cdist(x, w, p=math.inf)}
    skipped = _add_compiled(others, rivals.broadcast_max, (x, w), compiled)
    return Case("max_forward", shape, None, lambda: ops.max_dist(x, w), others, LIMIT_MAX, skipped)


def max_bounds(shape: Shape, compiled: bool, generator: torch.Generator) -> Case:
    """The range over a box, as certificates by intervals need it. The limit is that of one point."""
    x, w, _ = data(shape, generator)
    lo, hi = x - BOX, x + BOX
    others: dict[str, Callable[[], Tensor]] = {}
    skipped = _add_compiled(others, lambda x, w: rivals.broadcast_bounds(x - BOX, x + BOX, w), (x, w), compiled)
    others["reference"] = lambda: torch.cat(_reference_bounds(lo, hi, w), 1)
    return Case("max_bounds", shape, None, lambda: torch.cat(ops.max_bounds(lo, hi, w), 1), others, LIMIT_MAX, skipped)


def _reference_bounds(lo: Tensor, hi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with ops.use_backend("reference"):
        return ops.max_bounds(lo, hi, w)


def sort_forward(shape: Shape, generator: torch.Generator) -> Case:
    (x, w, _), mix = data(shape, generator), _mix(shape)
    others: dict[str, Callable[[], Tensor]] = {
        "sort": lambda: rivals.in_slices(lambda part: rivals.by_sort(part, w, mix), x, w),
        "topk": lambda: rivals.in_slices(lambda part: rivals.by_topk(part, w, mix), x, w),
    }
    return Case("sort_forward", shape, None, lambda: ops.sort_dist(x, w, mix), others, LIMIT_MAX)


def lp_forward(shape: Shape, p: float, compiled: bool, generator: torch.Generator) -> Case:
    x, w, _ = data(shape, generator)
    others: dict[str, Callable[[], Tensor]] = {
        "cdist": lambda: torch.cdist(x, w, p=p),
        "broadcast": lambda: rivals.in_slices(lambda part: rivals.broadcast_lp(part, w, p), x, w),
    }
    skipped = _add_compiled(others, lambda x, w: rivals.broadcast_lp(x, w, p), (x, w), compiled)
    limit = LIMIT_POWER8 if p == 8 else None
    return Case("lp_forward", shape, p, lambda: ops.lp_dist(x, w, p), others, limit, skipped)


def lp_train(shape: Shape, p: float, compiled: bool, generator: torch.Generator) -> Case:
    """Forward, and backward to both arguments."""
    x, w, grad = data(shape, generator)
    x.requires_grad_()
    w.requires_grad_()

    def train(y: Tensor) -> Tensor:
        return torch.cat(torch.autograd.grad(y, (x, w), grad))

    others: dict[str, Callable[[], Tensor]] = {"cdist": lambda: train(torch.cdist(x, w, p=p))}
    skipped = _add_compiled(others, lambda x, w: rivals.broadcast_lp(x, w, p), (x, w), compiled, train)
    limit = LIMIT_POWER8_TRAIN if p == 8 else None
    return Case("lp_train", shape, p, lambda: train(ops.lp_dist(x, w, p)), others, limit, skipped)


def sort_grad_x(shape: Shape, generator: torch.Generator) -> Case:
    """What a gradient attack needs: forward, and backward to x alone."""
    (x, w, grad), mix = data(shape, generator), _mix(shape)
    leaf = x.clone().requires_grad_()
    others: dict[str, Callable[[], Tensor]] = {
        "sort": lambda: rivals.grad_x_in_slices(lambda part: rivals.by_sort(part, w, mix), x, w, grad),
        "topk": lambda: rivals.grad_x_in_slices(lambda part: rivals.by_topk(part, w, mix), x, w, grad),
    }
    # The limit is the forward one: every difference must be looked at once.
    return Case(
        "sort_grad_x",
        shape,
        None,
        lambda: torch.autograd.grad(ops.sort_dist(leaf, w, mix), leaf, grad)[0],
        others,
        LIMIT_MAX,
    )


def _mix(shape: Shape) -> Tensor:
    return truncated_mix(0.3, shape[1])  # 12 weights for 12 or more inputs


def _add_compiled(
    others: dict[str, Callable[[], Tensor]],
    function: Callable[[Tensor, Tensor], Tensor],
    arguments: tuple[Tensor, Tensor],
    compiled: bool,
    then: Callable[[Tensor], Tensor] = lambda y: y,
) -> dict[str, str]:
    """Add the rival "compile": ``torch.compile`` of a broadcast formula, which fuses it and keeps no 3-d tensor."""
    if not compiled:
        return {"compile": "not run in quick mode"}
    fast = torch.compile(function, dynamic=False)
    others["compile"] = lambda: then(fast(*arguments))
    return {}

"""How time grows with each size of a problem, and how much memory a training step takes."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sortrl import ops
from sortrl.core.errors import SortRLError
from sortrl.experiments.bench import attacked, operators
from sortrl.experiments.bench.operators import Shape
from sortrl.experiments.bench.policies import ACTIONS, INPUTS, Size, Step, make_policy
from sortrl.experiments.bench.timing import Contender, take_turns
from sortrl.nets import SortPolicy
from sortrl.ops import MAX_TOP

PLAYS = (4, 8, 16, 32, 64)  # environments
AXES = ("batch", "in", "out")


def scaling(middle: Shape, sizes: tuple[int, ...], repeats: int, generator: torch.Generator) -> dict[str, Any]:
    """Seconds of three operators while one size at a time runs over ``sizes`` and the others stay at ``middle``; of a sort layer
    while K grows, of a policy while its depth does, and of a step under attack while the number of environments does.

    ``seconds_per_element`` is per unit of what grows. ``ratio`` is that cost at the largest size over that at the smallest: 1 is
    exactly linear.
    """
    build: dict[str, Callable[[Shape], operators.Case]] = {
        "max_forward": lambda shape: operators.max_forward(shape, False, generator),
        "lp_train": lambda shape: operators.lp_train(shape, 8.0, False, generator),
        "sort_forward": lambda shape: operators.sort_forward(shape, generator),
    }
    found = {
        op: {name: _along_axis(case, middle, axis, sizes, repeats) for axis, name in enumerate(AXES)}
        for op, case in build.items()
    }
    batch, fan_in, out = middle
    smallest = sizes[0]
    x, w, _ = operators.data((max(1, batch // 4), max(2 * MAX_TOP, fan_in), out), generator)

    def sorted_to(top: int) -> Callable[[], Tensor]:
        mix = torch.full((top,), 1.0 / top)
        return lambda: ops.sort_dist(x, w, mix)

    def deep(depth: int) -> Callable[[], Tensor]:
        policy = make_policy(Size(width=min(128, smallest), depth=depth)).eval().requires_grad_(False)
        unit = policy.normalize(torch.zeros(batch, INPUTS))
        return lambda: policy.scores(unit)

    tops, depths, plays = (
        (2, 4, 8, 16, 32),
        (2, 4, 8, 16, 32),
        [attacked.AttackedPlay(_player(), n, "auto") for n in PLAYS],
    )
    found["sort_forward"]["K"] = _along(
        [[len(x), len(w), top] for top in tops], list(tops), [sorted_to(top) for top in tops], repeats
    )
    found["policy"] = {
        "depth": _along([[batch, INPUTS, d] for d in depths], list(depths), [deep(d) for d in depths], repeats)
    }
    for play in plays:
        play.restore()
    try:
        found["attacked_play"] = {"environments": _along([[n, 4, 2] for n in PLAYS], list(PLAYS), list(plays), repeats)}
    finally:
        for play in plays:
            play.envs.close()
    return found


def _player() -> SortPolicy:
    return make_policy(Size(width=64, depth=3), inputs=4, actions=2).eval().requires_grad_(False)


def _along_axis(
    build: Callable[[Shape], operators.Case], middle: Shape, axis: int, sizes: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    shapes: list[Shape] = []
    for size in sizes:
        shape = list(middle)
        shape[axis] = size
        shapes.append((shape[0], shape[1], shape[2]))
    work = [math.prod(shape) for shape in shapes]
    return _along([list(shape) for shape in shapes], work, [build(shape).ours for shape in shapes], repeats)


def _along(
    shapes: list[list[int]], work: list[int], calls: Sequence[Callable[[], Tensor]], repeats: int
) -> dict[str, Any]:
    """Seconds of every call, and per unit of its work."""
    others = {str(number): Contender(call) for number, call in enumerate(calls[1:], 1)}
    timing = take_turns(Contender(calls[0]), others, repeats)
    if timing.notes:  # these are our own operators, which must not fail
        raise SortRLError(f"scaling: {timing.notes}")
    seconds = [value for value in timing.best_s.values() if value is not None]
    per_element = [value / one for value, one in zip(seconds, work, strict=True)]
    return {
        "shapes": shapes,
        "seconds": seconds,
        "seconds_per_element": per_element,
        "ratio": per_element[-1] / per_element[0],
    }


def memory(size: Size) -> dict[str, Any]:
    """What a training step adds to the peak resident memory, measured in a fresh process, against a bound."""
    program = f"from sortrl.experiments.bench.growth import report_memory; report_memory({size.width}, {size.depth}, {size.batch})"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if child.returncode != 0:
        raise SortRLError(f"memory: the measuring process failed. {child.stderr.strip().splitlines()[-1:]}")
    first, grown = json.loads(child.stdout.splitlines()[-1])
    policy = make_policy(size)
    parameters = 4 * sum(parameter.numel() for parameter in policy.parameters())
    activations = 4 * size.batch * (INPUTS + size.width * (size.depth - 1) + ACTIONS)
    bound = 3 * (parameters + activations)
    return {
        "width": size.width,
        "depth": size.depth,
        "batch": size.batch,
        "first_step_growth_bytes": first,
        "growth_bytes": grown,
        "parameter_bytes": parameters,
        "activation_bytes": activations,
        "bound_bytes": bound,
        "ratio_to_bound": grown / bound,
    }


def report_memory(width: int, depth: int, batch: int) -> None:
    """The child's part: print how far the peak has grown after one training step and after five, as JSON."""
    for p in (8.0, math.inf):  # imports, thread pools and the autograd engine are not the step's memory
        Step(make_policy(Size(16, 3, 8)), p, Size(16, 3, 8))()
    size = Size(width, depth, batch)
    step = Step(make_policy(size), 8.0, size)
    before = _resident_bytes()
    grown = []
    for _ in range(5):  # from the second on, AdamW's state is there while the activations are
        step()
        grown.append(max(0, _peak_bytes() - before))
    print(json.dumps([grown[0], grown[-1]]))


def _resident_bytes() -> int:
    """Resident memory now; the peak so far where the system does not tell. Forgets an earlier peak if it can."""
    with suppress(OSError):  # if not, the peak of the imports may count as the step's: too much, never too little
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS") or _peak_bytes()


def _peak_bytes() -> int:
    """Peak resident memory of this program. Linux hands ``ru_maxrss`` down from the parent, so it comes second."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)

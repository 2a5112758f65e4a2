"""The C++ kernels on CPU tensors: chooses the instruction set and makes room for the results.

All functions take contiguous float32 CPU tensors; masks are contiguous bool tensors or None. The kernels check shapes
and types themselves and raise :class:`SortRLError`.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from sortrl.core.errors import SortRLError

INSTRUCTION_SETS = ("avx512", "avx2", "baseline")


@dataclass(frozen=True)
class Selection:
    """Which kernel module serves, and why."""

    module: ModuleType | None
    isa: str | None
    reason: str


@cache
def select() -> Selection:
    """The best compiled kernels this processor supports; ``SORTRL_ISA`` overrides the choice."""
    try:
        baseline = importlib.import_module("sortrl.ops._kernels_baseline")
    except ImportError as error:
        return Selection(None, None, f"no compiled kernels ({error}); reinstall with a C++17 compiler to get them")
    supported: list[str] = baseline.cpu_supports()
    wanted = os.environ.get("SORTRL_ISA")
    if wanted is None:
        return Selection(_module(supported[0]), supported[0], "best that the processor supports")
    if wanted not in supported:
        raise SortRLError(
            f"SORTRL_ISA={wanted!r} is not supported here; choose one of {', '.join(supported)} or unset it."
        )
    return Selection(_module(wanted), wanted, "chosen by SORTRL_ISA")


def _module(isa: str) -> ModuleType:
    return importlib.import_module(f"sortrl.ops._kernels_{isa}")


def _kernels() -> ModuleType:
    module = select().module
    if module is None:
        raise SortRLError(f"The C++ kernels are not available: {select().reason}.")
    return module


def all_finite(tensor: Tensor) -> bool:
    result: bool = _kernels().all_finite(tensor)
    return result


def max_forward(x: Tensor, w: Tensor, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    y = _result(x, w, out_keep)
    _kernels().max_forward(x, w, in_keep, out_keep, torch.get_num_threads(), y)
    return y


def max_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:
    gx, gw = _gradients(x, w, need_x, need_w)
    _kernels().max_backward(x, w, in_keep, out_keep, torch.get_num_threads(), y, grad, gx, gw)
    return gx, gw


def lp_forward(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    y = _result(x, w, out_keep)
    _kernels().lp_forward(x, w, in_keep, out_keep, torch.get_num_threads(), p, y)
    return y


def lp_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    p: float,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:
    gx, gw = _gradients(x, w, need_x, need_w)
    _kernels().lp_backward(x, w, in_keep, out_keep, torch.get_num_threads(), p, y, grad, gx, gw)
    return gx, gw


def sort_forward(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    y = _result(x, w, None)
    _kernels().sort_forward(x, w, torch.get_num_threads(), mix, y)
    return y


def sort_backward(
    grad: Tensor, x: Tensor, w: Tensor, mix: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    gx, gw = _gradients(x, w, need_x, need_w)
    _kernels().sort_backward(x, w, torch.get_num_threads(), mix, grad, gx, gw)
    return gx, gw


def max_bounds(lo: Tensor, hi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y_lo, y_hi = _result(lo, w, None), _result(lo, w, None)
    _kernels().max_bounds(lo, hi, w, torch.get_num_threads(), y_lo, y_hi)
    return y_lo, y_hi


def max_reach(lo: Tensor, hi: Tensor, w: Tensor) -> Tensor:
    used = torch.empty(lo.shape[1], dtype=torch.bool)
    _kernels().max_reach(lo, hi, w, torch.get_num_threads(), max_bounds(lo, hi, w)[0], used)
    return used


def sort_bounds(lo: Tensor, hi: Tensor, w: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    y_lo, y_hi = _result(lo, w, None), _result(lo, w, None)
    _kernels().sort_bounds(lo, hi, w, torch.get_num_threads(), mix, y_lo, y_hi)
    return y_lo, y_hi


def limit(op: int, threads: int, seconds: float) -> float:
    """Elements per second of an operator's arithmetic on registers alone (see csrc/kernels.h for the numbers)."""
    rate: float = _kernels().limit(op, threads, seconds)
    return rate


def _result(x: Tensor, w: Tensor, out_keep: Tensor | None) -> Tensor:
    """Room for y; outputs that a mask drops are not written, so they must be 0 beforehand."""
    return x.new_empty(len(x), len(w)) if out_keep is None else x.new_zeros(len(x), len(w))


def _gradients(x: Tensor, w: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor | None, Tensor | None]:
    return torch.zeros_like(x) if need_x else None, torch.zeros_like(w) if need_w else None

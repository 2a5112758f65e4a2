"""Distance operators of sort networks: one public function each, with the fastest available implementation behind it.

===============  =====================================================  ==============================
function         ``y[b, k] =``                                          1-Lipschitz in l_inf
===============  =====================================================  ==============================
``max_dist``     ``max_i |x[b,i] - w[k,i]|``                             yes
``lp_dist``      ``(sum_i |x[b,i] - w[k,i]|^p)^(1/p)``                   no (in^(1/p)): for training only
``sort_dist``    ``sum_j mix[j] * (j-th largest of |x[b] - w[k]|)``      sum(mix), when mix >= 0
``max_bounds``   range of ``max_dist`` over a box                        --
``max_reach``    inputs that can be its maximum over a box               --
``sort_bounds``  range of ``sort_dist`` over a box                       --
===============  =====================================================  ==============================

The backend follows the tensors: ``cpu`` (C++ kernels) for float32 on the CPU, ``triton`` for float32 on a GPU,
``reference`` (plain torch) otherwise. :func:`backend_for` tells which and why; :func:`use_backend` overrides it.

>>> import torch
>>> x, w = torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 1.0], [0.0, -1.0]])
>>> max_dist(x, w)
tensor([[3., 2.]])
>>> sort_dist(x, w, torch.tensor([0.5, 0.5]))
tensor([[1.5000, 1.0000]])
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sortrl.core.errors import SortRLError
from sortrl.ops import cpu, reference
from sortrl.ops.backend import BACKENDS, backend_for, use_backend
from sortrl.ops.dispatch import lp_dist_op, max_dist_op, sort_dist_op

__all__ = [
    "BACKENDS",
    "backend_for",
    "lp_dist",
    "max_bounds",
    "max_dist",
    "max_reach",
    "sort_bounds",
    "sort_dist",
    "use_backend",
]

MAX_TOP = 32  # the longest mix the kernels take; longer ones go to the reference


def max_dist(x: Tensor, w: Tensor, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
    """``y[b, k] = max_i |x[b, i] - w[k, i]|``; gradient to the first arg-max. Masks as in :mod:`sortrl.ops.reference`."""
    _check_pair("max_dist", x, w)
    _check_masks("max_dist", x, w, in_keep, out_keep)
    if backend_for(x)[0] == "reference":
        return _in_slices(lambda rows, i, o: reference.max_dist(rows, w, i, o), x, w, in_keep, out_keep)
    return _plain(max_dist_op, x, w)(x.contiguous(), w.contiguous(), in_keep, out_keep)


def lp_dist(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
    """``y[b, k] = (sum_i |x[b, i] - w[k, i]|^p)^(1/p)`` for p in [2, inf]; p = inf is :func:`max_dist`.

    Exponents 2^s and 3 * 2^s (8, 12, 16, 24, ... 1024) take multiplications only and are the fastest.
    """
    if not p >= 2:
        raise SortRLError(f"lp_dist: p is {p}, expected a number in [2, inf].")
    if math.isinf(p):
        return max_dist(x, w, in_keep, out_keep)
    _check_pair("lp_dist", x, w)
    _check_masks("lp_dist", x, w, in_keep, out_keep)
    if backend_for(x)[0] == "reference":
        return _in_slices(lambda rows, i, o: reference.lp_dist(rows, w, p, i, o), x, w, in_keep, out_keep)
    return _plain(lp_dist_op, x, w)(x.contiguous(), w.contiguous(), float(p), in_keep, out_keep)


def sort_dist(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """``y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - w[k]|)`` over the ``len(mix)`` largest distances."""
    _check_pair("sort_dist", x, w)
    _check_mix("sort_dist", x, mix)
    if backend_for(x)[0] == "reference" or len(mix) > MAX_TOP:
        return _in_slices(lambda rows, i, o: reference.sort_dist(rows, w, mix), x, w, None, None)
    return _plain(sort_dist_op, x, w)(x.contiguous(), w.contiguous(), mix.to(torch.float32).contiguous())


def max_bounds(lo: Tensor, hi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The exact range of ``max_dist(x, w)`` for x between ``lo`` and ``hi`` (no gradient on the kernel path)."""
    _check_box("max_bounds", lo, hi, w)
    if _bounded_by_kernels(lo, hi):
        return cpu.max_bounds(lo.contiguous(), hi.contiguous(), w.detach().contiguous())
    return _box_in_slices(lambda a, b: reference.max_bounds(a, b, w), lo, hi, w)


def max_reach(lo: Tensor, hi: Tensor, w: Tensor) -> Tensor:
    """Which inputs (in,) can be the maximum of some row and unit of ``max_dist(x, w)`` for x between ``lo`` and ``hi``.

    Without the others ``max_dist`` and its gradient are the same within the box, to the bit.

    >>> x, w = torch.tensor([[0.0, 1.0, 0.1]]), torch.tensor([[3.0, 1.0, 2.9], [0.0, -1.0, 0.0]])
    >>> max_reach(x - 0.2, x + 0.2, w)
    tensor([True, True, True])
    >>> max_reach(x - 0.05, x + 0.05, w)
    tensor([ True,  True, False])
    """
    _check_box("max_reach", lo, hi, w)
    if backend_for(lo)[0] == "cpu":
        return cpu.max_reach(lo.detach().contiguous(), hi.detach().contiguous(), w.detach().contiguous())
    rows = _slice_rows(w)
    parts = zip(torch.split(lo, rows), torch.split(hi, rows), strict=True)
    used = torch.zeros(lo.shape[1], dtype=torch.bool, device=lo.device)
    for low, high in parts:
        used |= reference.max_reach(low, high, w)
    return used


def sort_bounds(lo: Tensor, hi: Tensor, w: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """The exact range of ``sort_dist(x, w, mix)`` (mix >= 0) for x between ``lo`` and ``hi``."""
    _check_box("sort_bounds", lo, hi, w)
    _check_mix("sort_bounds", lo, mix)
    if _bounded_by_kernels(lo, hi) and len(mix) <= MAX_TOP:
        return cpu.sort_bounds(
            lo.contiguous(), hi.contiguous(), w.detach().contiguous(), mix.to(torch.float32).contiguous()
        )
    return _box_in_slices(lambda a, b: reference.sort_bounds(a, b, w, mix), lo, hi, w)


def _bounded_by_kernels(lo: Tensor, hi: Tensor) -> bool:
    recording = torch.is_grad_enabled() and (lo.requires_grad or hi.requires_grad)
    return backend_for(lo)[0] == "cpu" and not recording


def _box_in_slices(
    bounds: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], lo: Tensor, hi: Tensor, w: Tensor
) -> tuple[Tensor, Tensor]:
    rows = _slice_rows(w)
    parts = [bounds(a, b) for a, b in zip(torch.split(lo, rows), torch.split(hi, rows), strict=True)]
    return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])


def _plain(op: Any, x: Tensor, w: Tensor) -> Callable[..., Tensor]:
    """The bare function behind an operator where nobody differentiates or traces: a batch of one is then 10x faster."""
    recording = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    chosen: Callable[..., Tensor] = op if recording or torch.compiler.is_compiling() else op._init_fn
    return chosen


def _slice_rows(w: Tensor, budget: int = 1 << 24) -> int:
    """Rows of x for which the reference's (rows, out, in) tensor stays within ``budget`` elements."""
    return max(1, budget // max(1, w.numel()))


def _in_slices(
    function: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    x: Tensor,
    w: Tensor,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
) -> Tensor:
    """Run a reference operator a few rows at a time, recomputing in backward: no batch x out x in tensor is ever kept."""
    rows = _slice_rows(w)
    if len(x) <= rows:
        return function(x, in_keep, out_keep)
    # One mask row per sample: slices then need not respect chunk borders.
    masks = [None if keep is None else reference.expand_chunks(keep, len(x)) for keep in (in_keep, out_keep)]
    parts = []
    for start in range(0, len(x), rows):
        cut = [None if mask is None else mask[start : start + rows] for mask in masks]
        parts.append(checkpoint(function, x[start : start + rows], *cut, use_reentrant=False))
    return torch.cat(parts)


def _check_pair(name: str, x: Tensor, w: Tensor) -> None:
    if x.ndim != 2 or w.ndim != 2:
        raise SortRLError(
            f"{name}: x has shape {tuple(x.shape)} and w {tuple(w.shape)}, expected (batch, in) and (out, in)."
        )
    if x.shape[1] != w.shape[1] or x.shape[1] == 0 or w.shape[0] == 0:
        raise SortRLError(
            f"{name}: x has {x.shape[1]} inputs and w has shape {tuple(w.shape)}, expected (out, {x.shape[1]}), both at least 1."
        )
    if x.dtype != w.dtype or x.dtype not in (torch.float32, torch.float64):
        raise SortRLError(
            f"{name}: x is {x.dtype} and w is {w.dtype}, expected both float32 or both float64. Convert with .float()."
        )
    if x.device != w.device:
        raise SortRLError(f"{name}: x is on {x.device} and w on {w.device}; move one with .to().")


def _check_box(name: str, lo: Tensor, hi: Tensor, w: Tensor) -> None:
    _check_pair(name, lo, w)
    if lo.shape != hi.shape:
        raise SortRLError(f"{name}: lo has shape {tuple(lo.shape)} and hi {tuple(hi.shape)}; a box needs equal shapes.")
    if not torch.compiler.is_compiling() and bool((lo > hi).any()):
        raise SortRLError(f"{name}: lo exceeds hi somewhere; swap them or check how the box was built.")


def _check_mix(name: str, x: Tensor, mix: Tensor) -> None:
    if mix.ndim != 1 or not 1 <= len(mix) <= x.shape[1]:
        raise SortRLError(
            f"{name}: mix has shape {tuple(mix.shape)}, expected (K,) with K between 1 and the {x.shape[1]} inputs."
        )
    if mix.device != x.device:
        raise SortRLError(f"{name}: mix is on {mix.device} and x on {x.device}; move one with .to().")


def _check_masks(name: str, x: Tensor, w: Tensor, in_keep: Tensor | None, out_keep: Tensor | None) -> None:
    for label, mask, n in (("in_keep", in_keep, x.shape[1]), ("out_keep", out_keep, w.shape[0])):
        if mask is not None and (mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[1] != n or len(mask) == 0):
            raise SortRLError(
                f"{name}: {label} is {mask.dtype} of shape {tuple(mask.shape)}, expected bool of shape (chunks, {n})."
            )
        if mask is not None and not mask.is_contiguous():
            raise SortRLError(f"{name}: {label} is not contiguous; call .contiguous().")
    if in_keep is not None and out_keep is not None and len(in_keep) != len(out_keep):
        raise SortRLError(
            f"{name}: in_keep has {len(in_keep)} chunks and out_keep {len(out_keep)}; they must be equal."
        )
    if in_keep is not None and not torch.compiler.is_compiling() and not bool(in_keep.any(1).all()):
        raise SortRLError(
            f"{name}: a chunk of in_keep keeps no input; the maximum of nothing is undefined. Keep at least one."
        )

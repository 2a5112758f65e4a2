"""The definition of every operator, in plain torch. A kernel is only a faster way to say the same thing.

Shapes: ``x`` is (batch, in), ``w`` is (out, in), results are (batch, out). The functions build a (batch, out, in)
tensor and are differentiable through autograd, in float32 and float64: made to be read and tested against.

``in_keep`` (chunks, in) and ``out_keep`` (chunks, out) are boolean masks for training. The batch is cut into equal
consecutive chunks; within a chunk only the kept inputs take part and only the kept outputs are computed (the others
are 0 and pass no gradient).
"""

from __future__ import annotations

import torch
from torch import Tensor


def differences(x: Tensor, w: Tensor) -> Tensor:
    """``t[b, k, i] = x[b, i] - w[k, i]``."""
    return x[:, None, :] - w[None, :, :]


def expand_chunks(keep: Tensor, batch: int) -> Tensor:
    """Repeat each row of a (chunks, n) mask so that it covers the batch: (batch, n). The last chunk may be shorter."""
    rows = -(-batch // keep.shape[0])
    return keep.repeat_interleave(rows, dim=0)[:batch]


def max_dist(x: Tensor, w: Tensor, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
    """``y[b, k] = max_i |x[b, i] - w[k, i]|``; the gradient goes to the first arg-max."""
    t = differences(x, w)
    distance = t.abs()
    if in_keep is not None:
        distance = distance.masked_fill(~expand_chunks(in_keep, len(x))[:, None, :], -1.0)
    # argmax + gather rather than amax: amax shares the gradient among ties, and a maximum has one witness.
    y = distance.gather(2, distance.argmax(2, keepdim=True)).squeeze(2)
    return y if out_keep is None else y * expand_chunks(out_keep, len(x))


def lp_dist(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
    """``y[b, k] = (sum_i |x[b, i] - w[k, i]|^p)^(1/p)``, normalised by the maximum so that no p overflows."""
    distance = differences(x, w).abs()
    if in_keep is not None:
        distance = distance * expand_chunks(in_keep, len(x))[:, None, :]
    largest = distance.detach().amax(2)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    total = (distance / safe[:, :, None]).pow(p).sum(2)
    y = torch.where(largest > 0, safe * torch.where(largest > 0, total, torch.ones_like(total)).pow(1.0 / p), 0.0)
    return y if out_keep is None else y * expand_chunks(out_keep, len(x))


def sort_dist(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """``y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - w[k]|)`` over the ``len(mix)`` largest; ties go to the lower index."""
    distance = differences(x, w).abs()
    order = distance.sort(dim=2, descending=True, stable=True).indices[..., : len(mix)]
    return distance.gather(2, order) @ mix.to(distance.dtype)


def distance_box(lo: Tensor, hi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ``|x - w|`` for x in the box [lo, hi]: the nearest and the farthest point of each interval."""
    below, above = differences(lo, w), differences(hi, w)
    nearest = torch.clamp(torch.maximum(below, -above), min=0.0)
    farthest = torch.maximum(below.abs(), above.abs())
    return nearest, farthest


def max_bounds(lo: Tensor, hi: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Exact range of :func:`max_dist` over the box: every coordinate reaches its own bound independently."""
    nearest, farthest = distance_box(lo, hi, w)
    return nearest.amax(2), farthest.amax(2)


def max_reach(lo: Tensor, hi: Tensor, w: Tensor) -> Tensor:
    """Which inputs (in,) can be the maximum of some row and output of :func:`max_dist` while x is in the box."""
    nearest, farthest = distance_box(lo, hi, w)
    return (farthest >= nearest.amax(2, keepdim=True)).flatten(0, 1).any(0)


def sort_bounds(lo: Tensor, hi: Tensor, w: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Exact range of :func:`sort_dist` over the box: the layer is monotone in every ``|x_i - w_i|``."""
    nearest, farthest = distance_box(lo, hi, w)
    weights = mix.to(w.dtype)
    top = len(mix)
    return (
        nearest.sort(dim=2, descending=True).values[..., :top] @ weights,
        farthest.sort(dim=2, descending=True).values[..., :top] @ weights,
    )

"""The operators as a torch user would write them without sortrl: what the benchmarks compare with."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sortrl.nets import SortPolicy

SLICE_BYTES = 1 << 27  # of one (rows, out, in) tensor: with a sort's indices and gradients, memory stays below 2 GB


def in_slices(function: Callable[[Tensor], Tensor], x: Tensor, w: Tensor) -> Tensor:
    """``function`` on a few rows of x at a time, over the whole batch."""
    rows = max(1, SLICE_BYTES // (4 * w.numel()))
    return torch.cat([function(part) for part in torch.split(x, rows)])


def broadcast_max(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None, :] - w).abs().amax(2)


def broadcast_bounds(lo: Tensor, hi: Tensor, w: Tensor) -> Tensor:
    """Least and greatest ``broadcast_max(x, w)`` for x between ``lo`` and ``hi``, side by side."""
    below, above = lo[:, None, :] - w, hi[:, None, :] - w
    nearest = torch.maximum(below, -above).amax(2).clamp(min=0.0)
    return torch.cat([nearest, torch.maximum(below.abs(), above.abs()).amax(2)], 1)


def broadcast_lp(x: Tensor, w: Tensor, p: float) -> Tensor:
    """The textbook formula; p beyond 16 needs the division by the maximum, or float32 overflows."""
    distance = (x[:, None, :] - w).abs()
    if p <= 16:
        return distance.pow(p).sum(2).pow(1.0 / p)
    largest = distance.amax(2).detach()
    return largest * (distance / largest[:, :, None]).pow(p).sum(2).pow(1.0 / p)


def by_sort(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    return (x[:, None, :] - w).abs().sort(dim=2, descending=True).values[..., : len(mix)] @ mix


def by_topk(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    return (x[:, None, :] - w).abs().topk(len(mix), dim=2).values @ mix


def grad_x_in_slices(function: Callable[[Tensor], Tensor], x: Tensor, w: Tensor, grad: Tensor) -> Tensor:
    """The gradient of ``(function(x) * grad).sum()`` with respect to x, a few rows at a time."""
    rows = max(1, SLICE_BYTES // (4 * w.numel()))
    parts = []
    for part, seed in zip(torch.split(x.detach(), rows), torch.split(grad, rows), strict=True):
        leaf = part.clone().requires_grad_()
        parts.append(torch.autograd.grad(function(leaf), leaf, seed)[0])
    return torch.cat(parts)


def masked_cdist(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    """``torch.cdist`` on what the masks keep: inputs and units gathered chunk by chunk, zero for the others."""
    if in_keep is None and out_keep is None:
        return torch.cdist(x, w, p=p)
    chunks = len(in_keep) if in_keep is not None else len(out_keep) if out_keep is not None else 1
    parts = []
    for chunk, rows in enumerate(torch.split(x, math.ceil(len(x) / chunks))):
        units = w
        if out_keep is not None:
            kept = out_keep[chunk].nonzero().squeeze(1)
            units = units[kept]
        if in_keep is not None:
            inputs = in_keep[chunk].nonzero().squeeze(1)
            rows, units = rows[:, inputs], units[:, inputs]
        y = torch.cdist(rows, units, p=p)
        parts.append(y if out_keep is None else y.new_zeros(len(rows), len(w)).index_copy(1, kept, y))
    return torch.cat(parts)


class CdistPolicy(nn.Module):
    """A :class:`SortPolicy` in training with ``torch.cdist`` in place of our operator; all else is the same.

    >>> policy = SortPolicy((3,), 2, width=8, depth=3)
    >>> unit, seed = torch.randn(4, 3), torch.Generator().manual_seed
    >>> same = CdistPolicy(policy).training_scores(unit, seed(0)), policy.training_scores(unit, seed(0))
    >>> torch.allclose(*same, atol=1e-3)
    True
    """

    def __init__(self, policy: SortPolicy) -> None:
        super().__init__()
        self.policy = policy

    @property
    def p(self) -> Tensor:
        return self.policy.p

    @property
    def mu(self) -> nn.Parameter:
        return self.policy.mu

    def training_scores(self, unit: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """As :meth:`SortPolicy.training_scores`, drawing the same masks from ``generator``."""
        policy, p = self.policy, float(self.p)
        x, keep = policy.front(unit).flatten(1), None
        for index, layer in enumerate(policy.layers[:-1]):
            next_keep = policy._draw_mask(len(x), policy.layers[index + 1], generator)
            y = masked_cdist(x, layer.weight, p, keep, next_keep)
            x = policy.shifts[index].centre(y, next_keep)
            keep = next_keep
        last = masked_cdist(x, policy.layers[-1].weight, p, keep, None)
        return -(last + policy.bias)

"""Layer norm with a weight per channel, and bounds on what it can make of a box of inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-5  # keeps the deviation of a constant picture from being divided by
_DOUBLE = 2.0**-50  # rounding in float64, at most, per term of a sum: eight times what it is


class Norm(nn.Module):
    """(batch, channels, ...) -> the same shape: less the mean of all its numbers, divided by their deviation, times a weight
    and plus a bias for every channel.

    >>> norm = Norm(3)
    >>> [round(x, 2) for x in norm(torch.tensor([[1.0, 2.0, 3.0]]))[0].tolist()]
    [-1.22, 0.0, 1.22]
    >>> lo, hi = norm.bounds(torch.tensor([[1.0, 2.0, 3.0]]), torch.full((1, 3), 0.1), careful=False)
    >>> bool((lo < norm(torch.tensor([[1.1, 1.9, 3.0]]))).all())
    True
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """In float64 by two passes, whose rounding is easy to bound."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        if x.dtype != torch.float64:
            return functional.group_norm(x, 1, weight, bias, EPS)
        over = tuple(range(1, x.ndim))
        centred = x - x.mean(over, keepdim=True)
        normal = centred / (centred.square().mean(over, keepdim=True) + EPS).sqrt()
        return normal * _per_channel(weight, x) + _per_channel(bias, x)

    def bounds(self, centre: Tensor, radius: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
        """What every number can become while the inputs are within ``radius`` of ``centre``.

        Taking the mean away is a projection. So numbers that move by at most ``radius`` change the deviation by at most its root
        mean square, and each centred number by its own radius and the mean one. ``careful`` adds whatever rounding could.
        """
        over, n = tuple(range(1, centre.ndim)), centre[0].numel()
        if careful:
            size = centre.abs() + radius
            radius = radius + 2 * (n + 8) * _DOUBLE * (size + size.mean(over, keepdim=True))
        centred = centre - centre.mean(over, keepdim=True)
        reach = radius + radius.mean(over, keepdim=True)
        deviation, change = (part.square().mean(over, keepdim=True).sqrt() for part in (centred, radius))
        if careful:
            change = change + 2 * (n + 8) * _DOUBLE * (deviation + change)
        least = ((deviation - change).clamp(min=0.0).square() + EPS).sqrt()
        most = ((deviation + change).square() + EPS).sqrt()
        lo, hi = centred - reach, centred + reach
        lo, hi = torch.where(lo < 0, lo / least, lo / most), torch.where(hi < 0, hi / most, hi / least)
        weight, bias = (_per_channel(part.to(centre.dtype), centre) for part in (self.weight, self.bias))
        a, b = weight * lo, weight * hi
        lo, hi = torch.minimum(a, b) + bias, torch.maximum(a, b) + bias
        if careful:
            lost = 4 * (n + 16) * _DOUBLE * (torch.maximum(a.abs(), b.abs()) + bias.abs())
            lo, hi = lo - lost, hi + lost
        return lo, hi


def _per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.reshape(-1, *[1] * (x.ndim - 2))

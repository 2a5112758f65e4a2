"""Ordinary layers, linear ones, convolutions and layer norm, and bounds on what they can make of a box of inputs: interval
propagation."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.core.errors import SortRLError
from sortrl.nets.layers import patch_conv, patch_grid

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


# Bounds are computed in float64. What they may lose by rounding is at most this many units per term of a sum.
_DOUBLE = 2.0**-50
_TINY = 2.0**-1000  # or this, where products are too small for float64
# Scores are handed out in float32: two of them lose at most this share of the larger one, or what is flushed to zero.
_SINGLE = 2.0**-22
_FLUSHED = 2.0**-123
_LARGEST_SCORE = 1e38  # beyond it float32 might overflow, and two infinities tie

Layer = nn.Linear | nn.Conv2d


class IntervalHead(nn.Module):
    """Convolutions, then linear layers, with ReLU (and, if ``norm``, layer norm before it) between all of them; and bounds on what
    they can make of a box of features.

    Args:
        features: how many, or channels, height and width where convolutions come first.
        hidden: widths between the linear layers.
        n_actions: scores.
        conv: (channels, kernel, stride) of each convolution.
        norm: normalise what every layer but the last gives, as learning action values without a target network needs.

    >>> head = IntervalHead(4, (8,), 3)
    >>> features, action = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> near, far = (head.leads_within(features, torch.tensor(r), action) for r in (0.0, 0.1))
    >>> near.shape, bool((far <= near).all())
    (torch.Size([5, 3]), True)
    """

    evaluated_in_double = True

    def __init__(
        self,
        features: int | tuple[int, int, int],
        hidden: tuple[int, ...],
        n_actions: int,
        conv: tuple[tuple[int, int, int], ...] = (),
        norm: bool = False,
    ) -> None:
        super().__init__()
        shape: tuple[int, ...] = (features,) if isinstance(features, int) else features
        if min(*shape, n_actions, *hidden, 1) < 1 or (conv and len(shape) != 3):
            raise SortRLError(
                f"IntervalHead: sizes are {(*shape, *hidden, n_actions)}, expected all at least 1, and an image before convolutions."
            )
        layers: list[Layer] = []
        for channels, kernel, stride in conv:
            grid = patch_grid("IntervalHead", (shape[0], shape[1], shape[2]), kernel, stride)
            layers.append(nn.Conv2d(shape[0], channels, kernel, stride))
            shape = (channels, *grid)
        layers += [nn.Linear(a, b) for a, b in pairwise((math.prod(shape), *hidden, n_actions))]
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList([Norm(len(layer.weight)) for layer in layers[:-1]] if norm else [])

    @property
    def lipschitz(self) -> float:
        """A bound on the l_inf constant: the product of the largest row sums. The certificate does not need it."""
        if self.norms:
            return math.inf  # a picture of next to no contrast is raised to one of ordinary contrast
        return math.prod(float(layer.weight.detach().abs().double().flatten(1).sum(1).max()) for layer in self._all())

    @property
    def is_linear(self) -> bool:
        """Whether there are no convolutions."""
        return all(isinstance(layer, nn.Linear) for layer in self.layers)

    def _all(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, (nn.Linear, nn.Conv2d))]

    def forward(self, features: Tensor) -> Tensor:
        """Scores (batch, n_actions), in the precision of the features."""
        x = features
        for index, layer in enumerate(self._all()):
            x = _apply(layer, x, *_parameters(layer, x.dtype))
            if index < len(self.layers) - 1:
                x = functional.relu(self.norms[index](x) if self.norms else x)
        return x

    @torch.no_grad()
    def same_leads(self, scores: Tensor, action: Tensor, largest: float, shape: tuple[int, ...]) -> Tensor:
        """What is certain (batch, n_actions) of the leads of ``action`` when the same features, of up to ``largest`` in absolute
        value and of this shape, are computed with again: sums may come out differently by their order.

        ``scores`` are float64. Much cheaper than a box of no size: the error is bounded once for all features. Not for layer
        norm, which enlarges errors by what depends on the features.
        """
        if self.norms:
            raise ValueError("same_leads: bound a box of no size (leads_over) instead.")
        size = torch.full((1, *shape), largest, dtype=torch.float64)
        error = torch.zeros_like(size)
        for layer in self._all():
            weight, bias = (part.abs() for part in _parameters(layer, torch.float64))
            size = _apply(layer, size, weight, bias)
            error = _apply(layer, error, weight) + (weight[0].numel() + 4) * (_DOUBLE * size + _TINY)
        largest_score = scores.abs().amax(1, keepdim=True)
        lost = 4.0 * float(error.max()) + _in_single(largest_score)
        return (scores.gather(1, action[:, None]) - scores - lost).scatter(1, action[:, None], math.inf)

    def leads_within(self, features: Tensor, half: Tensor, action: Tensor, careful: bool = False) -> Tensor:
        """Lower bounds (batch, n_actions) on how far ``action`` (batch,) leads each other action, its own entry infinite,
        while no feature moves by more than ``half``.

        ``half`` is (batch, 1) or a number. ``careful`` subtracts whatever rounding could have added; for float64 only.
        """
        first = self._all()[0]
        if len(self.layers) == 1 or isinstance(first, nn.Conv2d):
            return self._from(
                features, half.reshape(-1, *[1] * (features.ndim - 1)).expand_as(features), action, careful
            )
        weight, bias = _parameters(first, features.dtype)
        centre, radius = functional.linear(features, weight, bias), half * weight.abs().sum(1)
        if careful:
            radius = radius + _lost(first, features, half.expand_as(features), weight, bias)
        return self._after(centre, radius, action, careful)

    def leads_over(self, lo: Tensor, hi: Tensor, action: Tensor, careful: bool = False) -> Tensor:
        """The same for features between ``lo`` and ``hi`` (batch, features)."""
        return self._from(*_centred(lo, hi, careful), action, careful)

    def bounds_over(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds (batch, n_actions) on every score for features between ``lo`` and ``hi``; differentiable.

        Interval propagation as losses use it: rounding is not accounted for.
        """
        centre, radius = _centred(lo, hi, careful=False)
        for index, layer in enumerate(self._all()):
            if index:
                lo, hi = centre - radius, centre + radius
                if self.norms:
                    lo, hi = self.norms[index - 1].bounds(centre, radius, False)  # type: ignore[operator]
                centre, radius = _centred(functional.relu(lo), functional.relu(hi), careful=False)
            centre, radius = _interval(layer, centre, radius, careful=False)
        return centre - radius, centre + radius

    def _from(self, centre: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """From a box of features to the leads."""
        if len(self.layers) == 1:
            return self._leads(centre.flatten(1), radius.flatten(1), action, careful)
        return self._after(*_interval(self._all()[0], centre, radius, careful), action, careful)

    def _after(self, centre: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """From what the first layer gives, centre +- radius, to the leads."""
        for index, layer in enumerate(self._all()[1:], 1):
            lo, hi = centre - radius, centre + radius
            if self.norms:
                lo, hi = self.norms[index - 1].bounds(centre, radius, careful)  # type: ignore[operator]
            box = _centred(functional.relu(lo), functional.relu(hi), careful)
            if index < len(self.layers) - 1:
                centre, radius = _interval(layer, *box, careful)
        return self._leads(box[0].flatten(1), box[1].flatten(1), action, careful)

    def _leads(self, centre: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """The last layer in difference form: exact for the box of its inputs."""
        weight, bias = _parameters(self._all()[-1], centre.dtype)
        difference = weight[action][:, None, :] - weight  # (batch, n_actions, inputs)
        offset = bias[action][:, None] - bias
        lowest = torch.einsum("bji,bi->bj", difference, centre) + offset
        lowest = lowest - torch.einsum("bji,bi->bj", difference.abs(), radius)
        if careful:
            size = functional.linear(centre.abs() + radius, weight.abs(), bias.abs())
            handed = functional.linear(centre, weight, bias).abs() + functional.linear(radius, weight.abs())
            lost = 2 * (centre.shape[1] + 4) * (_DOUBLE * size + _TINY)
            lowest = lowest - (lost + _in_single(handed)).amax(1, keepdim=True)
        return lowest.scatter(1, action[:, None], math.inf)


def _parameters(layer: Layer, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert layer.bias is not None
    return layer.weight.to(dtype), layer.bias.to(dtype)


def _in_single(largest: Tensor) -> Tensor:
    """What a lead loses when scores of up to ``largest`` are rounded to float32; everything if they might overflow."""
    return torch.where(largest < _LARGEST_SCORE, _SINGLE * largest + _FLUSHED, math.inf)


def _apply(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What the layer does, with these weights for its own. Bounds on rounding, in float64, are those of plain sums."""
    if isinstance(layer, nn.Conv2d):
        if x.dtype == torch.float64:
            return patch_conv(x, weight, bias, layer.stride[0])
        return functional.conv2d(x, weight, bias, layer.stride)
    return functional.linear(x.flatten(1), weight, bias)


def _centred(lo: Tensor, hi: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
    """Centre and radius of a box that holds [lo, hi]."""
    centre, radius = (lo + hi) / 2, (hi - lo) / 2
    return centre, radius + (_DOUBLE * (centre.abs() + radius) + _TINY) if careful else radius


def _interval(layer: Layer, centre: Tensor, radius: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
    """Centre and radius of what a layer makes of a box."""
    weight, bias = _parameters(layer, centre.dtype)
    out = _apply(layer, centre, weight, bias)
    if not careful:
        return out, _apply(layer, radius, weight.abs())
    lost = (weight[0].numel() + 4) * _DOUBLE  # of |W| (|c| + r) + |b|, as :func:`_lost` has it, in the same product
    offset = lost * bias.abs() + (weight[0].numel() + 4) * _TINY
    return out, _apply(layer, lost * centre.abs() + (1.0 + lost) * radius, weight.abs(), offset)


def _lost(layer: Layer, centre: Tensor, radius: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A bound on the rounding of a layer and of the radius of its outputs, in float64."""
    size = _apply(layer, centre.abs() + radius, weight.abs(), bias.abs())
    return (weight[0].numel() + 4) * (_DOUBLE * size + _TINY)

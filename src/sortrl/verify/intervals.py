"""Convolutions and linear layers with ReLU between them, and what they make of a box of inputs, rounded outwards.

The policy computes these layers in float64 and in any order, hands the scores out in float32 and plays the largest. Every bound
here holds for what it computes: per layer of n products the roundings of the policy and those of this file together are less than
(n + 4) 2^-51 of |W| |x| + |b|, and what underflows less than 2^-1000.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sortrl.verify.reading import Array, Doubles

_LOST = 2.0**-51
_UNDERFLOW = 2.0**-1000
_HANDED_OUT = 2.0**-23  # two scores are different in float32 if they differ by more than this share of the larger,
_FLUSHED = 2.0**-125  # and by more than what may be flushed to zero
LARGEST_SINGLE = 3.0e38
_LEAST_VARIANCE = 1e-5


@dataclass(frozen=True)
class Layer:
    """Linear, or a convolution; perhaps with layer norm behind it."""

    weight: Doubles
    bias: Doubles
    stride: int = 0
    """0: linear."""
    norm: tuple[Doubles, Doubles] | None = None
    """Weight and bias of each channel."""

    @property
    def lost(self) -> float:
        return float((self.weight[0].size + 4) * _LOST)

    def __call__(self, x: Doubles) -> Doubles:
        return _applied(x, self.weight, self.bias, self.stride)

    def around(self, centre: Doubles, radius: Doubles) -> tuple[Doubles, Doubles]:
        """Centre and radius of what the layer makes of a box."""
        reach = self.lost * np.abs(centre) + (1.0 + self.lost) * radius
        spread = _applied(reach, np.abs(self.weight), self.lost * np.abs(self.bias), self.stride)
        return self(centre), spread + _UNDERFLOW


def scores(layers: list[Layer], x: Doubles) -> Doubles:
    """(batch, actions)."""
    for layer in layers[:-1]:
        x = layer(x)
        x = np.maximum(x if layer.norm is None else _normal(x, *layer.norm), 0.0)
    return layers[-1](x)


def leads(layers: list[Layer], lo: Doubles, hi: Doubles, action: Array) -> Doubles:
    """How far ``action`` (batch,) leads each other one at least (batch, actions), its own entry infinite, in the policy's
    scores for any input between ``lo`` and ``hi``; positive only if no rounding can undo it."""
    centre, radius = _centred(lo, hi)
    for layer in layers[:-1]:
        centre, radius = layer.around(centre, radius)
        low, high = (
            (centre - radius, centre + radius) if layer.norm is None else _normal_range(centre, radius, *layer.norm)
        )
        centre, radius = _centred(np.maximum(low, 0.0), np.maximum(high, 0.0))
    centre, radius = centre.reshape(len(centre), -1), radius.reshape(len(radius), -1)
    last, rows = layers[-1], np.arange(len(centre))
    middle, spread = last.around(centre, radius)
    handed = np.abs(middle) + spread
    size = (np.abs(centre) + radius) @ np.abs(last.weight).T + np.abs(last.bias)
    result = np.empty_like(middle)
    for other in range(len(last.weight)):
        difference = last.weight[action] - last.weight[other]
        lead = (difference * centre).sum(1) + (last.bias[action] - last.bias[other])
        lead -= (np.abs(difference) * radius).sum(1)
        lead -= 2.0 * last.lost * (size[rows, action] + size[:, other])
        lead -= _HANDED_OUT * np.maximum(handed[rows, action], handed[:, other]) + _FLUSHED
        result[:, other] = np.where(handed.max(1) < LARGEST_SINGLE, lead, -np.inf)
    result[rows, action] = np.inf
    return result


def _centred(lo: Doubles, hi: Doubles) -> tuple[Doubles, Doubles]:
    """Centre and radius of a box that holds [lo, hi]."""
    centre, radius = (lo + hi) / 2, (hi - lo) / 2
    return centre, radius + (_LOST * (np.abs(centre) + radius) + _UNDERFLOW)


def _applied(x: Doubles, weight: Doubles, bias: Doubles, stride: int) -> Doubles:
    if not stride:
        return np.asarray(x.reshape(len(x), -1) @ weight.T + bias)
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    y = np.tensordot(windows, weight, axes=([1, 4, 5], [1, 2, 3]))  # (batch, height, width, channels)
    return np.asarray((y + bias).transpose(0, 3, 1, 2))


def _mean(x: Doubles) -> Doubles:
    """Of all numbers of a state, kept in their place."""
    return np.asarray(x.mean(axis=tuple(range(1, x.ndim)), keepdims=True))


def _normal(x: Doubles, weight: Doubles, bias: Doubles) -> Doubles:
    centred = x - _mean(x)
    return centred / np.sqrt(_mean(centred**2) + _LEAST_VARIANCE) * _beside(weight, x) + _beside(bias, x)


def _normal_range(centre: Doubles, radius: Doubles, weight: Doubles, bias: Doubles) -> tuple[Doubles, Doubles]:
    """The deviation is a norm of what is left without the mean, so it changes by no more than the norm of the change.

    With n numbers, a mean and what is left of it are computed to (n + 3) 2^-53 of the sizes, here and by the policy; the deviation
    to (n + 4) 2^-53 of itself; the quotient, its product and the sum add 4 more. Each is counted several times over.
    """
    n = centre[0].size
    size = np.abs(centre) + radius
    radius = radius + 2 * (n + 8) * _LOST * (size + _mean(size))
    centred, reach = centre - _mean(centre), radius + _mean(radius)
    deviation, change = np.sqrt(_mean(centred**2)), np.sqrt(_mean(radius**2))
    change = change + 2 * (n + 8) * _LOST * (deviation + change)
    small = np.sqrt(np.maximum(deviation - change, 0.0) ** 2 + _LEAST_VARIANCE)
    large = np.sqrt((deviation + change) ** 2 + _LEAST_VARIANCE)
    ends = [end * _beside(weight, centre) / by for end in (centred - reach, centred + reach) for by in (small, large)]
    low, high, offset = np.minimum.reduce(ends), np.maximum.reduce(ends), _beside(bias, centre)
    lost = 4 * (n + 16) * _LOST * (np.maximum(np.abs(low), np.abs(high)) + np.abs(offset)) + _UNDERFLOW
    return low + offset - lost, high + offset + lost


def _beside(numbers: Doubles, x: Doubles) -> Doubles:
    """A number for every channel, in the shape of a state."""
    return numbers.reshape(-1, *[1] * (x.ndim - 2))

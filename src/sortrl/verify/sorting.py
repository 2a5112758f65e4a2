"""Sort networks as their files describe them, with or without a linear head, in plain NumPy.

The policy computes the sort layers in float32. How far that is from what is computed here in float64 is bounded stage by stage:
a stage of constant c whose outputs meet n roundings, each of at most a share u, and whose inputs are wrong by at most e, has outputs
that are wrong by at most (1 + g) c e + g Y + n t, where g = n u / (1 - n u), Y is the largest exact output and t is what one
rounding can lose to underflow. See docs/certificates.md, Lemma 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sortrl.verify import intervals
from sortrl.verify.described import SortDescription
from sortrl.verify.reading import Array, Doubles

_DISTANCES_AT_ONCE = 1 << 23
_LARGEST_RADIUS = 8.0  # of those that are sought behind a head
_SINGLE = (2.0**-24, 2.0**-123)
"""Of float32: the share that one rounding loses at most, and what is lost where numbers below 2^-126 are flushed to zero."""
_DOUBLE = (2.0**-53, 2.0**-1019)
_UP = 1.0 + 1e-9  # the bounds are computed in float64 themselves
_LARGEST_PROVEN = 2.0**100  # beyond it a sum on the way might overflow in float32


@dataclass(frozen=True)
class Seen:
    """What became of some states."""

    features: Doubles
    """What the sort layers give: without a head, the scores."""
    sizes: list[Doubles]
    """The largest number (batch,) behind each stage."""


@dataclass(frozen=True)
class SortNetwork:
    """The evaluation network as its file describes it."""

    shape: SortDescription
    bounded: list[tuple[Doubles, Doubles, int]]
    """Weights, biases and strides of the convolutions with bounded weights, which come before the factor."""
    factor: float | None
    weights: list[Doubles]
    means: list[Doubles]
    """Those that are taken away behind each layer; behind the last one, the negative bias."""
    mixes: list[Doubles]
    head: list[intervals.Layer]
    """Linear layers, if there are any."""

    rows = 256
    """States at a time."""
    bisections = 60

    @cached_property
    def stages(self) -> list[tuple[float, int]]:
        """Constant and number of roundings of each step that computes."""
        found = [(1.0, self.shape.pool**2 + 1)] if self.shape.pool > 1 else []
        # A product, the sums of both signs of weights, the bias.
        found += [(_row_sum(weight) * (1.0 + 1e-12), weight[0].size + 3) for weight, _, _ in self.bounded]
        found += [] if self.factor is None else [(self.factor, 1)]
        for mix in self.mixes:
            found += [(math.fsum(mix), 1 if len(mix) == 1 else len(mix) + 1), (1.0, 1)]
        return found

    @cached_property
    def _features_lipschitz(self) -> float:
        return math.prod(constant for constant, _ in self.stages)

    @property
    def lipschitz(self) -> float:
        """With a head a loose bound, on which nothing rests."""
        return self._features_lipschitz * math.prod(_row_sum(layer.weight) for layer in self.head)

    def look(self, states: Doubles) -> Seen:
        x, sizes = states, []
        top, bottom, left, right = self.shape.crop
        if any(self.shape.crop):
            x = x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]
        if self.shape.pool > 1:
            sizes.append(_largest(x))
            x = _pooled(x, self.shape.pool)
        if self.shape.pixels:
            x = x.reshape(len(x), -1)[:, list(self.shape.pixels)]
        for weight, bias, stride in self.bounded:
            sizes.append(_row_sum(weight) * (1.0 + 1e-12) * _largest(x) + np.abs(bias).max())
            x = _bounded_layer(x, weight, bias, stride)
        image = x.shape[1:]
        x = x.reshape(len(x), -1)
        if self.factor is not None:
            x = x * self.factor
            sizes.append(_largest(x))
        for index, (weight, mix, mean) in enumerate(zip(self.weights, self.mixes, self.means, strict=True)):
            if index < len(self.shape.conv):
                y, image = _patch_layer(x, image, weight, mix, *self.shape.conv[index])
            else:
                y = _sort_layer(x, weight, mix)
            x = y - mean
            sizes += [_largest(y), _largest(x)]
        return Seen(-x, sizes)

    def scores(self, seen: Seen) -> Doubles:
        return intervals.scores(self.head, seen.features) if self.head else seen.features

    def leads(self, seen: Seen, action: Array, radius: Doubles) -> Doubles:
        """How far ``action`` leads each other one at least (batch, actions), its own entry infinite, in the scores that the
        policy computes for any input within ``radius`` (batch,)."""
        half, rows = self._reach(seen, radius)[:, None], np.arange(len(radius))
        if self.head:
            lead = intervals.leads(self.head, seen.features - half, seen.features + half, action)
            return np.where(np.isfinite(half), lead, -np.inf)
        chosen = seen.features[rows, action][:, None]
        lead = chosen - seen.features - 2.0 * half - 2.0**-50 * (np.abs(chosen) + np.abs(seen.features))
        lead[rows, action] = np.inf
        return np.asarray(lead)

    def most(self, seen: Seen, action: Array) -> Doubles:
        """No radius beyond this is sought: without a head, margin / (2 L)."""
        if self.head:
            return np.full(len(action), _LARGEST_RADIUS)
        rows, others = np.arange(len(action)), seen.features.copy()
        others[rows, action] = -np.inf
        margin = seen.features[rows, action] - others.max(1)
        return np.asarray(np.maximum(margin, 0.0) / (2.0 * self._features_lipschitz))

    def overflows(self, seen: Seen) -> Array:
        """Whether (batch,) numbers on the way are beyond float32."""
        return np.asarray(~(np.max(seen.sizes, axis=0) < intervals.LARGEST_SINGLE))

    def _reach(self, seen: Seen, radius: Doubles) -> Doubles:
        """How far (batch,) a feature that the policy computes within ``radius`` can be from the one computed here."""
        single = double = largest = np.zeros(len(radius))
        gain = 1.0
        for (constant, roundings), size in zip(self.stages, seen.sizes, strict=True):
            gain *= constant
            relative, lost = _gamma(roundings, _DOUBLE[0]), roundings * _DOUBLE[1]
            exact = (size + lost) / (1.0 - relative) + constant * double
            double = (1.0 + relative) * constant * double + relative * exact + lost
            relative, lost = _gamma(roundings, _SINGLE[0]), roundings * _SINGLE[1]
            exact = size + double + gain * radius
            single = (1.0 + relative) * constant * single + relative * exact + lost
            largest = np.maximum(largest, exact)
        reach = gain * (1.0 + 1e-12) * radius + (single + double) * _UP
        return np.where(largest < _LARGEST_PROVEN, reach, np.inf)


def sort_network(weights: dict[str, Array], shape: SortDescription) -> SortNetwork:
    """Of tensors that were found to be those of the description."""

    def double(name: str) -> Doubles:
        return weights[name].astype(np.float64)

    inner = shape.prefix
    bounded = [
        (double(f"{inner}front.{i}.weight"), double(f"{inner}front.{i}.bias"), stride)
        for i, (_, _, stride) in enumerate(shape.bounded, start=shape.first_bounded)
    ]
    layers = range(len(shape.fans))
    return SortNetwork(
        shape=shape,
        bounded=bounded,
        factor=None if shape.factor is None else float(weights[inner + shape.factor]),
        weights=[double(f"{inner}layers.{i}.weight") for i in layers],
        means=[*(double(f"{inner}shifts.{i}.running_mean") for i in layers[:-1]), -double(f"{inner}bias")],
        mixes=[shape.mix(i) for i in layers],
        head=[
            intervals.Layer(double(f"head.layers.{i}.weight"), double(f"head.layers.{i}.bias"))
            for i in range(len(shape.head or [0]) - 1)
        ],
    )


def _gamma(roundings: int, unit: float) -> float:
    return roundings * unit / (1.0 - roundings * unit)


def _largest(x: Doubles) -> Doubles:
    return np.asarray(np.abs(x.reshape(len(x), -1)).max(1))


def _row_sum(weight: Doubles) -> float:
    return float(np.abs(weight).reshape(len(weight), -1).sum(1).max())


def _sort_layer(x: Doubles, weight: Doubles, mix: Doubles) -> Doubles:
    """y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - weight[k]|), a few rows at a time."""
    y = np.empty((len(x), len(weight)))
    rows = max(1, _DISTANCES_AT_ONCE // weight.size)
    cut = weight.shape[1] - len(mix)
    for begin in range(0, len(x), rows):
        distance = np.abs(x[begin : begin + rows, None, :] - weight[None])
        if len(mix) == 1:
            y[begin : begin + rows] = distance.max(2)
            continue
        largest = np.partition(distance, cut, axis=2)[..., cut:] if cut else distance
        y[begin : begin + rows] = np.sort(largest, axis=2)[..., ::-1] @ mix
    return y


def _bounded_layer(x: Doubles, weight: Doubles, bias: Doubles, stride: int) -> Doubles:
    """A convolution; then of channels k and k + half, the larger one, and after all of those the smaller one."""
    y = np.empty(0)
    for row, image in enumerate(x):
        windows = np.lib.stride_tricks.sliding_window_view(image, weight.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
        one = np.tensordot(weight, windows, axes=([1, 2, 3], [0, 3, 4])) + bias[:, None, None]
        y = y if row else np.empty((len(x), *one.shape))
        y[row] = one
    first, second = np.split(y, 2, axis=1)
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], axis=1)


def _patch_layer(
    x: Doubles, shape: tuple[int, ...], weight: Doubles, mix: Doubles, channels: int, kernel: int, stride: int
) -> tuple[Doubles, tuple[int, int, int]]:
    """The same for every patch of flat images; also the shape of what comes out."""
    images = x.reshape(len(x), *shape)
    windows = np.lib.stride_tricks.sliding_window_view(images, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    height, width = windows.shape[2:4]
    rows = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, shape[0] * kernel * kernel)
    y = _sort_layer(rows, weight, mix).reshape(len(x), height, width, channels).transpose(0, 3, 1, 2)
    return y.reshape(len(x), -1), (channels, height, width)


def _pooled(x: Doubles, size: int) -> Doubles:
    batch, channels, height, width = x.shape
    rows, columns = height // size, width // size
    blocks = x[..., : rows * size, : columns * size].reshape(batch, channels, rows, size, columns, size)
    return np.asarray(blocks.mean(axis=(3, 5)))

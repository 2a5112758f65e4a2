"""Networks behind thresholds on pixels as their files describe them, in plain NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sortrl.verify.reading import Array, Doubles

_LARGEST_RADIUS = 2.0
_BISECTIONS = 30
_STATES_AT_ONCE = 64

_LEAST_VARIANCE = 1e-5

Affine = tuple[Doubles, Doubles, int]
"""Weights, biases and stride of a convolution, or weights, biases and 0 of a linear layer."""
Norm = tuple[Doubles, Doubles]
"""Weight and bias of each channel."""


@dataclass(frozen=True)
class RoundedNetwork:
    """The evaluation network as its file describes it."""

    thresholds: Doubles
    """(levels, channels, height, width)."""
    layers: list[Affine]
    norms: list[Norm]
    """Behind each layer but the last, or none at all."""

    @property
    def lipschitz(self) -> float:
        """A step has no such constant."""
        return math.inf

    def judge(self, states: Doubles) -> tuple[Doubles, Doubles]:
        """Scores (batch, actions), and the largest radius (batch,) that intervals prove for the best action."""
        if len(states) > _STATES_AT_ONCE:
            pieces = [self.judge(part) for part in np.array_split(states, -(-len(states) // _STATES_AT_ONCE))]
            return np.concatenate([scores for scores, _ in pieces]), np.concatenate([bound for _, bound in pieces])
        x = self._bits(states)
        for i, layer in enumerate(self.layers[:-1]):
            x = _applied(x, *layer)
            x = np.maximum(_normal(x, *self.norms[i]) if self.norms else x, 0.0)
        scores = _applied(x, *self.layers[-1])
        return scores, self._bound(states, scores.argmax(1))

    def _bits(self, states: Doubles) -> Doubles:
        above = states[:, None] > self.thresholds
        return above.reshape(len(states), -1, *states.shape[2:]).astype(np.float64)

    def _bound(self, states: Doubles, action: Array) -> Doubles:
        low, high = np.zeros(len(states)), np.full(len(states), _LARGEST_RADIUS)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            holds = self._holds(states, middle, action)
            low, high = np.where(holds, middle, low), np.where(holds, high, middle)
        return np.where(self._holds(states, np.zeros(len(states)), action), high, 0.0)

    def _holds(self, states: Doubles, radius: Doubles, action: Array) -> Array:
        """Whether the action leads all others wherever the states move by ``radius``."""
        reach = radius[:, None, None, None]
        lo, hi = self._bits(states - reach), self._bits(states + reach)
        for i, (weight, bias, stride) in enumerate(self.layers[:-1]):
            centre = _applied((lo + hi) / 2, weight, bias, stride)
            spread = _applied((hi - lo) / 2, np.abs(weight), np.zeros(len(bias)), stride)
            lo, hi = _normal_range(centre, spread, *self.norms[i]) if self.norms else (centre - spread, centre + spread)
            lo, hi = np.maximum(lo, 0.0), np.maximum(hi, 0.0)
        weight, bias, _ = self.layers[-1]
        lo, hi, leading = lo.reshape(len(lo), -1), hi.reshape(len(hi), -1), np.ones(len(states), bool)
        for other in range(len(weight)):
            difference = weight[action] - weight[other]
            lead = (difference * (lo + hi) / 2).sum(1) + bias[action] - bias[other]
            lead -= (np.abs(difference) * (hi - lo) / 2).sum(1)
            leading &= (lead > 0) | (action == other)
        return leading


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


def _normal_range(centre: Doubles, spread: Doubles, weight: Doubles, bias: Doubles) -> tuple[Doubles, Doubles]:
    """The deviation is a norm of what is left without the mean, so it changes by no more than the norm of the change."""
    centred, reach = centre - _mean(centre), spread + _mean(spread)
    deviation, change = np.sqrt(_mean(centred**2)), np.sqrt(_mean(spread**2))
    small = np.sqrt(np.maximum(deviation - change, 0.0) ** 2 + _LEAST_VARIANCE)
    large = np.sqrt((deviation + change) ** 2 + _LEAST_VARIANCE)
    ends = [end * _beside(weight, centre) / by for end in (centred - reach, centred + reach) for by in (small, large)]
    return np.minimum.reduce(ends) + _beside(bias, centre), np.maximum.reduce(ends) + _beside(bias, centre)


def _beside(numbers: Doubles, x: Doubles) -> Doubles:
    """A number for every channel, in the shape of a state."""
    return numbers.reshape(-1, *[1] * (x.ndim - 2))


def rounded_network(
    weights: dict[str, Array], config: dict[str, Any], tensors: dict[str, Array]
) -> tuple[RoundedNetwork, list[str]]:
    """The network, and what does not fit: then nothing can be computed with it."""
    conv = [tuple(map(int, layer)) for layer in config["conv"]]
    strides = [stride for _, _, stride in conv] + [0] * (len(config["hidden"]) + 1)
    layers = [
        (
            weights[f"head.layers.{i}.weight"].astype(np.float64),
            weights[f"head.layers.{i}.bias"].astype(np.float64),
            stride,
        )
        for i, stride in enumerate(strides)
    ]
    norms = [
        (weights[f"head.norms.{i}.weight"].astype(np.float64), weights[f"head.norms.{i}.bias"].astype(np.float64))
        for i in range(len(layers) - 1 if config.get("norm") else 0)
    ]
    network = RoundedNetwork(weights["rounding.thresholds"].astype(np.float64), layers, norms)
    channels, height, width = map(int, config["obs_shape"])
    levels = int(config["levels"])
    expected: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "thresholds": (network.thresholds.shape, (levels, channels, height, width))
    }
    shape: tuple[int, ...] = (levels * channels, height, width)
    shapes: list[tuple[int, ...]] = []
    for out, kernel, stride in conv:
        if min(out, kernel, stride) < 1 or kernel > min(shape[1:]):
            raise ValueError(f"a convolution of {(out, kernel, stride)} on images of {shape}")
        shapes.append((out, shape[0], kernel, kernel))
        shape = (out, *((size - kernel) // stride + 1 for size in shape[1:]))
    inputs = math.prod(shape)
    for out in (*map(int, config["hidden"]), int(config["n_actions"])):
        shapes.append((out, inputs))
        inputs = out
    for i, ((weight, bias, _), wanted) in enumerate(zip(layers, shapes, strict=True)):
        expected |= {f"layer {i}": (weight.shape, wanted), f"bias of layer {i}": (bias.shape, wanted[:1])}
    for i, parts in enumerate(norms):
        expected |= {f"{name} of norm {i}": (part.shape, shapes[i][:1]) for name, part in zip("wb", parts, strict=True)}
    lines = [f"{name}: shape {got}, expected {wanted}" for name, (got, wanted) in expected.items() if got != wanted]
    return network, lines

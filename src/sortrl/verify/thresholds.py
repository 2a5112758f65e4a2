"""Networks behind thresholds on pixels as their files describe them, in plain NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sortrl.verify import intervals
from sortrl.verify.described import ThresholdDescription
from sortrl.verify.reading import Array, Doubles

_UNUSED = 1000.0
"""No image shows such a value: a threshold there stands for none. Whether a policy asks it (number > threshold) or takes its
answer for granted (no) is left open: where the two differ, the answer may be either."""


@dataclass(frozen=True)
class ThresholdNetwork:
    """The evaluation network as its file describes it."""

    thresholds: Doubles
    """(levels, channels, height, width)."""
    layers: list[intervals.Layer]

    rows = 64
    """States at a time."""
    bisections = 30

    @property
    def lipschitz(self) -> float:
        """A step has no such constant."""
        return math.inf

    def look(self, states: Doubles) -> Doubles:
        """All that is needed of states is the states."""
        return states

    def scores(self, seen: Doubles) -> Doubles:
        return intervals.scores(self.layers, self._bits(seen, self.thresholds))

    def leads(self, seen: Doubles, action: Array, radius: Doubles) -> Doubles:
        """Thresholds are monotone, so the corners of a box of inputs, rounded outwards, give the box of their answers."""
        reach = radius[:, None, None, None]
        lo, hi = seen - reach, seen + reach
        lo = np.where(reach > 0, np.nextafter(lo, -np.inf), lo)
        hi = np.where(reach > 0, np.nextafter(hi, np.inf), hi)
        certain = np.where(self.thresholds < _UNUSED, self.thresholds, np.inf)
        return intervals.leads(self.layers, self._bits(lo, certain), self._bits(hi, self.thresholds), action)

    def most(self, seen: Doubles, action: Array) -> Doubles:
        """No radius beyond this is sought."""
        return np.full(len(seen), 2.0)

    def overflows(self, seen: Doubles) -> Array:
        """Bits are small; scores are looked at by whoever asked for them."""
        return np.zeros(len(seen), bool)

    def _bits(self, states: Doubles, thresholds: Doubles) -> Doubles:
        above = states[:, None] > thresholds
        return above.reshape(len(states), -1, *states.shape[2:]).astype(np.float64)


def threshold_network(weights: dict[str, Array], description: ThresholdDescription) -> ThresholdNetwork:
    """Of tensors that were found to be those of the description."""

    def double(name: str) -> Doubles:
        return weights[name].astype(np.float64)

    layers = []
    for i, stride in enumerate(description.strides):
        norm = None
        if description.norm and i < len(description.strides) - 1:
            norm = double(f"head.norms.{i}.weight"), double(f"head.norms.{i}.bias")
        layers.append(intervals.Layer(double(f"head.layers.{i}.weight"), double(f"head.layers.{i}.bias"), stride, norm))
    return ThresholdNetwork(double("rounding.thresholds"), layers)

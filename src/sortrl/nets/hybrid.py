"""HybridPolicy: sort layers, then a few linear ones whose reach is bounded by intervals (the paper's network for video games).

The sort layers are Lipschitz, so all features stay within L * r of where they are while the input moves by r. From there
interval propagation takes over; the last layer is taken in difference form, W_a - W_j, which is exact for a box of its inputs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.errors import SortRLError
from sortrl.nets.bounds import RADIUS_DOWN, score_bounds, traced_scores
from sortrl.nets.certified import CertifiedPolicy, Decided, ranked
from sortrl.nets.policy import PolicyConfig, SortPolicy
from sortrl.normalizer import Normalizer

REACH = 4.0  # radii are not sought beyond this
SMALLEST = 1e-6
BISECTIONS = 16  # of the logarithm of the radius between SMALLEST and REACH: to 0.03 %
# Bounds are computed in float64. What they may lose by rounding is at most this many units per term of a sum.
_DOUBLE = 2.0**-50
_SINGLE = 2.0**-22  # scores are handed out in float32


class IntervalHead(nn.Module):
    """Linear layers with ReLU between them, and bounds on what they can make of a box of features.

    >>> head = IntervalHead(4, (8,), 3)
    >>> features, action = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> near, far = (head.leads_within(features, torch.tensor(r), action) for r in (0.0, 0.1))
    >>> near.shape, bool((far <= near).all())
    (torch.Size([5, 3]), True)
    """

    def __init__(self, features: int, hidden: tuple[int, ...], n_actions: int) -> None:
        super().__init__()
        if min(features, n_actions, *hidden, 1) < 1:
            raise SortRLError(f"IntervalHead: sizes are {(features, *hidden, n_actions)}, expected all at least 1.")
        sizes = (features, *hidden, n_actions)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    @property
    def lipschitz(self) -> float:
        """A bound on the l_inf constant: the product of the largest row sums. The certificate does not need it."""
        return math.prod(float(layer.weight.detach().abs().double().sum(1).max()) for layer in self._linear())

    def _linear(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, features: Tensor) -> Tensor:
        """Scores (batch, n_actions), in the precision of the features."""
        x = features
        for index, layer in enumerate(self._linear()):
            x = functional.linear(x if index == 0 else functional.relu(x), *_parameters(layer, x.dtype))
        return x

    def leads_within(self, features: Tensor, half: Tensor, action: Tensor, careful: bool = False) -> Tensor:
        """Lower bounds (batch, n_actions) on how far ``action`` (batch,) leads each other action, its own entry infinite,
        while no feature moves by more than ``half``.

        ``half`` is (batch, 1) or a number. ``careful`` subtracts whatever rounding could have added; for float64 only.
        """
        first = self._linear()[0]
        if len(self.layers) == 1:
            return self._leads(features, half.expand(len(features), features.shape[1]), action, careful)
        weight, bias = _parameters(first, features.dtype)
        centre, radius = functional.linear(features, weight, bias), half * weight.abs().sum(1)
        if careful:
            radius = radius + _lost(features, half.expand_as(features), weight, bias)
        return self._after(centre, radius, action, careful)

    def leads_over(self, lo: Tensor, hi: Tensor, action: Tensor, careful: bool = False) -> Tensor:
        """The same for features between ``lo`` and ``hi`` (batch, features)."""
        centre, radius = _centred(lo, hi, careful)
        if len(self.layers) == 1:
            return self._leads(centre, radius, action, careful)
        return self._after(*_interval(self._linear()[0], centre, radius, careful), action, careful)

    def _after(self, centre: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """From what the first layer gives, centre +- radius, to the leads."""
        for layer in self._linear()[1:-1]:
            box = _centred(functional.relu(centre - radius), functional.relu(centre + radius), careful)
            centre, radius = _interval(layer, *box, careful)
        box = _centred(functional.relu(centre - radius), functional.relu(centre + radius), careful)
        return self._leads(*box, action, careful)

    def _leads(self, centre: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """The last layer in difference form: exact for the box of its inputs."""
        weight, bias = _parameters(self._linear()[-1], centre.dtype)
        difference = weight[action][:, None, :] - weight  # (batch, n_actions, inputs)
        offset = bias[action][:, None] - bias
        lowest = torch.einsum("bji,bi->bj", difference, centre) + offset
        lowest = lowest - torch.einsum("bji,bi->bj", difference.abs(), radius)
        if careful:
            size = functional.linear(centre.abs() + radius, weight.abs(), bias.abs()).amax(1, keepdim=True)
            lowest = lowest - (2 * (centre.shape[1] + 4) * _DOUBLE + _SINGLE) * size
        return lowest.scatter(1, action[:, None], math.inf)


def _parameters(layer: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return layer.weight.to(dtype), layer.bias.to(dtype)


def _centred(lo: Tensor, hi: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
    """Centre and radius of a box that holds [lo, hi]."""
    centre, radius = (lo + hi) / 2, (hi - lo) / 2
    return centre, radius + _DOUBLE * (centre.abs() + radius) if careful else radius


def _interval(layer: nn.Linear, centre: Tensor, radius: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
    """Centre and radius of what a linear layer makes of a box."""
    weight, bias = _parameters(layer, centre.dtype)
    out, spread = functional.linear(centre, weight, bias), functional.linear(radius, weight.abs())
    return out, spread + _lost(centre, radius, weight, bias) if careful else spread


def _lost(centre: Tensor, radius: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A bound on the rounding of a linear layer and of the radius of its outputs, in float64."""
    size = functional.linear(centre.abs() + radius, weight.abs(), bias.abs())
    return (weight.shape[1] + 4) * _DOUBLE * size


@dataclass(frozen=True)
class HybridConfig(PolicyConfig):
    """The shape of a :class:`HybridPolicy`: ``width`` is also the number of features that the linear layers get."""

    hidden: tuple[int, ...] = (256,)
    """Widths between the linear layers."""


class HybridPolicy(CertifiedPolicy):
    """Sort layers with a linear head. Arguments are the fields of :class:`HybridConfig`.

    >>> policy = HybridPolicy((4,), 2, width=16, depth=2, hidden=(8,))
    >>> cert = policy.certify(torch.zeros(5, 4))
    >>> cert.radius.shape, bool((cert.radius >= 0).all())
    ((5,), True)
    """

    kind = "hybrid"

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        n_actions: int,
        *arguments: Any,
        normalizer: Normalizer | None = None,
        **named: Any,
    ) -> None:
        super().__init__()
        self.config = HybridConfig(tuple(obs_shape), int(n_actions), *arguments, **named)
        shape = {name: value for name, value in asdict(self.config).items() if name not in ("n_actions", "hidden")}
        self.trunk = SortPolicy(n_actions=self.config.width, normalizer=normalizer, **shape)
        self.head = IntervalHead(self.config.width, self.config.hidden, self.config.n_actions)

    @property
    def normalizer(self) -> Normalizer:  # type: ignore[override]
        return self.trunk.normalizer

    @property
    def lipschitz(self) -> float:
        """Of the sort layers and the head together: a loose bound, which certificates do not rest on."""
        return self.trunk.lipschitz * self.head.lipschitz

    def scores(self, unit: Tensor) -> Tensor:
        return self._read(self.trunk.scores(unit))

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        return self._read(self.trunk.surrogate_scores(unit, p))

    def _read(self, features: Tensor) -> Tensor:
        """The head in float64, where its rounding is next to nothing."""
        scores: Tensor = self.head(features.double()).float()
        return scores

    def calibrate(self, unit: Tensor) -> None:
        self.trunk.calibrate(unit)

    def _decide(self, unit: Tensor) -> Decided:
        """The radius is the largest for which intervals prove the action, by bisection; what is returned was proven."""
        features, magnitudes = traced_scores(self.trunk, unit)
        action, runner_up, _ = ranked(self._read(features), unit)
        chosen = torch.from_numpy(action)

        def holds(radius: Tensor) -> Tensor:
            return (self._leads(features, magnitudes, radius, chosen) > 0).all(1)

        low = torch.full((len(unit),), math.log(SMALLEST), dtype=torch.float64)
        high = torch.full_like(low, math.log(REACH))
        good = torch.where(holds(low.exp()), low.exp(), torch.zeros_like(low))
        good = torch.where(holds(high.exp()), high.exp(), good)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            holding = holds(middle.exp())
            good = torch.where(holding, torch.maximum(good, middle.exp()), good)
            low, high = torch.where(holding, middle, low), torch.where(holding, high, middle)
        return action, (good * RADIUS_DOWN).numpy(), runner_up

    def _leads(self, features: Tensor, magnitudes: Tensor, radius: Tensor, action: Tensor) -> Tensor:
        """Lower bounds (batch, n_actions) on the leads of ``action`` while the input moves by at most ``radius`` (batch,)."""
        bound = self.trunk.error_bound()
        error = (magnitudes @ torch.tensor(bound.per_magnitude, dtype=torch.float64) + bound.constant)[:, None]
        # How far a computed feature can be from the computed one of the state: its own movement and both roundings.
        half = ((bound.lipschitz + bound.per_reach) * radius[:, None] + 2.0 * error) / RADIUS_DOWN
        return self.head.leads_within(features.double(), half, action, careful=True)

    @torch.no_grad()
    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        features, magnitudes = traced_scores(self.trunk, unit)
        action = self._read(features).argmax(1)
        leads = self._leads(features, magnitudes, torch.full((len(unit),), eps_unit, dtype=torch.float64), action)
        possible: npt.NDArray[np.bool_] = (~(leads > 0)).numpy()
        possible[np.arange(len(unit)), action.numpy()] = True
        return possible

    @torch.no_grad()
    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        low, high = score_bounds(self.trunk, lo, hi)
        return (self.head.leads_over(low, high, action, careful=True) > 0).all(1)

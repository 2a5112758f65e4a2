"""HybridPolicy: sort layers, then a few linear ones whose reach is bounded by intervals (the paper's network for video games).

The sort layers are Lipschitz, so all features stay within L * r of where they are while the input moves by r. From there
interval propagation takes over; the last layer is taken in difference form, W_a - W_j, which is exact for a box of its inputs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.normalizer import Normalizer
from sortrl.nets.base import CertifiedPolicy, Decided, ranked
from sortrl.nets.float_bounds import RADIUS_DOWN, score_bounds
from sortrl.nets.frozen import Copies, EvaluationNetwork
from sortrl.nets.intervals import IntervalHead
from sortrl.nets.sort import PolicyConfig, SortEvaluation, SortPolicy

REACH = 4.0  # radii are not sought beyond this
SMALLEST = 1e-6
BISECTIONS = 16  # of the logarithm of the radius between SMALLEST and REACH: to 0.03 %


@dataclass(frozen=True)
class HybridConfig(PolicyConfig):
    """The shape of a :class:`HybridPolicy`: ``width`` is also the number of features that the linear layers get."""

    hidden: tuple[int, ...] = (256,)
    """Widths between the linear layers."""


class HybridEvaluation(EvaluationNetwork):
    """Sort layers, and a head in float64, where its rounding is next to nothing."""

    def __init__(self, policy: HybridPolicy, copies: Copies) -> None:
        copies.watch(policy)
        self.trunk = SortEvaluation(policy.trunk, copies)
        self.head = copies(policy.head)

    @property
    def lipschitz(self) -> float:
        """Of the sort layers and the head together: a loose bound, which certificates do not rest on."""
        return self.trunk.lipschitz * self.head.lipschitz

    def scores(self, unit: Tensor) -> Tensor:
        scores: Tensor = self.head(self.trunk.scores(unit).double()).float()
        return scores

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        scores: Tensor = self.head(self.trunk.surrogate_scores(unit, p).double()).float()
        return scores

    def decide(self, unit: Tensor) -> Decided:
        """The radius is the largest for which intervals prove the action, by bisection; what is returned was proven."""
        features, magnitudes = self.trunk.traced(unit)
        action, runner_up, _ = ranked(self.head(features.double()).float(), unit)
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
        bound = self.trunk.bound
        error = (magnitudes @ torch.tensor(bound.per_magnitude, dtype=torch.float64) + bound.constant)[:, None]
        # How far a computed feature can be from the computed one of the state: its own movement and both roundings.
        half = ((bound.lipschitz + bound.per_reach) * radius[:, None] + 2.0 * error) / RADIUS_DOWN
        leads = self.head.leads_within(features.double(), half, action, careful=True)
        return torch.where(bound.in_range(magnitudes.amax(1), radius)[:, None], leads, -math.inf)

    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        features, magnitudes = self.trunk.traced(unit)
        action = self.head(features.double()).float().argmax(1)
        leads = self._leads(features, magnitudes, torch.full((len(unit),), eps_unit, dtype=torch.float64), action)
        possible: npt.NDArray[np.bool_] = (~(leads > 0)).numpy()
        possible[np.arange(len(unit)), action.numpy()] = True
        return possible

    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        low, high = score_bounds(self.trunk, lo, hi, self.trunk.bound)
        return (self.head.leads_over(low, high, action, careful=True) > 0).all(1)


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

    def calibrate(self, unit: Tensor) -> None:
        self.trunk.calibrate(unit)

    def _network(self, copies: Copies) -> EvaluationNetwork:
        return HybridEvaluation(self, copies)

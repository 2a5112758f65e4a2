"""IntervalPolicy: an ordinary network of convolutions and linear layers whose decisions are certified by interval propagation.

Nothing about it is Lipschitz by construction. How far its certificates reach is a matter of training: that is what the methods in
:mod:`sortrl.baselines.interval_q` do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets.base import CertifiedPolicy, Decided, ranked
from sortrl.nets.float_bounds import RADIUS_DOWN, box_around
from sortrl.nets.frozen import Copies, EvaluationNetwork, require_single
from sortrl.nets.intervals import IntervalHead

REACH = 4.0  # radii are not sought beyond this
SMALLEST = 1e-6
# The logarithm of the radius between SMALLEST and REACH is cut into (how many cuts at once, how often): to 0.03 %. Where a call costs
# more than what it computes, several cuts at once are faster.
BISECTIONS, SECTIONS = (1, 16), (8, 5)
ROWS_AT_ONCE = 256  # states whose boxes are computed with at a time


@dataclass(frozen=True)
class IntervalConfig:
    """The shape of an :class:`IntervalPolicy`."""

    obs_shape: tuple[int, ...]
    n_actions: int
    hidden: tuple[int, ...] = (256, 256)
    """Widths between the linear layers."""
    conv: tuple[tuple[int, int, int], ...] = ()
    """Channels, kernel and stride of the convolutions before them."""
    norm: bool = False
    """Layer norm behind every layer but the last."""

    def __post_init__(self) -> None:
        if type(self.norm) is not bool:
            raise SortRLError(f"IntervalPolicy: norm is {str(self.norm)[:40]!r}, expected true or false.")
        sizes = (*self.obs_shape, self.n_actions, *self.hidden, *(size for layer in self.conv for size in layer))
        if not all(type(size) is int and size > 0 for size in sizes) or any(len(layer) != 3 for layer in self.conv):
            raise SortRLError(
                f"IntervalPolicy: every size must be a positive whole number, and conv (channels, kernel, stride) of each "
                f"layer, got {str(self)[:300]}."
            )
        if not self.obs_shape or (self.conv and len(self.obs_shape) != 3) or self.n_actions < 2:
            raise SortRLError(
                f"IntervalPolicy: observations {self.obs_shape} and {self.n_actions} actions, expected at least 2 actions, and "
                "images (channels, height, width) before convolutions."
            )


class IntervalEvaluation(EvaluationNetwork):
    """The network in float64, where its rounding is next to nothing and is accounted for."""

    def __init__(self, policy: IntervalPolicy, copies: Copies) -> None:
        copies.watch(policy)
        self._copies = copies
        self.head = copies(policy.head)

    @property
    def lipschitz(self) -> float:
        """A loose bound, the product of the layers'; certificates do not rest on it."""
        return self.head.lipschitz

    def scores(self, unit: Tensor) -> Tensor:
        scores: Tensor = self.head(unit.double()).float()
        return scores

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        """There are no sort layers to smooth."""
        return self.scores(unit)

    def decide(self, unit: Tensor) -> Decided:
        """The radius is the largest for which intervals prove the action, by cutting an interval; what is returned was proven."""
        require_single(self._copies)
        action, runner_up, _ = ranked(self.scores(unit), unit)
        parts = zip(torch.split(unit, ROWS_AT_ONCE), torch.split(torch.from_numpy(action), ROWS_AT_ONCE), strict=True)
        radius = [self._radius(*part) for part in parts] or [torch.zeros(0, dtype=torch.float64)]
        return action, torch.cat(radius).numpy(), runner_up

    def _radius(self, unit: Tensor, action: Tensor) -> Tensor:
        sections, levels = SECTIONS if self.head.is_linear else BISECTIONS

        def holds(radius: Tensor) -> Tensor:
            """Of each state whether its radii (n, batch) hold; all in one call."""
            n = len(radius)
            rows = unit.repeat(n, *[1] * (unit.ndim - 1))
            lo, hi = box_around(rows, radius.reshape(-1, *[1] * (unit.ndim - 1)), None, None)
            return self.proven(lo, hi, action.repeat(n)).reshape(n, -1)

        ends = torch.tensor([SMALLEST, REACH], dtype=torch.float64)[:, None].expand(2, len(unit))
        good = torch.where(holds(ends), ends, 0.0).amax(0)
        low, high = ends.log()
        share = torch.arange(1, sections + 1, dtype=torch.float64)[:, None] / (sections + 1)
        for _ in range(levels):
            inner = low + (high - low) * share
            count = holds(inner.exp()).long().cumprod(0).sum(0)  # how many hold before the first that does not
            low = torch.where(count > 0, inner.gather(0, (count - 1).clamp(min=0)[None])[0], low)
            good = torch.where(count > 0, torch.maximum(good, low.exp()), good)
            high = torch.where(count < sections, inner.gather(0, count.clamp(max=sections - 1)[None])[0], high)
        return good * RADIUS_DOWN

    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        action = self.scores(unit).argmax(1)
        lo, hi = box_around(unit, eps_unit, None, None)
        leads = self.head.leads_over(lo.double(), hi.double(), action, careful=True)
        possible: npt.NDArray[np.bool_] = (~(leads > 0)).numpy()
        possible[np.arange(len(unit)), action.numpy()] = True
        return possible

    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        return (self.head.leads_over(lo.double(), hi.double(), action, careful=True) > 0).all(1)


class IntervalPolicy(CertifiedPolicy):
    """Convolutions and linear layers with ReLU between them. Arguments are the fields of :class:`IntervalConfig`.

    >>> policy = IntervalPolicy((4,), 2, hidden=(8,))
    >>> cert = policy.certify(torch.zeros(5, 4))
    >>> cert.radius.shape, bool((cert.radius >= 0).all())
    ((5,), True)
    """

    kind = "interval"

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        n_actions: int,
        hidden: tuple[int, ...] = IntervalConfig.hidden,
        conv: tuple[tuple[int, int, int], ...] = (),
        norm: bool = False,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.config = IntervalConfig(tuple(obs_shape), int(n_actions), tuple(hidden), tuple(conv), norm)
        self.normalizer = Normalizer.identity(self.obs_shape) if normalizer is None else normalizer
        if self.normalizer.obs_shape != self.obs_shape:
            raise SortRLError(
                f"IntervalPolicy: observations have shape {self.obs_shape}, but the normalizer {self.normalizer.obs_shape}."
            )
        if self.config.conv:
            channels, height, width = self.config.obs_shape
            features: int | tuple[int, int, int] = (channels, height, width)
        else:
            features = math.prod(self.config.obs_shape)
        self.head = IntervalHead(features, self.config.hidden, self.n_actions, self.config.conv, norm)

    def calibrate(self, unit: Tensor) -> None:
        """Nothing is estimated from states."""

    def explain(self) -> dict[str, str]:
        return {
            "network": "convolutions and linear layers with ReLU" if self.config.conv else "linear layers with ReLU",
            "proof": "Intervals bound what the network can make of every observation within the radius.",
        }

    def _network(self, copies: Copies) -> EvaluationNetwork:
        return IntervalEvaluation(self, copies)

"""ThresholdPolicy: pixels are compared with thresholds that lie in gaps between the values they take, and an ordinary network
sees the answers.

A screen shows few colours, so between the values that one pixel takes there are gaps. A threshold in the middle of a gap of
width 2 g tells the two sides apart, and no perturbation smaller than g changes what it says of any value seen: then nothing
behind it can change either, whatever the network. Where some answers can change, intervals bound what follows from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.normalizer import Normalizer
from sortrl.nets.base import CertifiedPolicy, Decided, ranked
from sortrl.nets.float_bounds import box_around
from sortrl.nets.frozen import Copies, EvaluationNetwork, require_single
from sortrl.nets.intervals import IntervalHead

UNUSED = 1000.0  # a threshold from here on stands for none: its answer is no, whatever the number
REACH = 1.0  # radii are not sought beyond this; pixels are between 0 and 1
BISECTIONS = 8
FIRST_STEP = 0.5 / 255
ROWS_AT_ONCE = 64  # states whose boxes are computed with at a time
SLACK = 1e-6  # boxes are rounded outwards to float32, and must not touch a threshold by that


class Rounding(nn.Module):
    """Images (batch, channels, height, width) -> for each of their numbers and each of its thresholds, 1 if it is above and
    0 if not: (batch, levels * channels, height, width).

    A step has no gradient. An attack gets that of the steps replaced by the numbers themselves, as if nothing were rounded:
    otherwise it would fail for want of a direction, which proves nothing.

    >>> rounding = Rounding(1, (1, 1, 2))
    >>> rounding.thresholds.fill_(0.5).shape
    torch.Size([1, 1, 1, 2])
    >>> rounding(torch.tensor([[[[0.3, 0.8]]]]))
    tensor([[[[0., 1.]]]])
    """

    thresholds: Tensor

    def __init__(self, levels: int, obs_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("thresholds", torch.full((levels, *obs_shape), UNUSED))

    def forward(self, unit: Tensor) -> Tensor:
        numbers = unit[:, None]
        used = self.thresholds < UNUSED
        above = ((numbers > self.thresholds) & used).to(unit.dtype)
        if unit.requires_grad:
            above = above + used.to(unit.dtype) * (numbers - numbers.detach())
        return above.flatten(1, 2)

    def distance(self, unit: Tensor) -> Tensor:
        """How far (batch,) the nearest threshold of all is, float64: any smaller change leaves every answer as it is."""
        used = self.thresholds < UNUSED
        if not bool(used.any()):
            return torch.full((len(unit),), REACH, dtype=torch.float64)
        numbers = unit[:, None].expand(-1, *self.thresholds.shape)[:, used]
        return (numbers.double() - self.thresholds[used].double()).abs().amin(1)


@dataclass(frozen=True)
class ThresholdPolicyConfig:
    """The shape of a :class:`ThresholdPolicy`."""

    obs_shape: tuple[int, ...]
    n_actions: int
    levels: int = 2
    """Thresholds per pixel and channel, at most."""
    conv: tuple[tuple[int, int, int], ...] = ((16, 8, 4), (32, 4, 2), (32, 3, 1))
    """Channels, kernel and stride of the convolutions."""
    hidden: tuple[int, ...] = (256,)
    """Widths between the linear layers behind them."""
    norm: bool = False
    """Layer norm behind every layer but the last."""

    def __post_init__(self) -> None:
        if type(self.norm) is not bool:
            raise SortRLError(f"ThresholdPolicy: norm is {str(self.norm)[:40]!r}, expected true or false.")
        whole = (
            *self.obs_shape,
            self.n_actions,
            self.levels,
            *self.hidden,
            *(size for layer in self.conv for size in layer),
        )
        if not all(type(size) is int and size > 0 for size in whole) or any(len(layer) != 3 for layer in self.conv):
            raise SortRLError(
                f"ThresholdPolicy: every size must be a positive whole number, and conv (channels, kernel, stride) of each layer, got {self}."
            )
        if len(self.obs_shape) != 3 or self.n_actions < 2:
            raise SortRLError(
                f"ThresholdPolicy: observations {self.obs_shape} and {self.n_actions} actions, expected images (channels, height, "
                "width) and at least 2."
            )


class ThresholdEvaluation(EvaluationNetwork):
    """Thresholds, and the layers behind them in float64."""

    def __init__(self, policy: ThresholdPolicy, copies: Copies) -> None:
        copies.watch(policy)
        self._copies = copies
        self.rounding = copies(policy.rounding)
        self.head = copies(policy.head)

    @property
    def lipschitz(self) -> float:
        """A step is no Lipschitz function. What is certified rests on how far away the steps are."""
        return math.inf

    def scores(self, unit: Tensor) -> Tensor:
        """In float64, where the rounding of sums is next to nothing; for gradients, which only say where to go, in float32."""
        answers = self.rounding(unit)
        scores: Tensor = self.head(answers if answers.requires_grad else answers.double()).float()
        return scores

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        """There are no sort layers to smooth; the gradient is that of :meth:`scores`."""
        return self.scores(unit)

    def decide(self, unit: Tensor) -> Decided:
        """The radius is at least the distance to the nearest threshold; more, where intervals prove more."""
        require_single(self._copies)
        answers = self.rounding(unit)
        exact: Tensor = self.head(answers.double())
        action, runner_up, _ = ranked(exact.float(), unit)
        chosen = torch.from_numpy(action)
        certain = (self._same_leads(answers, exact, chosen) > 0).all(1)
        untouched = (self.rounding.distance(unit).clamp(max=REACH) - SLACK).clamp(min=0.0)
        radius = torch.where(certain, untouched, torch.zeros_like(untouched))
        # Behind the nearest threshold there often are hundreds more: it is worth a search only if a first step succeeds.
        further = certain & self._holds(unit, untouched + FIRST_STEP, chosen, careful=False)
        if bool(further.any()):
            radius[further] = self._searched(unit[further], untouched[further], chosen[further])
        return action, radius.numpy(), runner_up

    def _same_leads(self, answers: Tensor, exact: Tensor, action: Tensor) -> Tensor:
        """What is certain of the leads of the action when nothing changes but the order of sums."""
        if self.head.norms:
            rows = zip(torch.split(answers, ROWS_AT_ONCE), torch.split(action, ROWS_AT_ONCE), strict=True)
            return torch.cat([self.head.leads_over(same.double(), same.double(), a, careful=True) for same, a in rows])
        return self.head.same_leads(exact, action, 1.0, tuple(answers.shape[1:]))

    def _searched(self, unit: Tensor, untouched: Tensor, action: Tensor) -> Tensor:
        """The largest radius that intervals prove, by bisection in single precision; what is returned was proven in double."""
        low, high = untouched + FIRST_STEP, torch.full_like(untouched, REACH)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            holding = self._holds(unit, middle, action, careful=False)
            low, high = torch.where(holding, middle, low), torch.where(holding, high, middle)
        return torch.where(self._holds(unit, low, action, careful=True), low, untouched)

    def _holds(self, unit: Tensor, radius: Tensor, action: Tensor, careful: bool) -> Tensor:
        """Whether (batch,) intervals prove the actions while inputs move by at most ``radius`` (batch,)."""
        lo, hi = box_around(unit, radius.reshape(-1, 1, 1, 1), None, None)
        return (self._leads(lo, hi, action, careful) > 0).all(1)

    def _leads(self, lo: Tensor, hi: Tensor, action: Tensor, careful: bool = True) -> Tensor:
        """Thresholds are monotone, so the corners of a box of inputs give the box of their answers."""
        low, high = self.rounding(lo), self.rounding(hi)
        if careful:
            low, high = low.double(), high.double()
        return self.head.leads_over(low, high, action, careful)

    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        action = self.scores(unit).argmax(1)
        possible: npt.NDArray[np.bool_] = (~(self._leads(*box_around(unit, eps_unit, None, None), action) > 0)).numpy()
        possible[np.arange(len(unit)), action.numpy()] = True
        return possible

    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        return (self._leads(lo, hi, action) > 0).all(1)


class ThresholdPolicy(CertifiedPolicy):
    """Thresholds, then convolutions and linear layers. Arguments are the fields of :class:`ThresholdPolicyConfig`.

    >>> policy = ThresholdPolicy((1, 8, 8), 3, levels=1, conv=((4, 3, 1),), hidden=(8,))
    >>> policy.rounding.thresholds.fill_(0.5).shape
    torch.Size([1, 1, 8, 8])
    >>> policy.certify(torch.full((2, 1, 8, 8), 0.1)).radius.round(3).tolist()  # to the nearest threshold, at least
    [0.4, 0.4]
    """

    kind = "rounded"

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        n_actions: int,
        levels: int = 2,
        conv: tuple[tuple[int, int, int], ...] = ThresholdPolicyConfig.conv,
        hidden: tuple[int, ...] = ThresholdPolicyConfig.hidden,
        normalizer: Normalizer | None = None,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.config = ThresholdPolicyConfig(tuple(obs_shape), int(n_actions), levels, tuple(conv), tuple(hidden), norm)
        channels, height, width = self.config.obs_shape
        require("A policy's thresholds", 4 * levels * channels * height * width, "lower levels")
        self.normalizer = Normalizer.identity(self.obs_shape) if normalizer is None else normalizer
        if self.normalizer.obs_shape != self.obs_shape:
            raise SortRLError(
                f"ThresholdPolicy: observations have shape {self.obs_shape}, but the normalizer {self.normalizer.obs_shape}."
            )
        self.rounding = Rounding(levels, self.obs_shape)
        self.head = IntervalHead(
            (levels * channels, height, width), self.config.hidden, self.n_actions, self.config.conv, norm
        )

    def calibrate(self, unit: Tensor) -> None:
        """Nothing is estimated from states."""

    def explain(self) -> dict[str, str]:
        return {
            "network": "thresholds on pixels, then convolutions and linear layers",
            "proof": "Every pixel is compared with thresholds, so nothing changes until one of them is crossed; where some "
            "can be, intervals bound what the network makes of it.",
        }

    def _network(self, copies: Copies) -> EvaluationNetwork:
        return ThresholdEvaluation(self, copies)

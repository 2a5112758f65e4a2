"""How far a computed score can be from the exact one, and what scores are possible over a box of inputs.

Everything rests on one recursion, :func:`rounding_error`; docs/certificates.md has the proofs and the assumptions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.nets.front import AveragePool, BoundedConv, Centre, Crop, Pixels, Ramp, Scale
from sortrl.nets.layers import MeanShift, SortLinear

UNIT_ROUNDOFF = 2.0**-24  # of float32, rounding to nearest
UNDERFLOW = 2.0**-123  # what may be lost per rounding where numbers below 2^-126 are flushed to zero
# The bounds themselves are computed in float64; these factors are many times its own rounding errors.
ERROR_UP = 1.0 + 1e-6
RADIUS_DOWN = 1.0 - 1e-12
SMALLEST_RADIUS = 1e-30
LARGEST_ERROR = 1e20  # beyond it a perturbed input might overflow
LARGEST_NUMBER = 1e30  # likewise, of any number on the way
SMALLEST_LIPSCHITZ = 1e-25  # a constant network is taken to have at least this constant, so that it can be divided by
ROWS_AT_ONCE = 1024  # states of which all activations are kept at a time


FrontPart = Crop | AveragePool | Pixels | Centre | Ramp | BoundedConv | Scale


class FrontEnd(Protocol):
    """A sequence of Lipschitz front ends that can be called as one."""

    def __call__(self, unit: Tensor) -> Tensor: ...

    def __iter__(self) -> Iterator[FrontPart]: ...


class Network(Protocol):
    """The parts of a sort network, in the order in which they are applied."""

    @property
    def front(self) -> Iterable[FrontPart]: ...

    @property
    def layers(self) -> Sequence[SortLinear]: ...

    @property
    def shifts(self) -> Sequence[MeanShift]: ...

    @property
    def bias(self) -> Tensor: ...


class Stage(NamedTuple):
    """One step of a network: its l_inf constant and how many roundings a number meets on its way through."""

    lipschitz: float
    roundings: int

    @property
    def gamma(self) -> float:
        """n u / (1 - n u): the relative error that n roundings can add up to."""
        total = self.roundings * UNIT_ROUNDOFF
        return total / (1.0 - total)


class FrontConstants(NamedTuple):
    """A front end makes at most ``lipschitz * x + offset`` of inputs up to x, all signs being against it."""

    lipschitz: float
    offset: float


@dataclass(frozen=True)
class ErrorBound:
    """The rounding error of a score is at most ``magnitudes @ per_magnitude + reach * per_reach + constant``."""

    lipschitz: float
    per_magnitude: tuple[float, ...]
    per_reach: float
    constant: float
    peak: float
    """How much faster than the input any number on the way can move: the largest constant up to a stage."""
    front: tuple[FrontConstants, ...]
    stages: tuple[Stage, ...]

    def radius_and_slack(self, at_state: Any, margin: Any) -> tuple[Any, Any]:
        """(margin - slack) / (2 L), and the slack; ``at_state`` is the error at the state. Numbers or arrays alike."""
        most = margin / (2.0 * self.lipschitz)  # what is certified is less, so this bounds the reach
        slack = 4.0 * at_state + (2.0 * self.per_reach) * most
        return (margin - slack) * (RADIUS_DOWN / (2.0 * self.lipschitz)), slack

    def in_range(self, largest: Any, reach: Any) -> Any:
        """Whether nothing overflows within ``reach``, where ``largest`` is the largest number that the state leads to."""
        return largest + self.peak * reach < LARGEST_NUMBER


def stages(network: Network) -> tuple[Stage, ...]:
    """Front ends, then (sort layer, shift) pairs; the bias of the output is the last shift."""
    front = [Stage(part.lipschitz, part.roundings) for part in network.front]
    pairs = [(Stage(layer.lipschitz, layer.roundings), Stage(1.0, 1)) for layer in network.layers]
    return (*front, *itertools.chain.from_iterable(pairs))


def rounding_error(parts: Sequence[Stage], magnitudes: Tensor, reach: Tensor | float = 0.0) -> Tensor:
    """A bound, per state, on |computed score - exact score| for every input within ``reach`` of the state.

    ``magnitudes`` (batch, stages) bounds what each stage computed for the state itself.
    """
    error, gain = magnitudes.new_zeros(len(magnitudes), dtype=torch.float64), 1.0
    for part, magnitude in zip(parts, magnitudes.unbind(1), strict=True):
        gain *= part.lipschitz
        lost = part.roundings * UNDERFLOW
        exact = (magnitude.double() + lost) / (1.0 - part.gamma) + part.lipschitz * error + gain * reach
        error = (1.0 + part.gamma) * part.lipschitz * error + part.gamma * exact + lost
    return error * ERROR_UP


def front_constants(network: Network) -> tuple[FrontConstants, ...]:
    return tuple(
        FrontConstants(part.lipschitz, part.offset if isinstance(part, (BoundedConv, Centre)) else 0.0)
        for part in network.front
    )


def error_bound(network: Network) -> ErrorBound:
    """:func:`rounding_error` is affine in the magnitudes and the reach: its coefficients, read off probes."""
    _check_signs(network)
    parts = stages(network)
    probes = torch.cat([torch.zeros(1, len(parts)), torch.eye(len(parts))]).double()
    errors = rounding_error(parts, probes)
    constant = float(errors[0])
    return ErrorBound(
        lipschitz=max(math.prod(part.lipschitz for part in parts), SMALLEST_LIPSCHITZ),
        per_magnitude=tuple(((errors[1:] - constant) * ERROR_UP).tolist()),
        per_reach=(float(rounding_error(parts, probes[:1], 1.0)) - constant) * ERROR_UP,
        constant=constant,
        peak=max(itertools.accumulate((part.lipschitz for part in parts), operator.mul, initial=1.0)),
        front=front_constants(network),
        stages=parts,
    )


def _check_signs(network: Network) -> None:
    """What the lemmas assume of the parts that are never trained."""
    factors = [part.factor for part in network.front if isinstance(part, Scale)]
    wrong = [float(factor.min()) for factor in factors if not bool((factor > 0).all())]
    wrong += [float(layer.mix.min()) for layer in network.layers if not bool((layer.mix >= 0).all())]
    if wrong:
        raise SortRLError(
            f"certify: a factor on inputs or a mix of distances contains {wrong[0]}, expected positive factors and mixes "
            "without negative numbers. Build the policy again; neither is meant to be written to."
        )


def traced_scores(
    network: Network, unit: Tensor, front: tuple[FrontConstants, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """The scores of the evaluation network, and the largest number of every stage, per state (batch, stages), float64.

    ``front``: the constants of the front ends, if they are known already.
    """
    constants = front_constants(network) if front is None else front
    if len(unit) > ROWS_AT_ONCE:
        pieces = [traced_scores(network, rows, constants) for rows in torch.split(unit, ROWS_AT_ONCE)]
        return torch.cat([scores for scores, _ in pieces]), torch.cat([magnitudes for _, magnitudes in pieces])
    magnitudes, hidden, output = _trace(network, unit, constants)
    magnitudes += [_largest_of_each(group) for group in (hidden, output) if group]
    return output[1], torch.cat(magnitudes, 1).double()


def _trace(
    network: Network, unit: Tensor, constants: tuple[FrontConstants, ...]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Bounds (batch, 1) on what each front end computes; then what the hidden layers and the last one computed."""
    x, front, hidden = unit, [], []
    for part, (lipschitz, offset) in zip(network.front, constants, strict=True):
        front.append((lipschitz * _largest(x) + offset)[:, None])
        x = part(x)
    x = x.flatten(1)
    for layer, shift in zip(network.layers, network.shifts, strict=False):
        y = layer(x)
        x = shift(y)
        hidden += [y, x]
    y = network.layers[-1](x)
    return front, hidden, [y, -(y + network.bias)]


def margin_radius(
    bound: ErrorBound, magnitudes: npt.NDArray[np.float64], margin: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The radius that a margin between computed scores certifies: (margin - slack) / (2 L), or 0.

    No input within it, its border included, can reverse or level the two scores as computed. ``magnitudes`` (..., stages)
    belong to margins of shape (...), up to broadcasting.
    """
    radius, slack = bound.radius_and_slack(magnitudes @ np.array(bound.per_magnitude) + bound.constant, margin)
    sure = (radius > SMALLEST_RADIUS) & (slack < LARGEST_ERROR) & bound.in_range(magnitudes.max(-1), radius)
    certain: npt.NDArray[np.float64] = np.where(sure, radius, 0.0)
    return certain


def score_bounds(network: Network, lo: Tensor, hi: Tensor, known: ErrorBound | None = None) -> tuple[Tensor, Tensor]:
    """Bounds (batch, actions), float64, on the scores computed for any input of the boxes [lo, hi]: interval propagation.

    Each sort layer's range is exact for its own box of inputs; what is lost is how the units move together. Where numbers
    might overflow, the bounds are infinite. ``known``: the network's :func:`error_bound`, if it was computed already.
    """
    bound = error_bound(network) if known is None else known
    magnitudes = []
    for part, (lipschitz, offset) in zip(network.front, bound.front, strict=True):
        magnitudes.append(lipschitz * torch.maximum(_largest(lo), _largest(hi)) + offset)
        lo, hi = part.bounds(lo, hi) if isinstance(part, BoundedConv) else (part(lo), part(hi))
    lo, hi = lo.flatten(1), hi.flatten(1)
    for layer, shift in zip(network.layers, network.shifts, strict=False):
        lo, hi = layer.bounds(lo, hi)
        magnitudes.append(_largest(hi))
        lo, hi = shift(lo), shift(hi)
        magnitudes.append(torch.maximum(_largest(lo), _largest(hi)))
    lo, hi = network.layers[-1].bounds(lo, hi)
    magnitudes.append(_largest(hi))
    lo, hi = -(hi + network.bias), -(lo + network.bias)
    magnitudes.append(torch.maximum(_largest(lo), _largest(hi)))
    # Once for the bounds, which are rounded too, and once for the scores.
    numbers = torch.stack(magnitudes, 1)
    slack = 2.0 * rounding_error(bound.stages, numbers)
    slack = torch.where(numbers.amax(1) < LARGEST_NUMBER, slack, torch.inf)[:, None]
    return lo.double() - slack, hi.double() + slack


def proven(network: Network, lo: Tensor, hi: Tensor, action: Tensor, known: ErrorBound | None = None) -> Tensor:
    """Whether (batch,) intervals prove that every input of the box [lo, hi] is answered with ``action`` (batch,)."""
    low, high = score_bounds(network, lo, hi, known)
    chosen = action[:, None]
    result: Tensor = low.gather(1, chosen)[:, 0] > high.scatter(1, chosen, -torch.inf).amax(1)
    return result


def box_around(unit: Tensor, eps: Tensor | float, low: Tensor | None, high: Tensor | None) -> tuple[Tensor, Tensor]:
    """The smallest float32 box that holds every input within ``eps`` of ``unit`` (broadcast) and in the valid range.

    A state outside the valid range may at least stay where it is, as it may for attacks.
    """
    exact_lo, exact_hi = unit.double() - eps, unit.double() + eps
    lo, hi = exact_lo.float(), exact_hi.float()
    lo = torch.where(lo.double() > exact_lo, torch.nextafter(lo, torch.full_like(lo, -torch.inf)), lo)
    hi = torch.where(hi.double() < exact_hi, torch.nextafter(hi, torch.full_like(hi, torch.inf)), hi)
    lo = lo if low is None else torch.maximum(lo, torch.minimum(low, unit))
    hi = hi if high is None else torch.minimum(hi, torch.maximum(high, unit))
    return lo, hi


def _largest_of_each(parts: Sequence[Tensor]) -> Tensor:
    """The largest absolute number of each part, per state (batch, parts)."""
    if len({part.shape[1] for part in parts}) > 1:
        return torch.stack([part.abs().amax(1) for part in parts], 1)
    # Stacked, because for a few states every call costs more than what it computes.
    return torch.stack(list(parts), 1).abs_().amax(2)


def _largest(x: Tensor) -> Tensor:
    return x.flatten(1).abs().amax(1).double()

"""The exact radius by complete search: boxes around a state are proven or split, nearest first, until a flip is met.

Three things make it work beyond two or three dimensions. A box is proven by intervals, which know when only a few
coordinates move. It is split along the coordinate with the steepest score, so that boxes become thin where it matters
and stay wide elsewhere. And the policy is tried at the corner to which the score falls, where a flip is likeliest.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.certify.intervals import interval_radius, proven_in_box
from sortrl.core.errors import SortRLError
from sortrl.nets import SortPolicy, sort_layers_only
from sortrl.nets.float_bounds import RADIUS_DOWN, box_around

AT_ONCE = 1024  # boxes per step, over all states
FLAT_SHARE = 0.01  # of the steepest coordinate's weight that a flat one has when a box is split
SMALLEST_SIDE = 1e-6  # of a box, relative to the size of its numbers: rounding slack proves nothing smaller
FIRST_FACTORS = (1.0001, 1.02, 1.1, 1.3, 1.7, 2.5, 5.0, 20.0)


@dataclass(frozen=True)
class Bracket:
    """Per state: no input within ``lower`` changes the action; ``counter_example``, at distance ``upper``, does.

    ``upper`` is infinite where no counter-example was found; ``counter_example`` is then the state itself. ``boxes`` is
    the number of boxes that were looked at.
    """

    lower: npt.NDArray[np.float64]
    upper: npt.NDArray[np.float64]
    counter_example: Tensor
    boxes: int

    @property
    def gap(self) -> npt.NDArray[np.float64]:
        """What is left unknown; infinite where no counter-example was found."""
        return self.upper - self.lower


@dataclass(frozen=True)
class _Boxes:
    """Boxes that are neither proven nor given up: whose they are, how near they come, where their parent's score fell."""

    state: Tensor
    lo: Tensor
    hi: Tensor
    slope: Tensor
    distance: Tensor

    def __len__(self) -> int:
        return len(self.state)

    def where(self, chosen: Tensor) -> _Boxes:
        return _Boxes(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def with_more(self, other: _Boxes) -> _Boxes:
        return _Boxes(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in self.__dataclass_fields__))


@torch.no_grad()
def exact_radius(
    policy: SortPolicy,
    unit: Tensor,
    low: Tensor | None = None,
    high: Tensor | None = None,
    *,
    tolerance: float = 1e-3,
    reach: float = 1.0,
    boxes_per_state: int = 20_000,
    time_limit: float = math.inf,
    seed: int = 0,
) -> Bracket:
    """Bracket the distance from each state to the nearest valid input that changes the action, up to ``reach``.

    Stops for a state when its bracket is at most ``tolerance`` wide, or nothing within ``reach`` changes the action, or
    after ``boxes_per_state``; for all of them after ``time_limit`` seconds (results then depend on the machine). Both
    ends are sound whenever it stops. Meant for up to about 8 dimensions.

    >>> policy = SortPolicy((2,), 2, width=16, depth=2)
    >>> bracket = exact_radius(policy, torch.zeros(1, 2))
    >>> bool(bracket.lower[0] <= bracket.upper[0])
    True
    """
    sort_layers_only(policy, "The complete search")
    if not tolerance > 0 or not reach > 0 or len(policy.obs_shape) != 1:
        raise SortRLError(
            f"exact_radius: tolerance {tolerance}, reach {reach}, observations of shape {policy.obs_shape}; expected "
            "positive numbers and a vector of observations."
        )
    deadline = time.monotonic() + time_limit
    search = _Search(policy, unit, low, high, tolerance, reach, torch.Generator().manual_seed(seed))
    search.look_around()
    while len(search.boxes) and time.monotonic() < deadline:
        search.step(boxes_per_state)
    return search.bracket()


class _Search:
    """The frontier of every state, the best counter-examples, and what is proven so far."""

    def __init__(
        self,
        policy: SortPolicy,
        unit: Tensor,
        low: Tensor | None,
        high: Tensor | None,
        tolerance: float,
        reach: float,
        generator: torch.Generator,
    ) -> None:
        self.policy, self.unit, self.tolerance, self.reach = policy, unit, tolerance, reach
        self.low = torch.full(policy.obs_shape, -torch.inf) if low is None else low
        self.high = torch.full(policy.obs_shape, torch.inf) if high is None else high
        self.generator = generator
        self.action = torch.from_numpy(policy.certify_unit(unit).action)
        self.proven = torch.from_numpy(interval_radius(policy, unit, low, high, reach=reach))
        self.upper = torch.full((len(unit),), torch.inf, dtype=torch.float64)
        self.counter_example = unit.clone()
        self.looked_at = torch.zeros(len(unit), dtype=torch.long)
        # The nearest box that was given up as too small to prove: nothing is known from there on.
        self.given_up = torch.full_like(self.upper, torch.inf)
        lo, hi = box_around(unit, reach, self.low, self.high)
        self.boxes = _Boxes(torch.arange(len(unit)), lo, hi, torch.zeros_like(unit), torch.zeros_like(self.upper))

    @property
    def horizon(self) -> Tensor:
        """How far there is anything left to learn."""
        return self.upper.clamp(max=self.reach)

    @property
    def lower(self) -> Tensor:
        """Nothing nearer than the nearest open box changes the action."""
        nearest = self.given_up.scatter_reduce(0, self.boxes.state, self.boxes.distance, "amin")
        return torch.maximum(torch.minimum(nearest, self.horizon) * RADIUS_DOWN, self.proven)

    def bracket(self) -> Bracket:
        found = self.upper < torch.inf
        if bool((self.policy.scores(self.counter_example[found]).argmax(1) == self.action[found]).any()):
            raise SortRLError(
                "exact_radius: a counter-example changes nothing when it is computed again. Scores must not depend on the "
                "batch they are computed in; please report this with the policy."
            )
        if bool((self.lower >= self.upper).any()):
            raise SortRLError(
                "exact_radius: a counter-example lies within a certified radius. This is a bug: please report it with the policy."
            )
        return Bracket(self.lower.numpy(), self.upper.numpy(), self.counter_example, int(self.looked_at.sum()))

    def step(self, boxes_per_state: int) -> None:
        """Look at the nearest boxes of every open state: drop what is proven, try the rest and split it."""
        self.proven = torch.maximum(self.proven, self.lower)
        state, distance = self.boxes.state, self.boxes.distance
        settled = (self.horizon - self.proven <= self.tolerance) | (self.looked_at >= boxes_per_state)
        # What belongs to a settled state needs no box: its lower bound is in `proven`.
        self.given_up = torch.where(settled, torch.minimum(self.given_up, self.proven), self.given_up)
        self.boxes = self.boxes.where(~settled[state] & (distance < self.horizon[state]))
        chosen = self._nearest()
        taken, self.boxes = self.boxes.where(chosen), self.boxes.where(~chosen)
        if not len(taken):
            return
        self.looked_at += torch.bincount(taken.state, minlength=len(self.unit))
        taken = self._within_horizon(taken)
        taken = taken.where(~proven_in_box(self.policy, taken.lo, taken.hi, self.action[taken.state]))
        if len(taken):
            self.boxes = self.boxes.with_more(self._split(self._tried(taken)))

    def _nearest(self) -> Tensor:
        """The nearest boxes of each state, an equal share of a batch for each, as a mask."""
        state = self.boxes.state
        share = max(1, AT_ONCE // max(1, int((torch.bincount(state) > 0).sum())))
        order = torch.argsort(self.boxes.distance, stable=True)
        order = order[torch.argsort(state[order], stable=True)]
        rank = torch.arange(len(state)) - torch.searchsorted(state[order], state[order])
        chosen = torch.zeros(len(state), dtype=torch.bool)
        chosen[order[rank < share]] = True
        return chosen

    def _within_horizon(self, boxes: _Boxes) -> _Boxes:
        lo, hi = box_around(self.unit[boxes.state], self.horizon[boxes.state][:, None], None, None)
        return replace(boxes, lo=torch.maximum(boxes.lo, lo), hi=torch.minimum(boxes.hi, hi))

    def _tried(self, boxes: _Boxes) -> _Boxes:
        """Try one point of each box, the corner to which its parent's score fell; keep what is learnt."""
        centre = _middle(boxes.lo, boxes.hi)
        corner = torch.where(boxes.slope > 0, boxes.lo, torch.where(boxes.slope < 0, boxes.hi, centre))
        scores, slope = self._scores_and_slope(corner, boxes.state)
        self._note_flips(corner, scores, boxes.state)
        return replace(boxes, slope=slope)

    def _split(self, boxes: _Boxes) -> _Boxes:
        """Halve each box along its steepest coordinate, or give it up if it is too small for that."""
        smallest_side = SMALLEST_SIDE * (1.0 + self.reach + self.unit[boxes.state].abs())
        width = torch.where(boxes.hi - boxes.lo > smallest_side, boxes.hi - boxes.lo, 0.0)
        too_small = (width == 0.0).all(1)
        self.given_up.scatter_reduce_(0, boxes.state[too_small], boxes.distance[too_small], "amin")
        boxes, width = boxes.where(~too_small), width[~too_small]
        steepness = boxes.slope.abs() / boxes.slope.abs().sum(1, keepdim=True).clamp(min=1e-9)
        along = (width * (steepness + FLAT_SHARE)).argmax(1, keepdim=True)
        cut = _middle(boxes.lo, boxes.hi).gather(1, along)
        below = replace(boxes, hi=boxes.hi.scatter(1, along, cut))
        above = replace(boxes, lo=boxes.lo.scatter(1, along, cut))
        halves = below.with_more(above)
        x = self.unit[halves.state].double()
        outside = torch.maximum(halves.lo.double() - x, x - halves.hi.double()).amax(1).clamp(min=0.0)
        return replace(halves, distance=outside)

    def look_around(self) -> None:
        """First counter-examples: signs of gradients and random corners at growing radii, then along the line back."""
        states = torch.arange(len(self.unit))
        for factor in FIRST_FACTORS:
            eps = (self.proven.clamp(min=1e-4) * factor).clamp(max=self.reach).float()[:, None]
            # States that have a nearer one already are left out.
            at = states[self.upper > eps[:, 0]]
            if not len(at):
                continue
            x, room = self.unit[at], eps[at]
            point = x
            for _ in range(4):
                _, slope = self._scores_and_slope(point, at)
                point = self._valid(x + torch.clamp(point - x - room * slope.sign(), -room, room), at)
                self._note_flips(point, self.policy.scores(point), at)
            for _ in range(4):
                signs = torch.sign(torch.rand(x.shape, generator=self.generator) - 0.5)
                point = self._valid(x + room * signs, at)
                self._note_flips(point, self.policy.scores(point), at)
        self._walk_back()

    def _walk_back(self) -> None:
        """Bisect between each state and its counter-example."""
        at = torch.arange(len(self.unit))[self.upper < torch.inf]
        if not len(at):
            return
        x, end = self.unit[at], self.counter_example[at]
        near, far = torch.zeros(len(at), 1), torch.ones(len(at), 1)
        for _ in range(14):
            share = (near + far) / 2
            point = self._valid(x + share * (end - x), at)
            scores = self.policy.scores(point)
            self._note_flips(point, scores, at)
            flipped = (scores.argmax(1) != self.action[at])[:, None]
            near, far = torch.where(flipped, near, share), torch.where(flipped, share, far)

    def _valid(self, point: Tensor, at: Tensor) -> Tensor:
        x = self.unit[at]
        inside = torch.maximum(point, torch.minimum(self.low, x))
        return torch.minimum(inside, torch.maximum(self.high, x))

    def _scores_and_slope(self, point: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and the gradient of the margin of each state's action."""
        with torch.enable_grad():
            point = point.detach().requires_grad_(True)
            scores = self.policy.scores(point)
            chosen = self.action[at][:, None]
            margin = scores.gather(1, chosen)[:, 0] - scores.scatter(1, chosen, -torch.inf).amax(1)
            (slope,) = torch.autograd.grad(margin.sum(), point)
        return scores.detach(), slope

    def _note_flips(self, point: Tensor, scores: Tensor, at: Tensor) -> None:
        """Keep the nearest points at which the policy, as computed, acts differently."""
        distance = (point.double() - self.unit[at].double()).abs().amax(1)
        better = (scores.argmax(1) != self.action[at]) & (distance < self.upper[at])
        point, at, distance = point[better], at[better], distance[better]
        self.upper.scatter_reduce_(0, at, distance, "amin")
        nearest = distance == self.upper[at]
        self.counter_example[at[nearest]] = point[nearest]


def _middle(lo: Tensor, hi: Tensor) -> Tensor:
    """The midpoint as a float32 number of the box itself."""
    centre = ((lo.double() + hi.double()) / 2).float()
    return torch.minimum(torch.maximum(centre, lo), hi)

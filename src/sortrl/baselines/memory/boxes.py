"""States of one action put together: boxes that hold many of them, and stay away from all states of other actions.

The first layer of a memory measures how far an input is from a remembered state. The same layer can measure how far it is from
a box that is open on some sides: with all numbers in [c - h, c + h],

    |x - (t - h)| - h  is x - t where x > t, and at most 0 elsewhere      (the side "x <= t" of a box)
    |x - (t + h)| - h  is t - x where x < t, and at most 0 elsewhere      (the side "x >= t")
    |x - c| - h        is at most 0                                       (no side at all)

so max_i |x_i - w_i| - h is the l_inf distance to the box where x lies outside, and at most 0 inside. A box needs few sides to
stay away from every state of another action, and then holds many states of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl import ops

Floats = npt.NDArray[np.float32]
# What rounding of the weights, and of what is computed, may take from a distance: shares of the range of the numbers.
LOST_IN_HALF, LOST = 2.0**-10, 2.0**-20
_SIDE = 0.02  # what a side costs besides the share of friends that it loses
_SEEDS = 32  # boxes that are grown side by side
_NEAR, _ANY = 192, 64  # states that a box is grown with at first: the nearest, and any
_TRIED = 48  # sides that are compared each time, those that hold most states off
_MORE = 96  # states that it is held back from in each further round
_ROUNDS = 100
_LARGEST_COVER = 1 << 29
_TINY = 1e-6


@dataclass(frozen=True)
class Boxes:
    """Rows of the first layer, which action each stands for, and what is to be subtracted from the distance."""

    weight: Tensor
    actions: Tensor
    offset: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    def some(self, index: Tensor) -> Boxes:
        return Boxes(self.weight[index], self.actions[index], self.offset[index])

    def distances(self, states: Tensor) -> Tensor:
        """(boxes, states); at most 0 inside."""
        return ops.max_dist(self.weight, states) - self.offset[:, None]


@dataclass(frozen=True)
class Range:
    """Where all numbers lie: within ``half`` of ``centre``."""

    centre: float
    half: float
    in_half_precision: bool = True
    """Whether weights are rounded so that half precision holds them."""

    @property
    def lost(self) -> float:
        return 2.0 * self.half * (LOST_IN_HALF if self.in_half_precision else LOST)


def cover(states: Tensor, actions: Tensor, numbers: Range, gap: float, most: int | None = None) -> Boxes | None:
    """Boxes that hold all states (n, pixels) and are away from those of other actions: as far as the state that a box was
    grown from is, or ``gap`` if that is less, up to ``2 lost``. None if that takes more than ``most`` boxes.

    >>> states = torch.tensor([[0.0, 0.3], [0.1, 0.8], [0.2, 0.1], [1.0, 0.4], [0.9, 0.6]])
    >>> len(cover(states, torch.tensor([0, 0, 0, 1, 1]), Range(0.5, 0.5), gap=0.2))
    2
    """
    rng = np.random.default_rng(0)
    grower = _Grower(states, actions, numbers, gap, rng)
    covered = torch.zeros(len(states), dtype=torch.bool)
    parts: list[Boxes] = []
    order = torch.from_numpy(rng.permutation(len(states)))
    while len(left := order[~covered[order]]):
        seeds = left[:_SEEDS]
        found = grower.grow(seeds, covered)
        inside = (found.distances(states) <= numbers.lost) & (found.actions[:, None] == actions)
        new = []
        for row, seed in enumerate(seeds.tolist()):
            if not covered[seed]:  # by a box that was grown beside it
                covered |= inside[row]
                covered[seed] = True
                new.append(row)
        parts.append(found.some(torch.tensor(new)))
        # Some will turn out not to be needed, but hardly half of them.
        if most is not None and sum(map(len, parts)) > 2 * most:
            return None
    boxes = Boxes(*(torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "actions", "offset")))
    boxes = boxes.some(_needed(boxes, states, actions, numbers.lost))
    return None if most is not None and len(boxes) > most else boxes


class _Grower:
    """Boxes around seeds: each is open at first, and gets sides until all states of other actions are outside, far enough."""

    def __init__(self, states: Tensor, actions: Tensor, numbers: Range, gap: float, rng: np.random.Generator) -> None:
        self.states, self.actions, self.range, self.gap = states, actions, numbers, gap
        self.rng, self.numbers = rng, states.numpy()

    def grow(self, seeds: Tensor, covered: Tensor) -> Boxes:
        distance = ops.max_dist(self.states[seeds], self.states)
        own = self.actions[seeds][:, None] == self.actions
        need = distance.clamp(max=self.gap).masked_fill(own, -torch.inf)
        boxes = [_Box(self.numbers[seed]) for seed in seeds.tolist()]
        for row, box in enumerate(boxes):
            outside = self._some(distance[row].masked_fill(own[row], torch.inf))
            friends = self._some(distance[row].masked_fill(~own[row] | covered, torch.inf))
            box.friends = _twice(self.numbers[friends])
            box.hold(self.numbers[outside], need[row].numpy()[outside])
        waiting = [row for row, box in enumerate(boxes) if not box.failed]
        for _ in range(_ROUNDS):
            if not waiting:
                break
            found = self._built([boxes[row] for row in waiting], self.actions[seeds[waiting]])
            missing = need[waiting] - self.range.lost - found.distances(self.states)
            worst = missing.topk(min(_MORE, missing.shape[1]), dim=1)
            still = []
            for row, values, index in zip(waiting, worst.values, worst.indices, strict=True):
                short = index[values > 0].numpy()
                if len(short):
                    boxes[row].hold(self.numbers[short], need[row].numpy()[short])
                    if not boxes[row].failed:
                        still.append(row)
            waiting = still
        for row in waiting:  # numbers so large that rounding moves a side further than it may
            boxes[row].failed = True
        return self._built(boxes, self.actions[seeds])

    def _some(self, distance: Tensor) -> npt.NDArray[np.int64]:
        """The nearest states, and any; none at infinity."""
        near = distance.topk(min(_NEAR, len(distance)), largest=False)
        possible = torch.nonzero(distance.isfinite())[:, 0].numpy()
        others = self.rng.choice(possible, min(_ANY, len(possible)), replace=False) if len(possible) else possible
        return np.union1d(near.indices[near.values.isfinite()].numpy(), others)

    def _built(self, boxes: list[_Box], actions: Tensor) -> Boxes:
        weight = torch.from_numpy(np.stack([box.weight(self.range) for box in boxes]))
        offset = torch.tensor([0.0 if box.failed else self.range.half for box in boxes])
        return Boxes(weight.half().float() if self.range.in_half_precision else weight, actions, offset)


class _Box:
    """A box in the making. Where a number would need a side above and one below, it fails, and becomes its seed alone.

    Numbers are taken twice, as they are and negated, so that every side is a largest number.
    """

    def __init__(self, seed: Floats) -> None:
        self.seed = seed
        self.friends = _twice(seed[None][:0])
        """States of the same action, those that the box still holds."""
        self.limit = np.full(2 * len(seed), np.inf, np.float32)
        self.failed = False

    def weight(self, numbers: Range) -> Floats:
        """The row of the first layer."""
        above, below = np.split(self.limit, 2)
        half = np.float32(numbers.half)
        sided = np.where(np.isfinite(below), half - below, np.float32(numbers.centre))
        return self.seed if self.failed else np.where(np.isfinite(above), above - half, sided).astype(np.float32)

    def hold(self, states: Floats, need: Floats) -> None:
        """Add sides until all of some states are outside by what they need: a set cover, weighted by the friends lost."""
        states, seed = _twice(states), _twice(self.seed[None])[0]
        most = states - need[:, None]  # the largest limit that holds a state off
        covers = most >= seed - _TINY
        covers[:, np.roll(np.isfinite(self.limit), len(self.seed))] = False  # the other side of a number that has one
        counts = covers.sum(0)
        while len(most):
            best = np.argpartition(counts, -_TRIED)[-_TRIED:] if len(counts) > _TRIED else np.arange(len(counts))
            best = best[counts[best] > 0]
            if not len(best):
                self.failed = True
                return
            limits = np.minimum(np.where(covers[:, best], most[:, best], np.inf).min(0), self.limit[best])
            lost = (self.friends[:, best] > limits).sum(0) / max(1, len(self.friends))
            chosen = int((counts[best] / (_SIDE + lost)).argmax())
            side = int(best[chosen])
            self.limit[side] = max(limits[chosen], seed[side])
            self.friends = self.friends[self.friends[:, side] <= self.limit[side]]
            held, other = covers[:, side], (side + len(self.seed)) % len(seed)
            counts -= covers[held].sum(0)
            covers, most = covers[~held], most[~held]
            covers[:, other], counts[other] = False, 0


def _twice(states: Floats) -> Floats:
    return np.concatenate([states, -states], 1)


def _needed(boxes: Boxes, states: Tensor, actions: Tensor, lost: float) -> Tensor:
    """Of all boxes, enough to hold every state, found greedily."""
    result = []
    for action in sorted(set(boxes.actions.tolist())):
        own, mine = torch.nonzero(boxes.actions == action)[:, 0], torch.nonzero(actions == action)[:, 0]
        if len(own) * len(mine) > _LARGEST_COVER:
            result.append(own)
            continue
        inside = boxes.some(own).distances(states[mine]) <= lost
        result.append(own[greedy_cover(inside.T)])
    return torch.cat(result).sort().values


def greedy_cover(covers: Tensor) -> list[int]:
    """Columns that cover all rows of a boolean matrix that can be, found greedily."""
    chosen = []
    counts = covers.sum(0)
    while len(covers) and int(counts.max()) > 0:
        best = int(counts.argmax())
        hit = covers[:, best]
        counts -= covers[hit].sum(0)
        covers = covers[~hit]
        chosen.append(best)
    return chosen

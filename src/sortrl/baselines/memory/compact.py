"""A memory made small: it looks at few pixels, and puts states together, yet answers every remembered state as before.

A student that remembers (:mod:`sortrl.baselines.memory.remember`) needs its pixels only to tell states of different actions apart, and states
of one action may share a memory. Both are chosen with the certificates in mind:

- pixels: a greedy set cover of pairs of states, where a pixel covers a pair that differs there by what their whole pictures
  differ, or by ``gap`` if that is less. Pairs are sought among the nearest on the pixels chosen so far, until none is left
  that one more pixel would part.
- memories: boxes (:mod:`sortrl.baselines.memory.boxes`) that hold many states and stay away from those of other actions as far as the states
  themselves do, or by ``gap`` if that is less.

So no radius gets smaller than ``gap / 2`` by either, up to rounding. Where the result is too large, ``gap`` is lowered: states
then keep their answers, and less of their radii.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl import ops
from sortrl.baselines.memory.boxes import Boxes, Range, cover, greedy_cover
from sortrl.baselines.memory.remember import seen_by
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.nets import SortPolicy

EPS_KEEP = 20 / 255
SIZE = 5_000_000
GAPS = (
    4.8,
    3.4,
    2.4,
    1.2,
    0.6,
    0.3,
    0.12,
)  # in units of eps, tried until the memory is small enough; 2.4 keeps eps itself
REPORTED = tuple(k / 255 for k in (1, 5, 15, 40))
SAMPLE = 512  # states whose radii are compared
_FIRST_ROWS = 2048  # pixels are sought on this many states first, and on four times as many each time
_NEAREST = 4  # pairs per state and round
_ENTRIES = 1 << 25  # numbers per block of distances
_PAIR_ENTRIES = 1 << 26  # pixels of pairs that are looked at together
_TINY = 1e-6


@dataclass(frozen=True)
class Compacted:
    """A small memory, and what was lost on the way."""

    policy: SortPolicy
    states: int
    """Remembered, all of which are answered as before."""
    eps_kept: float
    """Every state keeps a radius of this size, or its own if that was smaller (less a thousandth, for rounding)."""
    certified_before: tuple[float, ...]
    """Shares of (a sample of) the states with radii above ``REPORTED`` when all pixels and states are kept."""
    certified_after: tuple[float, ...]

    @property
    def size(self) -> int:
        """Bytes, about, of a file in half precision."""
        return stored_bytes(self.policy.config.width, len(self.policy.config.pixels), self.policy)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "states": self.states,
            "memories": self.policy.config.width,
            "pixels": len(self.policy.config.pixels),
            "bytes": self.size,
            "eps_kept": self.eps_kept,
            "eps": list(REPORTED),
            "certified_before": list(self.certified_before),
            "certified_after": list(self.certified_after),
        }


def stored_bytes(memories: int, pixels: int, policy: SortPolicy) -> int:
    """Bytes, about, of a memory's file in half precision: weights, means, the normaliser and the list of pixels."""
    numbers = sum(part.numel() for part in (policy.normalizer.mean, policy.normalizer.scale))
    return memories * (2 * (pixels + policy.n_actions) + 4) + 8 * numbers + 8 * pixels + 4096


@torch.no_grad()
def compact(
    demos: Demonstrations,
    normalizer: Normalizer,
    pool: int = 1,
    crop: tuple[int, ...] = (0, 0, 0, 0),
    eps_keep: float = EPS_KEEP,
    size: int = SIZE,
) -> Compacted:
    """The memory of :func:`sortrl.baselines.memory.remember.remember` with few pixels and few states, and the same answer to every state.

    ``eps_keep`` is the radius (unit space) that states keep if they have it: more than that if there is room, less if the file
    in half precision would exceed ``size`` bytes otherwise. A memory that cannot be made so small is returned as it is.
    """
    if not 0 < eps_keep < float("inf"):
        raise SortRLError(f"compact: eps_keep is {eps_keep}, expected a positive number in unit space.")
    front = SortPolicy(
        tuple(demos.obs.shape[1:]), demos.n_actions, 1, 2, 0.0, crop=crop, pool=pool, normalizer=normalizer
    )
    states = _States(demos, front)
    for gap in GAPS:
        pixels = choose_pixels(states, gap * eps_keep)
        most = (size - stored_bytes(0, len(pixels), front)) // (2 * (len(pixels) + demos.n_actions) + 4)
        found = _faithful(states, pixels, gap * eps_keep, None if gap == GAPS[-1] else most)
        if found is not None:
            break
    assert found is not None
    policy, lost = found
    eps_kept = max(0.0, gap * eps_keep / 2 - lost)
    rows = np.sort(np.random.default_rng(0).permutation(len(demos))[:SAMPLE])
    # Pictures of bytes have radii that are just as large as what is reported; a certificate would stay below, for rounding.
    before, after = nearest_other(states, rows) / 2 - _TINY, policy.certify(demos.obs[rows]).radius
    shares = [tuple(float((radii > eps).mean()) for eps in REPORTED) for radii in (before, after)]
    return Compacted(policy, len(demos), eps_kept, *shares)


def _faithful(states: _States, pixels: list[int], gap: float, most: int | None) -> tuple[SortPolicy, float] | None:
    """The policy, and what rounding may have taken from radii; None if it takes too many memories. In half precision, unless
    states lie so close that this would change an answer."""
    values = states.on(pixels)
    possible = values.numpy() if states.levels is None else states.levels
    low, high = float(possible.min()), float(possible.max())
    width = 2.0 ** math.ceil(math.log2(max(high - low, 2.0**-10)))  # a power of 2 is exact in any precision
    for in_half_precision in (True, False):
        numbers = Range(low + width / 2, width / 2, in_half_precision)
        boxes = cover(values, states.actions, numbers, gap, most)
        if boxes is None:
            return None
        policy = _policy(states.front, pixels, boxes, width)
        answers = np.concatenate([policy.predict(states.obs[rows])[0] for rows in _blocks(len(states), 1024)])
        wrong = int((answers != states.actions.numpy()).sum())
        if not wrong:
            return policy, numbers.lost
    raise SortRLError(
        f"compact: {wrong} of {len(states)} states would be answered otherwise. They lie too close to each other for numbers "
        "of this size; scale the observations."
    )


def _policy(front: SortPolicy, pixels: list[int], boxes: Boxes, width: float) -> SortPolicy:
    """z_a = max_k |y_k - v_a,k| = 2 width - min over boxes of other actions of y_k - offset_k, as in :mod:`sortrl.baselines.memory.remember`.

    Distances y are at most 1.5 width, so the terms of the own action, where v is 0.75 width, never count.
    """
    config = replace(front.config, width=len(boxes), pixels=tuple(pixels))
    policy = SortPolicy(**vars(config), normalizer=front.normalizer)
    own = boxes.actions[None] == torch.arange(policy.n_actions)[:, None]
    policy.layers[0].weight.copy_(boxes.weight)
    policy.layers[1].weight.copy_(torch.where(own, 0.75 * width, 2.0 * width + boxes.offset))
    return policy


class _States:
    """What the front ends leave of the states, found when it is asked for: at once it may be more than fits into memory."""

    def __init__(self, demos: Demonstrations, front: SortPolicy) -> None:
        self.demos, self.front, self.obs = demos, front, demos.obs
        self.levels = _levels(front) if demos.obs.dtype == np.uint8 else None
        size = math.prod(front.obs_shape)
        # Which number of the observation each one of the picture is: cropping leaves them as they are.
        self._places = (
            front.front(torch.arange(size, dtype=torch.float64).view(1, *front.obs_shape)).flatten().long().numpy()
        )
        # States that crop and pool have made equal have one answer: of equal scores the first action is played.
        first: dict[bytes, int] = {}
        names = []
        for rows in _blocks(len(demos), 1024):
            for row, picture in zip(range(rows.start, rows.stop), self.rows(rows).numpy(), strict=True):
                names.append(hashlib.blake2b(picture.tobytes(), digest_size=16).digest())
                action = int(demos.actions[row])
                first[names[-1]] = min(action, first.get(names[-1], action))
        self.actions = torch.tensor([first[name] for name in names])

    @property
    def width(self) -> int:
        """Numbers per whole picture."""
        return self.front.layers[0].weight.shape[1]

    def __len__(self) -> int:
        return len(self.obs)

    def rows(self, index: Any) -> Tensor:
        """Whole pictures, flat."""
        return self._seen(self.obs[index], slice(None))

    def _seen(self, obs: npt.NDArray[np.generic], pixels: Any) -> Tensor:
        if self.levels is None or self.front.config.pool > 1:
            return seen_by(self.front, obs)[:, pixels]
        return torch.from_numpy(self.levels[obs.reshape(len(obs), -1)[:, self._places[pixels]]])

    def on(self, pixels: list[int], index: npt.NDArray[np.int64] | None = None) -> Tensor:
        """States, all or some, on some pixels: (n, len(pixels))."""
        index = np.arange(len(self)) if index is None else index
        return torch.cat([self._seen(self.obs[index[block]], pixels) for block in _blocks(len(index), 1024)])


def _levels(front: SortPolicy) -> npt.NDArray[np.float32] | None:
    """What the normaliser makes of each byte, if it makes the same of it everywhere: looking it up is much faster."""
    shape = front.obs_shape
    levels = np.arange(256, dtype=np.uint8).reshape(-1, *[1] * len(shape))
    found = front.normalize(np.tile(levels, (1, *shape))).flatten(1)
    return found[:, 0].contiguous().numpy() if bool((found == found[:, :1]).all()) else None


def choose_pixels(states: _States, apart: float) -> list[int]:
    """Pixels on which each state is as far from those of other actions as in the whole picture, or ``apart`` at least."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(states))
    pixels: list[int] = []
    size = _FIRST_ROWS
    while True:  # most pixels are found among few states, which are quickly compared
        _part(states, np.sort(order[:size]), pixels, apart, rng)
        if size >= len(states):
            return sorted(pixels) or [0]
        size *= 4


def _part(
    states: _States, rows: npt.NDArray[np.int64], pixels: list[int], apart: float, rng: np.random.Generator
) -> None:
    """Add pixels until those in ``rows`` are apart from each other."""
    actions = states.actions[torch.from_numpy(rows)]
    if len(set(actions.tolist())) < 2:
        return
    values = states.on(pixels, rows)
    most = max(256, _PAIR_ENTRIES // states.width) // _NEAREST
    active = torch.arange(len(rows))
    while len(active):
        near, who = _nearest(values, actions, active) if pixels else _strangers(actions, active, rng)
        close = near[:, 0] < apart - _TINY  # the others are done: more pixels never bring states nearer
        active, near, who = active[close], near[close], who[close]
        if not len(active):
            return
        some = torch.from_numpy(rng.permutation(len(active))[:most])
        one, two = active[some].repeat_interleave(near.shape[1]), who[some].flatten()
        differ = torch.cat(
            [
                states.rows(rows[a]).sub_(states.rows(rows[b])).abs_()
                for a, b in zip(torch.split(one, 512), torch.split(two, 512), strict=True)
            ]
        )
        wanted = differ.amax(1).clamp(max=apart)
        parted = near[some].flatten() >= wanted - _TINY
        new = greedy_cover((differ >= wanted[:, None] - _TINY)[~parted])
        # Where the nearest state is as far as in the whole picture, the radius is what it was, and the others do not matter.
        waiting = torch.ones(len(active), dtype=torch.bool)
        waiting[some] = ~parted.view(len(some), near.shape[1])[:, 0]
        active = active[waiting]
        if new:
            pixels += new
            values = torch.cat([values, states.on(new, rows)], 1)


def _strangers(actions: Tensor, active: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """In place of :func:`_nearest` while there is no pixel: any states of other actions."""
    who = torch.empty(len(active), _NEAREST, dtype=torch.int64)
    for action in sorted(set(actions[active].tolist())):
        mine, others = actions[active] == action, torch.nonzero(actions != action)[:, 0]
        who[mine] = others[torch.from_numpy(rng.integers(0, len(others), (int(mine.sum()), _NEAREST)))]
    return torch.zeros(who.shape), who


def _nearest(values: Tensor, actions: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """Of each active state, how far the nearest states of other actions are, and which; the nearest first."""
    near, who = [], []
    for rows in torch.split(active, max(1, _ENTRIES // len(values))):
        distance = ops.max_dist(values[rows], values)
        distance.masked_fill_(actions[rows][:, None] == actions, torch.inf)
        found = distance.topk(min(_NEAREST, len(values)), largest=False)
        near.append(found.values)
        who.append(found.indices)
    return torch.cat(near), torch.cat(who)


def nearest_other(states: _States, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """How far some states are, in the whole picture, from the nearest of all states with another answer."""
    some = states.rows(rows)
    least = torch.full((len(rows),), torch.inf)
    for block in _blocks(len(states), 1024):
        distance = ops.max_dist(some, states.rows(block))
        distance.masked_fill_(states.actions[rows][:, None] == states.actions[block], torch.inf)
        least = torch.minimum(least, distance.amin(1))
    return least.double().numpy()


def _blocks(n: int, size: int) -> list[slice]:
    return [slice(begin, min(n, begin + size)) for begin in range(0, n, size)]

"""Square (Andriushchenko et al., 2020): random search that needs scores, or only actions, and no gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks import losses
from sortrl.attacks.base import Attack, Target, like
from sortrl.core.errors import SortRLError

FIRST_SHARE = 0.8  # of the coordinates that the first proposals move
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # of the queries, after which the share is halved


@dataclass(frozen=True)
class Square(Attack):
    """Random search at the corners of the eps ball: ``queries`` proposals per state, kept where the margin does not fall.

    For images a proposal sets one square to +-eps per channel; for vectors a random subset of the coordinates. Squares
    and subsets shrink along the search. Of a policy that tells only its actions, every proposal is kept until one works.
    """

    queries: int = 1000
    needs_gradient = False

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise SortRLError(f"Square: queries={self.queries}, expected at least 1.")

    @property
    def name(self) -> str:
        return "Square" + ("" if self.queries == 1000 else f"-{self.queries}")

    def search(self, target: Target) -> Tensor:
        found, left = target.unit.clone(), torch.arange(len(target))
        part, x, value = target, target.unit, torch.full((len(target),), -math.inf)
        for query in range(self.queries):
            tried = part.project(_first(part) if query == 0 else _moved(part, x, share_at(query / self.queries)))
            tried_value = losses.margin(part.clean)(part.counter.scores(tried))
            keep = tried_value >= value
            x = torch.where(like(keep, x), tried, x)
            value = torch.maximum(tried_value, value)
            done = value > 0
            if bool(done.any()):
                found[left[done]] = x[done]
                left, x, value, part = left[~done], x[~done], value[~done], part.subset(~done)
            if len(left) == 0:
                break
        found[left] = x
        return found


def share_at(progress: float) -> float:
    """The share of the coordinates to move when this share of the queries is used up.

    >>> share_at(0.0), share_at(0.5)
    (0.8, 0.00625)
    """
    return FIRST_SHARE / 2.0 ** sum(progress > past for past in HALVINGS)


def _first(target: Target) -> Tensor:
    """A random corner; for images one of vertical stripes, to which convolutions are most sensitive."""
    shape = target.unit.shape[1:]
    stripes = (*shape[:-2], 1, shape[-1]) if len(shape) >= 2 else tuple(shape)
    return target.unit + target.eps * _signs(target, stripes)


def _moved(target: Target, x: Tensor, share: float) -> Tensor:
    """``x`` with a random square (images) or a random subset of coordinates (vectors) set to +-eps."""
    shape = target.unit.shape[1:]
    if len(shape) >= 2:
        chosen = _squares(target, share)
        corner = target.unit + target.eps * _signs(target, (*shape[:-2], 1, 1))
    else:
        count = max(1, round(share * shape[0]))
        rank = target.rand(shape[0]).argsort(1).argsort(1)
        chosen, corner = rank < count, target.unit + target.eps * _signs(target, tuple(shape))
    return torch.where(chosen, corner, x)


def _squares(target: Target, share: float) -> Tensor:
    """One square mask per state, over the last two dimensions."""
    height, width = target.unit.shape[-2:]
    side = min(max(1, round(math.sqrt(share * height * width))), height, width)
    place = target.rand(2)
    inside = []
    for axis, size in enumerate((height, width)):
        first = (place[:, axis : axis + 1] * (size - side + 1)).long()
        pixel = torch.arange(size)
        inside.append((pixel >= first) & (pixel < first + side))
    square = inside[0][:, :, None] & inside[1][:, None, :]
    return square.reshape(len(target), *[1] * (target.unit.ndim - 3), height, width)


def _signs(target: Target, shape: tuple[int, ...]) -> Tensor:
    return torch.where(target.rand(*shape) < 0.5, -1.0, 1.0)

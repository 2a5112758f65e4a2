"""Which starts of a task go badly: more tries of those are worth more than more tries of all."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt


@dataclass
class _Start:
    """The first seed that led there, how often it was tried, and the two best returns, the lower one first."""

    seed: int
    tries: int = 0
    best: tuple[float, float] = (-math.inf, -math.inf)


def start_name(obs: npt.NDArray[Any], number: int) -> bytes:
    """What tells starts apart: their number where there is one, else what they show."""
    shown = obs.tobytes() if number < 0 else b""
    return hashlib.blake2b(shown, digest_size=16, key=str(number).encode()).digest()


class Starts:
    """The starts met so far, told apart by the environment's number of them, or else (-1) by their first observation.

    >>> import numpy as np
    >>> starts = Starts()
    >>> for seed, total in ((5, 10.0), (6, 0.0), (5, 10.0), (6, 10.0)):
    ...     starts.end(starts.begin(np.array([seed]), seed), total)
    >>> starts.worst()
    6
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Start] = {}

    def begin(self, obs: npt.NDArray[Any], seed: int, number: int = -1) -> bytes:
        """Count a try from the start with this number, or that shows ``obs``; returns the start's name."""
        name = start_name(obs, number)
        self._known.setdefault(name, _Start(seed)).tries += 1
        return name

    def end(self, name: bytes, total: float) -> None:
        """Note the return of a try."""
        start = self._known[name]
        first, second = sorted((*start.best, total))[1:]
        start.best = first, second

    def worst(self) -> int:
        """The seed of the start with the lowest second best return (one success may be held out, or contradict another
        start's), and of equals the one that was tried least."""
        return min(self._known.values(), key=lambda start: (start.best[0], start.tries)).seed

"""Evolution strategy for a few hundred numbers and a noisy score (separable CMA-ES, Ros and Hansen 2008)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
STATE = ("mean", "variance", "path", "step_path")


class Evolution:
    """A normal distribution with independent coordinates that moves to where scores are high.

    :meth:`ask` draws a population in opposite pairs, :meth:`tell` takes its scores. The draws depend on the seed and the number of
    the generation alone, so that a search goes on from its :attr:`state` to the same result.

    >>> search = Evolution(size=3, population=12, seed=0)
    >>> for generation in range(60):
    ...     search.tell(-((search.ask() - np.array([1.0, -2.0, 0.5])) ** 2).sum(1))
    >>> search.mean.round(2).tolist()
    [1.0, -2.0, 0.5]
    """

    def __init__(self, size: int, population: int, seed: int) -> None:
        self.population, self.seed, self.generation, self.sigma = 2 * (population // 2), seed, 0, 1.0
        self.mean, self.variance = np.zeros(size), np.ones(size)
        self.path, self.step_path = np.zeros(size), np.zeros(size)
        best = self.population // 2
        weights = math.log(best + 0.5) - np.log(np.arange(1, best + 1))
        self._weights: Array = weights / weights.sum()
        mass = self._mass = 1.0 / float((self._weights**2).sum())
        # The constants of the paper; n + 2 over 3 is what independent coordinates gain in speed.
        self._step_rate = (mass + 2) / (size + mass + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (size + 1)) - 1) + self._step_rate
        self._path_rate = (4 + mass / size) / (size + 4 + 2 * mass / size)
        one, many = 2 / ((size + 1.3) ** 2 + mass), 2 * (mass - 2 + 1 / mass) / ((size + 2) ** 2 + mass)
        self._one_rate = min(0.5, one * (size + 2) / 3)
        self._many_rate = max(0.0, min(0.49, many * (size + 2) / 3))
        self._length = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))

    def _draws(self) -> Array:
        rng = np.random.default_rng([self.seed, 8, self.generation])
        half = rng.standard_normal((self.population // 2, len(self.mean)))
        return np.concatenate([half, -half])

    def ask(self) -> Array:
        """The points (population, size) of this generation."""
        points: Array = self.mean + self.sigma * self._draws() * np.sqrt(self.variance)
        return points

    def tell(self, scores: Array) -> None:
        """Move on, given the scores (population,) of the points asked for: more is better."""
        best = np.argsort(-scores, kind="stable")[: len(self._weights)]
        draws = self._draws()[best]
        moves = draws * np.sqrt(self.variance)
        move, rate = self._weights @ moves, self._step_rate
        self.generation += 1
        self.mean = self.mean + self.sigma * move
        self.step_path = (1 - rate) * self.step_path + math.sqrt(rate * (2 - rate) * self._mass) * (
            self._weights @ draws
        )
        length = float(np.linalg.norm(self.step_path))
        usual = length / math.sqrt(1 - (1 - rate) ** (2 * self.generation))
        steady = usual < (1.4 + 2 / (len(self.mean) + 1)) * self._length
        rate = self._path_rate
        self.path = (1 - rate) * self.path + steady * math.sqrt(rate * (2 - rate) * self._mass) * move
        kept = 1 - self._one_rate - self._many_rate
        spread = self._weights @ moves**2
        self.variance = kept * self.variance + self._one_rate * self.path**2 + self._many_rate * spread
        self.sigma *= math.exp(min(1.0, self._step_rate / self._damping * (length / self._length - 1)))

    @property
    def state(self) -> dict[str, Array]:
        """All that changes, as arrays."""
        return {name: getattr(self, name) for name in STATE} | {"counts": np.array([self.generation, self.sigma])}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :attr:`state`."""
        for name in STATE:
            value = np.asarray(state[name], np.float64)
            if value.shape != self.mean.shape or not np.isfinite(value).all():
                raise ValueError(f"{name} of shape {value.shape}, expected {self.mean.shape} and finite numbers")
            setattr(self, name, value)
        generation, sigma = map(float, np.asarray(state["counts"], np.float64))
        if not (0 <= generation < 2**53 and 0 < sigma < math.inf and (self.variance >= 0).all()):
            raise ValueError(
                f"generation {generation:g}, step size {sigma:g} and variances, expected no negative numbers"
            )
        self.generation, self.sigma = int(generation), sigma

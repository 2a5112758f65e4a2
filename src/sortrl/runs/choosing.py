"""Which of several students to keep: the one that does best on validation episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sortrl.attacks import Attack
from sortrl.certify import certified_shares
from sortrl.core.errors import SortRLError
from sortrl.evaluate.returns import Progress, evaluate_curve
from sortrl.nets import CertifiedPolicy

SLOTS = 128


@dataclass(frozen=True)
class Candidate:
    """How one student did on the validation episodes."""

    returns: tuple[float, ...]
    """Mean return at each eps."""
    certified: float
    """Share of the decisions of clean play that are certified."""

    @property
    def score(self) -> tuple[float, float]:
        """By what it is compared: the mean return, then the certified share."""
        return float(np.mean(self.returns)), self.certified


@dataclass(frozen=True)
class Choice:
    """All candidates, and the one to keep."""

    env_id: str
    eps_grid: tuple[float, ...]
    episodes: int
    seed: int
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> int:
        """Number of the best one; of equals the first."""
        return max(range(len(self.candidates)), key=lambda number: self.candidates[number].score)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best}


def choose(
    policies: Sequence[CertifiedPolicy],
    env_id: str,
    attack: Attack,
    eps_grid: Sequence[float],
    eps_certified: float,
    episodes: int,
    seed: int,
    progress: Progress | None = None,
) -> Choice:
    """Play the same validation episodes with every policy, at each eps of ``eps_grid`` under ``attack``.

    Give a seed whose episodes are not those of the test: whoever chooses by the test has none.

    >>> from sortrl import SortPolicy, attacks
    >>> students = [SortPolicy((4,), 2, width=8, depth=2) for _ in range(2)]
    >>> choice = choose(students, "CartPole-v1", attacks.PGD(1), (0.0, 0.1), 0.1, episodes=2, seed=3)
    >>> len(choice.candidates), choice.best in (0, 1)
    (2, True)
    """
    if not policies:
        raise SortRLError("choose: no candidates given; name at least one policy.")
    grid = tuple(dict.fromkeys((0.0, *eps_grid)))  # certificates are of clean play
    found = []
    for policy in policies:
        curve = evaluate_curve(policy, env_id, attack, grid, episodes, seed, slots=SLOTS, progress=progress)
        returns = tuple(result.mean for result in curve if result.eps_unit in eps_grid)
        found.append(Candidate(returns, float(certified_shares(curve[0], (eps_certified,))[0])))
    return Choice(env_id, tuple(eps for eps in grid if eps in eps_grid), episodes, seed, tuple(found))

"""Teachers that keep away from their own decision boundaries, so that what is learned from them can be certified.

A certificate is about the states that are met, not about all states. An agent that is rewarded for its task alone often hovers
where two actions are equally good (a balanced pole, a lander that switches its engines), and no student with wide margins can
follow it there. Paying a little for every step on which a small displacement would change the action leads training to other
ways of doing the same: wider swings, longer burns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.teachers.teacher import Teacher

SAMPLES = 8


@torch.no_grad()
def unsteady(
    scores: Callable[[Tensor], Tensor], unit: Tensor, eps: float, generator: torch.Generator
) -> npt.NDArray[np.float32]:
    """Of each observation, the share of displacements (random corners of the l_inf ball) that change the greedy action.

    >>> sides = lambda unit: torch.cat([unit, -unit], 1)
    >>> unsteady(sides, torch.tensor([[1.0], [0.0]]), 0.5, torch.Generator().manual_seed(0)).tolist()
    [0.0, 0.375]
    """
    signs = torch.randint(0, 2, (SAMPLES, *unit.shape), generator=generator) * 2 - 1
    views = torch.cat([unit[None], unit + eps * signs]).flatten(0, 1)
    actions = scores(views).argmax(1).view(SAMPLES + 1, len(unit))
    share: npt.NDArray[np.float32] = (actions[1:] != actions[0]).float().mean(0).numpy()
    return share


class Watched:
    """A teacher at play, and how often a small displacement would have changed what it did."""

    def __init__(self, teacher: Teacher, eps: float, seed: int) -> None:
        self.teacher, self.eps, self.total = teacher, eps, 0.0
        self._generator = torch.Generator().manual_seed(seed)

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], Any]:
        unit = self.teacher.normalize(obs)
        self.total += float(unsteady(self.teacher.scores, unit, self.eps, self._generator).sum())
        return self.teacher.predict(obs)

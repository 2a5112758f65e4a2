"""Units from data: the centre and spread of every sensor, and a teacher restated in them.

A Lipschitz student has one radius for all sensors. It is worth most where that radius means the same for each of them: a share of
what the sensor usually does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.teachers.teacher import Teacher

TAIL = 0.005  # share of the states, at either end, that does not count for a sensor's spread


def standardised(obs: npt.ArrayLike) -> Normalizer:
    """Mean and standard deviation of each sensor over states (n, sensors).

    Values beyond the outer quantiles are cut to them first, so that a heavy tail does not squeeze what the sensor usually shows
    into nothing. A sensor that moves only rarely has its plain standard deviation; one that never moves keeps its raw unit.

    >>> standardised([[0.0, 12.0], [2.0, 12.0]] * 100).scale
    tensor([1., 1.], dtype=torch.float64)
    """
    states = np.asarray(obs, np.float64)
    if states.ndim != 2 or not len(states):
        raise SortRLError(f"standardised: states have shape {states.shape}, expected (n, sensors) with n > 0.")
    cut = np.clip(states, *np.quantile(states, [TAIL, 1.0 - TAIL], axis=0))
    mean, spread, plain = cut.mean(0), cut.std(0), states.std(0)
    least = 1e-6 * np.maximum(1.0, np.abs(mean))  # below this it is rounding, not movement
    return Normalizer(mean, np.where(spread > least, spread, np.where(plain > least, plain, 1.0)))


class Restated(nn.Module):
    """A teacher's network behind another unit space: what comes in is turned into the units that it knows, its clip included."""

    factor: Tensor
    shift: Tensor

    def __init__(self, body: nn.Module, own: Normalizer, units: Normalizer) -> None:
        super().__init__()
        self.body, self.clip = body, own.clip
        self.register_buffer("factor", (units.scale / own.scale).float())
        self.register_buffer("shift", ((units.mean - own.mean) / own.scale).float())

    def forward(self, unit: Tensor) -> Tensor:
        scores: Tensor = self.body((unit * self.factor + self.shift).clamp(-self.clip, self.clip))
        return scores


def in_units(teacher: Teacher, units: Normalizer) -> Teacher:
    """The same agent with the mean and scale of ``units`` as its unit space; itself if they are its own.

    The clip of its own normalisation stays with its network: attacks that compare student and teacher need one unit space, which
    has none.
    """
    own = teacher.normalizer
    if torch.equal(own.mean, units.mean) and torch.equal(own.scale, units.scale):
        return teacher
    free = Normalizer(units.mean, units.scale)
    return Teacher(Restated(teacher.body, own, free), free, teacher.n_actions, teacher.name, teacher.algorithm)

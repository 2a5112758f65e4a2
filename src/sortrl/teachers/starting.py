"""A teacher of one mind where episodes begin: whoever decides by small differences there lets an adversary decide."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.envs import EnvSlots
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

STARTS = 64
LEAD = 10.0  # of logits: any other action would be sampled once in twenty thousand times


class StartingBody(nn.Module):
    """Scores with one action first wherever the input is less than ``radius`` from a box, in l_inf."""

    low: Tensor
    high: Tensor

    def __init__(self, body: nn.Module, low: Tensor, high: Tensor, radius: float, action: int) -> None:
        super().__init__()
        self.body, self.radius, self.action = body, radius, action
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, unit: Tensor) -> Tensor:
        scores: Tensor = self.body(unit)
        outside = torch.maximum(self.low - unit, unit - self.high).flatten(1).amax(1)
        first = scores.clone()
        first[:, self.action] = scores.amax(1) + LEAD
        return torch.where((outside < self.radius)[:, None], first, scores)


def decided_at_start(teacher: Teacher, env_id: str, radius: float) -> Teacher:
    """The teacher, with one and the same action wherever it is less than ``radius`` (unit space) from where episodes begin.

    That is the action to which it gives most weight there, on average. A swing that begins at rest begins on the switching surface
    of most experts: either push will do, and an adversary that sees this can choose every push, so that nothing ever moves.
    With the surface moved away by more than it can reach, the first push is made in any case, and the task goes on from there.

    >>> from sortrl.teachers import load_teacher
    >>> expert = load_teacher(lambda obs: (obs[:, 1] > 0).astype(int), env_id="MountainCar-v0")
    >>> unit = torch.tensor([[-0.5, 0.02], [-0.5, 0.2]])  # hardly moving, and moving
    >>> expert.scores(unit).argmax(1).tolist(), decided_at_start(expert, "MountainCar-v0", 0.1).scores(unit).argmax(1).tolist()
    ([1, 1], [0, 1])
    """
    if not 0 < radius < float("inf"):
        raise SortRLError(
            f"decided_at_start: radius is {radius}, expected a positive number in the teacher's input units."
        )
    with EnvSlots(env_id, 1) as slots:
        check_fit(teacher, slots.info)
        starts = np.stack([slots.reset(0, seed).copy() for seed in range(STARTS)])
    unit = teacher.normalize(starts)
    with torch.no_grad():
        scores = teacher.scores(unit)
    weight = (scores.softmax(1) if teacher.is_stochastic else scores).mean(0)
    body = StartingBody(teacher.body, unit.amin(0), unit.amax(0), radius, int(weight.argmax()))
    name = f"{teacher.name}, decided within {radius:g} of the start"
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm)

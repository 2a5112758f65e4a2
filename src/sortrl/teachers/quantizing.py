"""A teacher behind rounded pixels: the simplest defence of images, which every other one should be compared with."""

from __future__ import annotations

from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.teachers.teacher import Teacher


class QuantizedBody(nn.Module):
    """A network that sees pixels (0 to 1) rounded to a few levels.

    Rounding has no gradient. An attack is given that of the network at the rounded image, as if the rounding were not there:
    otherwise it would fail for want of a direction, which proves nothing.
    """

    def __init__(self, body: nn.Module, levels: int) -> None:
        super().__init__()
        self.body, self.levels = body, levels

    def forward(self, unit: Tensor) -> Tensor:
        steps = self.levels - 1
        rounded = (unit.clamp(0.0, 1.0) * steps).round() / steps
        scores: Tensor = self.body(unit + (rounded - unit).detach())
        return scores


def quantized(teacher: Teacher, levels: int) -> Teacher:
    """The teacher, seeing pixels rounded to ``levels`` brightnesses.

    >>> import torch
    >>> from sortrl.core.normalizer import Normalizer
    >>> brightness = Teacher(nn.Flatten(), Normalizer.from_pixels((1, 1, 2)), 2)
    >>> quantized(brightness, 2).scores(torch.tensor([[[[0.3, 0.8]]]])).tolist()
    [[0.0, 1.0]]
    """
    if not isinstance(levels, int) or not 2 <= levels <= 256:
        raise SortRLError(f"quantized: levels is {levels!r}, expected a whole number from 2 to 256.")
    if len(teacher.obs_shape) != 3:
        raise SortRLError(f"quantized: {teacher.name} sees {teacher.obs_shape}, expected images.")
    body, name = QuantizedBody(teacher.body, levels), f"{teacher.name}, {levels} brightnesses"
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm)

"""A teacher that samples its actions, for comparison with published returns, many of which were measured so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.teachers.teacher import Teacher


class SampledBody(nn.Module):
    """Logits plus Gumbel noise, new in every call: their arg-max is a sample of the softmax."""

    def __init__(self, body: nn.Module, seed: int) -> None:
        super().__init__()
        self.body, self.generator = body, torch.Generator().manual_seed(seed)

    def forward(self, unit: Tensor) -> Tensor:
        logits: Tensor = self.body(unit)
        noise = torch.empty(logits.shape).exponential_(generator=self.generator)
        return logits - noise.log().to(logits)


def sampled(teacher: Teacher, seed: int = 0) -> Teacher:
    """The actor-critic with its actions sampled where others play the arg-max of the scores.

    The same seed gives the same actions if the same states are asked for in the same batches. Under attack, an action
    is sampled at the perturbed state; whether it was *changed* by the attack cannot be told apart from chance.

    >>> from sortrl.teachers import Architecture
    >>> from sortrl.core.normalizer import Normalizer
    >>> architecture = Architecture((4,), 2, (8,), "Tanh")
    >>> agent = Teacher(architecture.build(), Normalizer.identity((4,)), 2, algorithm="ppo", architecture=architecture)
    >>> sorted(set(sampled(agent).scores(torch.zeros(64, 4)).argmax(1).tolist()))
    [0, 1]
    """
    if not teacher.is_stochastic:
        raise SortRLError(f"sampled: the scores of {teacher.name} ({teacher.algorithm}) are not logits of a policy.")
    body = SampledBody(teacher.body, seed)
    return Teacher(body, teacher.normalizer, teacher.n_actions, f"{teacher.name}, sampled", teacher.algorithm)

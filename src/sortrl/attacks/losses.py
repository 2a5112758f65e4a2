"""What an attack increases: functions of scores (batch, actions) that give one number per state.

Each builder takes the actions to get away from and returns a :data:`sortrl.attacks.base.Loss`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sortrl.attacks.base import Loss
from sortrl.core.errors import SortRLError


def cross_entropy(clean: Tensor) -> Loss:
    """``log sum_a exp(s_a) - s_clean``."""
    return lambda scores: functional.cross_entropy(scores, clean, reduction="none")


def margin(clean: Tensor) -> Loss:
    """Best other score minus own: positive exactly where the action has changed.

    >>> margin(torch.tensor([0]))(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([-1.])
    """

    def loss(scores: Tensor) -> Tensor:
        own = functional.one_hot(clean, scores.shape[1]).bool()
        return scores.masked_fill(own, -torch.inf).amax(1) - _pick(scores, clean)

    return loss


def dlr(clean: Tensor) -> Loss:
    """Difference of logits ratio (Croce & Hein, 2020): the margin over best minus third best, so blind to the scores' scale.

    With two actions there is no third, and the margin over its own size would be the same everywhere: it is the plain
    margin then.

    >>> dlr(torch.tensor([0]))(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([-0.5000])
    """
    raw = margin(clean)

    def loss(scores: Tensor) -> Tensor:
        if scores.shape[1] == 2:
            return raw(scores)
        best = scores.topk(3, dim=1).values
        return raw(scores) / (best[:, 0] - best[:, 2]).clamp(min=1e-12)

    return loss


def towards(clean: Tensor, wanted: Tensor) -> Loss:
    """Score of a wanted action minus the clean one's: positive exactly where the wanted one has overtaken it."""
    return lambda scores: _pick(scores, wanted) - _pick(scores, clean)


BY_NAME: dict[str, Callable[[Tensor], Loss]] = {"ce": cross_entropy, "margin": margin, "dlr": dlr}


def check_name(owner: str, loss: str) -> None:
    if loss not in BY_NAME:
        raise SortRLError(f"{owner}: loss is {loss!r}, expected one of {', '.join(BY_NAME)}.")


def _pick(scores: Tensor, actions: Tensor) -> Tensor:
    return scores.gather(1, actions[:, None])[:, 0]

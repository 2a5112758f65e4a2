"""CAR-DQN (Li et al., 2024): minimise the largest temporal-difference error anywhere in the box, most where it is largest.

    loss = sum over i of w_i max(Huber(U_played(s_i) - y_i), Huber(L_played(s_i) - y_i)),  w = softmax of these over the batch

U and L are bounds of the played action's value, y the target at the true next state. There is no separate clean term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.baselines.interval_q.network import Dueling, box, gathered
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, td_target
from sortrl.core import parallel


@dataclass(frozen=True)
class CarDQN:
    """Published for Atari: temperature 1."""

    plays = "q"

    temperature: float = 1.0
    """Of the weights: the smaller, the more the worst transition of a batch counts."""

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        goal = td_target(nets, target, batch, now.gamma)
        bounds = nets["q"].bounds_over(batch.states, *box(batch.states, now.eps, now.valid))
        errors = [functional.smooth_l1_loss(gathered(b, batch.actions), goal, reduction="none") for b in bounds]
        worst = torch.maximum(*errors)
        weights = parallel.softmax(worst.detach() / self.temperature)
        return (weights * worst).sum()

"""Adversarial training of action values, the "AT" of BCL (Wu and Vorobeychik, 2022).

    loss = kappa TD + (1 - kappa) sum over a of Huber(Q_a(s + d) - y_a)

y of the played action is its temporal-difference target, of the others their value at the true state. d is that of RI-FGSM: from a
random start one signed gradient step, large enough to end at the border, that lowers sum over a of softmax(Q)_a Q_a.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.baselines.interval_q.network import Dueling, box
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, td_loss, td_target
from sortrl.core import parallel


@dataclass(frozen=True)
class AdversarialDQN:
    plays = "q"

    kappa: float = 0.5

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        q = nets["q"]
        with torch.no_grad():
            goals = q(batch.states).scatter(
                1, batch.actions[:, None], td_target(nets, target, batch, now.gamma)[:, None]
            )
        shown = ri_fgsm(q, batch.states, now)
        attacked = functional.smooth_l1_loss(q(shown), goals, reduction="none").sum(1).mean()
        return self.kappa * td_loss(nets, target, batch, now.gamma) + (1.0 - self.kappa) * attacked


def ri_fgsm(q: Dueling, states: Tensor, now: Moment) -> Tensor:
    """States as the attack shows them, in the valid range."""
    lo, hi = box(states, now.eps, now.valid)
    start = (lo + (hi - lo) * parallel.drawn(states.shape, now.generator)).requires_grad_(True)
    values = q(start)
    (gradient,) = torch.autograd.grad((values.softmax(1) * values).sum(), start)
    return torch.where(gradient > 0, lo, hi)

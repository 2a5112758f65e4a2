"""RADIAL-DQN (Oikarinen et al., 2021): temporal-difference loss, and a penalty where the bounds of two actions overlap.

    loss = kappa TD + (1 - kappa) sum over a of d_a relu(U_a - L_played + d_a / 2),  d_a = relu(Q_played - Q_a)

The larger the gap between two actions, the more their overlap counts. The box is not clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from sortrl.baselines.interval_q.network import Dueling, overlap
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, td_loss


@dataclass(frozen=True)
class RadialDQN:
    """Published for Atari: kappa .8."""

    plays = "q"

    kappa: float = 0.8

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        worst = overlap(nets["q"], batch.states, batch.actions, now.eps).mean()
        return self.kappa * td_loss(nets, target, batch, now.gamma) + (1.0 - self.kappa) * worst

"""WocaR-DQN (Liang et al., 2022): a second network estimates what an action is worth if every later one is the worst an
adversary can bring about.

    Q_worst(s, a) <- r + gamma min over reachable a' of Q_worst(s', a')

a' is reachable at s' if its upper bound exceeds every lower bound there. Action targets maximise (1 - w) Q + w Q_worst, so
that actions with a bad worst case lose value; RADIAL's overlap keeps few actions reachable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.baselines.interval_q.network import Dueling, box, gathered, overlap
from sortrl.baselines.interval_q.training import Batch, Moment, Networks
from sortrl.nets.intervals import IntervalHead


@dataclass(frozen=True)
class WocarDQN:
    """Published for Atari: w .05, weight of the overlap .5 at the end; both grow with eps, as too much early is unstable."""

    plays = "q"

    w: float = 0.05
    kappa: float = 0.5
    """Share of the temporal-difference loss at the end; 1 at the start."""

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start, "worst": start}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        q, worst = nets["q"], nets["worst"]
        w, kappa = self.w * now.progress, 1.0 - (1.0 - self.kappa) * now.progress
        with torch.no_grad():
            best = ((1.0 - w) * q(batch.following) + w * worst(batch.following)).argmax(1)
            goal = batch.rewards + now.gamma * batch.goes_on * gathered(target["q"](batch.following), best)
            possible = reachable(q.advantage, batch.following, now.eps)
            least = target["worst"](batch.following).masked_fill(~possible, torch.inf).amin(1)
            worst_goal = batch.rewards + now.gamma * batch.goes_on * least
        td = functional.smooth_l1_loss(gathered(q(batch.states), batch.actions), goal)
        worst_td = functional.smooth_l1_loss(gathered(worst(batch.states), batch.actions), worst_goal)
        return kappa * td + worst_td + (1.0 - kappa) * overlap(q, batch.states, batch.actions, now.eps).mean()


@torch.no_grad()
def reachable(q: IntervalHead, states: Tensor, eps: float) -> Tensor:
    """Which actions (batch, n_actions) might be the best somewhere in the box; the best one of the state itself always is."""
    lower, upper = q.bounds_over(*box(states, eps))
    return upper >= lower.amax(1, keepdim=True)

"""SA-DQN (Zhang et al., 2020): temporal-difference loss, plus a hinge on the lead of the chosen action in the whole box.

    loss = TD + kappa max(max over a != a* of (Q_a - Q_a*)(s + d), -1),  a* = argmax Q(s)

where the worst d is bounded by intervals in difference form (``convex``) or searched by projected gradient steps (``pgd``). The box
is clipped to what observations can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sortrl.baselines.interval_q.network import Dueling, box, gathered
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, td_loss
from sortrl.core import parallel
from sortrl.nets.intervals import IntervalHead


@dataclass(frozen=True)
class SADQN:
    """Published for Atari: kappa .005 (RoadRunner .01, BankHeist .02)."""

    plays = "q"

    bound: Literal["convex", "pgd"] = "convex"
    kappa: float = 0.005
    hinge: float = 1.0
    """A lead beyond this, in action values, earns nothing."""
    steps: int = 5
    """Of the search."""

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        q, states = nets["q"], batch.states
        with torch.no_grad():
            chosen = q(states).argmax(1)
        lo, hi = box(states, now.eps, now.valid)
        if self.bound == "convex":
            lead = q.advantage.leads_over(lo, hi, chosen).amin(1)
        else:
            found = searched(q.advantage, states, lo, hi, chosen, self.steps, now.generator)
            lead = least_lead(q.advantage(found), chosen)
        return td_loss(nets, target, batch, now.gamma) + self.kappa * (-lead.clamp(max=self.hinge)).mean()


def least_lead(values: Tensor, chosen: Tensor) -> Tensor:
    """How far (batch,) the value of ``chosen`` is above that of the best other action."""
    others = values.scatter(1, chosen[:, None], -torch.inf)
    return gathered(values, chosen) - others.amax(1)


def searched(
    q: IntervalHead, states: Tensor, lo: Tensor, hi: Tensor, chosen: Tensor, steps: int, generator: torch.Generator
) -> Tensor:
    """The states in [lo, hi] where ``chosen`` leads least, as far as signed gradient steps from a random start find them."""
    found = lo + (hi - lo) * parallel.drawn(states.shape, generator)
    for _ in range(steps):
        found = found.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(least_lead(q(found), chosen).sum(), found)
        # Steps of a quarter of the box's half width: five of them cross it.
        found = torch.minimum(torch.maximum(found - (hi - lo) / 8 * gradient.sign(), lo), hi)
    return found.detach()

"""RS-DQN (Fischer et al., 2019): an ordinary Q-network explores and learns; a student, trained robustly to choose what it would,
is the agent.

    loss = TD(Q) + (1 - k) CE(student(s), a*) + k CE(worst case of student in the box, a*),  a* = argmax Q(s)

The worst case has every other action's score at its highest against that of a*, by intervals in difference form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.baselines.interval_q.network import Dueling, box
from sortrl.baselines.interval_q.training import Batch, Moment, Networks, td_loss


@dataclass(frozen=True)
class RSDQN:
    """No code was published; the share of the worst case is that of interval-trained classifiers (Gowal et al., 2018)."""

    plays = "student"

    share: float = 0.5
    """Of the worst case, at the end; it grows with eps."""

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        return {"q": start, "student": start.advantage}

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        with torch.no_grad():
            chosen = nets["q"](batch.states).argmax(1)
        k, student = self.share * now.progress, nets.head("student")
        clean = functional.cross_entropy(student(batch.states), chosen)
        leads = student.leads_over(*box(batch.states, now.eps, now.valid), chosen)
        worst = functional.cross_entropy(-leads.scatter(1, chosen[:, None], 0.0), chosen)
        return td_loss(nets, target, batch, now.gamma) + (1.0 - k) * clean + k * worst

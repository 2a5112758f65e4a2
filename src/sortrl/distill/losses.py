"""What the student is trained on: imitation of the teacher's action, and margins wide enough for eps."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sortrl.distill.config import DistillConfig
from sortrl.nets import HybridPolicy, SortPolicy


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Score of the label minus the best other score: positive where the arg-max agrees with the label."""
    own = scores.gather(1, labels[:, None]).squeeze(1)
    others = scores.scatter(1, labels[:, None], -math.inf).amax(1)
    return own - others


def robust_loss(margin: Tensor, theta: float) -> Tensor:
    """The paper's Eq. rob_loss: minus the margin where the student agrees and the margin is at most theta, else 0."""
    active = (margin >= 0) & (margin <= theta)
    return torch.where(active, -margin, torch.zeros_like(margin)).mean()


def imitation_loss(logits: Tensor, labels: Tensor, teacher_logits: Tensor | None, soft: float) -> Tensor:
    """Cross-entropy against the teacher's action, or partly against its softmax."""
    hard = functional.cross_entropy(logits, labels)
    if soft == 0.0 or teacher_logits is None:
        return hard
    return (1 - soft) * hard + soft * functional.cross_entropy(logits, teacher_logits.softmax(1))


class Judged(NamedTuple):
    """A batch as the losses see it."""

    logits: Tensor
    """For the cross-entropy."""
    margin: Tensor
    proven: Tensor
    """Whether the margin is wide enough for eps."""
    robust: Tensor
    """The rest of the loss."""


def judged(
    policy: SortPolicy | HybridPolicy, outputs: Tensor, target: Tensor, config: DistillConfig, theta: float, step: int
) -> Judged:
    if isinstance(policy, SortPolicy):
        margin = margins(outputs, target)
        # policy.lipschitz is that of a private copy of all weights, which costs as much as the rest of the loss.
        lipschitz = math.prod(part.lipschitz for part in (*policy.front, *policy.layers))
        wide = margin > 2 * config.eps * lipschitz
        return Judged(policy.mu * outputs, margin, wide, robust_loss(margin, theta))
    scores = policy.head(outputs)
    # The box grows with p, so that the head first learns what to separate, then how far.
    reach = 0.5 * theta * config.rise(step)
    leads = policy.head.leads_within(outputs, outputs.new_tensor(reach), target)
    worst, margin = leads.amin(1), margins(scores, target)
    if config.worst_share > 0:
        # lambda already weights the clean cross-entropy: add only worst_share (CE_worst - CE_clean).
        own = functional.one_hot(target, scores.shape[1]).bool()
        behind = torch.where(own, torch.zeros_like(leads), -leads)
        hard, lam = functional.cross_entropy(behind, target), config.lambda_at(step)
        extra = config.worst_share * (hard - functional.cross_entropy(scores, target))
        return Judged(scores, margin, worst > 0, lam * extra)
    hinge = torch.where(margin >= 0, functional.relu(1.0 - worst), torch.zeros_like(worst)).mean()
    return Judged(scores, margin, worst > 0, hinge)

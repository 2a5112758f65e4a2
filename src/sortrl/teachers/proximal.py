"""Proximal policy optimisation (PPO; Schulman et al., 2017) on what a set of games gave: advantages, and an update from them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

MAX_GRAD_NORM = 0.5
GAE_LAMBDA, ENT_COEF, CLIP_RANGE, EPOCHS = 0.97, 0.003, 0.2, 6


class Proximal(Protocol):
    """The settings of an update."""

    @property
    def gamma(self) -> float: ...
    @property
    def batch_size(self) -> int: ...


class Rollout(NamedTuple):
    """A stretch of every game, time first: (steps, games, ...)."""

    shown: Tensor
    """What the agent saw."""
    true: Tensor
    """What there was to see, and the size of the attack: the critic knows both."""
    actions: Tensor
    log_probs: Tensor
    rewards: Tensor
    ended: Tensor
    truncated: Tensor
    """Ended by the clock: what would have followed is not known."""
    values: Tensor
    """One row more than the rest: of what comes next."""


def advantages(rollout: Rollout, scale: float, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates (steps, games) of rewards divided by ``scale``.

    A game that ran out of time has no known future: its last step is given no advantage, and the steps before it rest on
    the critic's estimate.
    """
    found, ahead = torch.empty_like(rollout.rewards), torch.zeros_like(rollout.rewards[0])
    for t in reversed(range(len(found))):
        goes_on = (~rollout.ended[t]).float()
        surprise = rollout.rewards[t] / scale + gamma * goes_on * rollout.values[t + 1] - rollout.values[t]
        ahead = torch.where(rollout.truncated[t], 0.0, surprise + gamma * gae_lambda * goes_on * ahead)
        found[t] = ahead
    return found


def improve(
    agent: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    config: Proximal,
    generator: torch.Generator,
    scale: float,
) -> None:
    """A few passes over the rollout in random batches: PPO's clipped objective, and squared error of the critic."""
    gains = advantages(rollout, scale, config.gamma, GAE_LAMBDA)
    targets = (gains + rollout.values[:-1]).flatten()
    gains = gains.flatten()
    shown, true = rollout.shown.flatten(0, 1), rollout.true.flatten(0, 1)
    actions, before = rollout.actions.flatten(), rollout.log_probs.flatten()
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(gains), generator=generator), config.batch_size):
            log_probs = agent["actor"](shown[batch]).log_softmax(1)
            ratio = (log_probs.gather(1, actions[batch, None])[:, 0] - before[batch]).exp()
            gain = gains[batch]
            gain = (gain - gain.mean()) / (gain.std(unbiased=False) + 1e-8)
            clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
            entropy = -(log_probs.exp() * log_probs).sum(1).mean()
            loss = -torch.minimum(ratio * gain, clipped * gain).mean() - ENT_COEF * entropy
            loss = loss + 0.5 * nn.functional.mse_loss(agent["critic"](true[batch])[:, 0], targets[batch])
            optimizer.zero_grad()
            loss.backward()
            for network in agent.values():
                nn.utils.clip_grad_norm_(network.parameters(), MAX_GRAD_NORM)
            optimizer.step()


def size_of_returns(rollout: Rollout, gamma: float) -> Tensor:
    """By what rewards are divided, so that the critic has numbers of a common size to learn, whatever the task."""
    zeros = torch.zeros_like(rollout.values)
    sums = advantages(rollout._replace(values=zeros, truncated=torch.zeros_like(rollout.truncated)), 1.0, gamma, 1.0)
    return sums.square().mean().sqrt().clamp(min=1e-6)

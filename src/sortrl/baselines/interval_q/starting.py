"""What fine-tuning starts from: the teacher's own network, or one that was made from its play.

A Q-learner of linear layers and convolutions with ReLU is taken over as it is. A teacher that has no action values (PPO), or has a
network of another design, is distilled: its play is evaluated by temporal differences, Q(s, a) <- r + gamma Q(s', teacher's action),
and a margin keeps its own action in front, as in deep Q-learning from demonstrations (Hester et al., 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sortrl.baselines.interval_q.network import fresh_network, gathered, same_network
from sortrl.baselines.interval_q.training import Batch, Progress, Replay, explored
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import Fleet
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.teachers.teacher import Q_ALGORITHMS, Teacher


@dataclass(frozen=True)
class DistillationConfig:
    """How action values are learned from a teacher's play."""

    decisions: int = 20_000
    """Steps that are played for it."""
    updates: int = 6_000
    batch: int = 128
    learning_rate: float = 1e-3
    """Of Adam, falling linearly to a tenth."""
    exploration: float = 0.2
    """Share of random actions: without them only the teacher's own would be valued."""
    margin: float = 0.8
    """By which the teacher's action is to lead, in action values."""
    renew_every: int = 20
    """Updates between copies to the target network."""
    games: int = 8


def start_from(
    teacher: Teacher,
    env_id: str,
    gamma: float,
    seed: int = 0,
    config: DistillationConfig | None = None,
    progress: Progress | None = None,
) -> tuple[IntervalPolicy, str]:
    """Action values to start from, and in a few words where they come from."""
    same = same_network(teacher) if teacher.algorithm in Q_ALGORITHMS else None
    if same is not None:
        return same, "the teacher's own network"
    return distilled(teacher, env_id, gamma, seed, config or DistillationConfig(), progress), "distilled from its play"


def distilled(
    teacher: Teacher, env_id: str, gamma: float, seed: int, config: DistillationConfig, progress: Progress | None = None
) -> IntervalPolicy:
    """Action values of the teacher's play."""
    policy = fresh_network(teacher, seed)
    q, target = policy.head, copy.deepcopy(policy.head)

    def loss(batch: Batch, own: Tensor) -> Tensor:
        with torch.no_grad():
            then = teacher.scores(batch.following).argmax(1)
            goal = batch.rewards + gamma * batch.goes_on * gathered(target(batch.following), then)
        values = q(batch.states)
        rivals = (values + config.margin).scatter(1, own[:, None], gathered(values, own)[:, None])
        behind = (rivals.amax(1) - gathered(values, own)).mean()
        error = functional.smooth_l1_loss(gathered(values, batch.actions), goal)
        loss: Tensor = error + behind
        return loss

    _learn(teacher, env_id, seed, config, policy, loss, lambda: target.load_state_dict(q.state_dict()), progress)
    return policy.eval().requires_grad_(False)


def cloned(
    teacher: Teacher, env_id: str, seed: int, config: DistillationConfig, progress: Progress | None = None
) -> IntervalPolicy:
    """Logits that give the teacher's probabilities, for methods that go on with policy gradients."""
    policy = fresh_network(teacher, seed)

    def loss(batch: Batch, own: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher.scores(batch.states).softmax(1)
        return functional.cross_entropy(policy.head(batch.states), wanted)

    _learn(teacher, env_id, seed, config, policy, loss, lambda: None, progress)
    return policy.eval().requires_grad_(False)


def _learn(
    teacher: Teacher,
    env_id: str,
    seed: int,
    config: DistillationConfig,
    policy: IntervalPolicy,
    loss_of: Callable[[Batch, Tensor], Tensor],
    renew: Callable[[], object],
    progress: Progress | None,
) -> None:
    """Let the teacher play, and minimise a loss of transitions and of the teacher's actions there."""
    with one_thread(), generators_restored(), closing(Fleet(env_id, config.games, seed)) as fleet:
        generator = torch.Generator().manual_seed(seed)
        replay = Replay(config.decisions, torch.from_numpy(fleet.obs), {})
        for _ in range(config.decisions // config.games):
            obs = torch.from_numpy(fleet.obs.copy())
            with torch.no_grad():
                own = teacher.scores(teacher.normalize(obs)).argmax(1)
            replay.play(fleet, obs, explored(own, teacher.n_actions, config.exploration, generator))
        optimizer = torch.optim.Adam(policy.head.parameters(), lr=config.learning_rate)
        for update in range(config.updates):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * (1.0 - 0.9 * update / config.updates)
            batch = replay.sample(config.batch, teacher.normalize, generator)
            with torch.no_grad():
                own = teacher.scores(batch.states).argmax(1)
            loss = loss_of(batch, own)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (update + 1) % config.renew_every == 0:
                renew()
                if progress is not None and (update + 1) % 1000 == 0:
                    progress({"step": update + 1, "total": config.updates, "loss": float(loss.detach())})

"""RADIAL-PPO (Oikarinen et al., 2021): PPO's clipped objective, also for the worst probabilities in the box.

    loss = kappa PPO(log pi(a | s)) + (1 - kappa) PPO(worst log pi(a | s + d))

An action with a positive advantage is given its lowest probability, one with a negative its highest: from lower and upper bounds of
the logits. eps grows exponentially between a tenth and eight tenths of the training.
"""

from __future__ import annotations

import copy
import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sortrl.attacks import PGD
from sortrl.attacks.valid import check_eps
from sortrl.baselines.interval_q.network import box, gathered
from sortrl.baselines.interval_q.training import TEST_SEED, Progress, Tuned
from sortrl.core.checkpoint import Checkpoint, part, prefixed
from sortrl.core.errors import SortRLError
from sortrl.core.identity import fingerprint
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import Fleet, describe
from sortrl.evaluate.returns import evaluate
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.nets.intervals import IntervalHead
from sortrl.teachers.proximal import MAX_GRAD_NORM, Rollout, advantages, size_of_returns


@dataclass(frozen=True)
class RadialPPOConfig:
    """Published for ProcGen: 25 million decisions, 64 games of 256 steps, 3 epochs, gamma .999."""

    eps: float
    """Size of the perturbation to resist, in unit space."""
    decisions: int = 100_000
    kappa: float = 0.5
    games: int = 8
    steps: int = 128
    """Of every game between updates."""
    epochs: int = 4
    batch: int = 256
    learning_rate: float = 5e-4
    """Of Adam, falling linearly to a tenth."""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    ent_coef: float = 0.0
    warm_up: float = 0.05
    """Share of the decisions in which only the critic learns: the actor comes from the teacher, the critic from nothing."""
    tests: int = 4
    test_episodes: int = 10

    def __post_init__(self) -> None:
        for name in ("decisions", "games", "steps", "epochs", "batch", "tests", "test_episodes"):
            if getattr(self, name) < 1:
                raise SortRLError(f"RadialPPOConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if not (0 < self.eps < math.inf and 0 <= self.kappa <= 1):
            raise SortRLError(
                f"RadialPPOConfig: eps {self.eps} and kappa {self.kappa}, expected eps > 0, kappa in 0..1."
            )

    def eps_at(self, decision: int) -> float:
        """0, then from a hundredth of eps exponentially to all of it."""
        x = (decision / self.decisions - 0.1) / 0.7
        return 0.0 if x < 0 else self.eps * 0.01 ** (1.0 - min(1.0, x))


def worst_log_probs(actor: IntervalHead, states: Tensor, actions: Tensor, gains: Tensor, eps: float) -> Tensor:
    """Lower bounds (batch,) of log pi(action) where the advantage is positive, upper bounds where it is negative."""
    lower, upper = actor.bounds_over(*box(states, eps))
    own = nn.functional.one_hot(actions, lower.shape[1]).bool()
    lowest = gathered(torch.where(own, lower, upper).log_softmax(1), actions)
    highest = gathered(torch.where(own, upper, lower).log_softmax(1), actions)
    return torch.where(gains > 0, lowest, highest)


def surrogate(log_probs: Tensor, before: Tensor, gains: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped objective, to be minimised."""
    ratio = (log_probs - before).exp()
    return -torch.minimum(ratio * gains, ratio.clamp(1 - clip_range, 1 + clip_range) * gains).mean()


def radial_ppo(
    start: IntervalPolicy,
    env_id: str,
    config: RadialPPOConfig,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tuned:
    """Train on from ``start``, whose scores are logits; return the agent that did best under attack near the end.

    It checkpoints and resumes as :func:`sortrl.baselines.interval_q.training.fine_tune` does.
    """
    info = describe(env_id)
    check_eps(start, info, config.eps)
    identity = {"env_id": info.env_id, "method": "RADIAL-PPO", "config": asdict(config), "seed": int(seed)}
    identity["start"] = fingerprint(start)
    with one_thread(), generators_restored():
        torch.manual_seed(seed)
        actor = copy.deepcopy(start.head)
        width = math.prod(start.obs_shape)
        critic = nn.Sequential(
            nn.Flatten(), nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        agent = nn.ModuleDict({"actor": actor, "critic": critic}).requires_grad_(True)
        optimizer = torch.optim.Adam(agent.parameters(), lr=config.learning_rate, eps=1e-5)
        generator = torch.Generator().manual_seed(seed)
        checkpoint = Checkpoint(out_dir, identity)
        decision, history = checkpoint.restore(agent, optimizer, generator)
        stored = checkpoint.extra
        best = copy.deepcopy(start).eval().requires_grad_(False)
        if kept := part(stored, "best"):
            best.head.load_state_dict(kept)
        if decision >= config.decisions:
            return Tuned(best, history, decision, float(stored["seconds"]) / 60)
        state = {name: tensor.numpy() for name, tensor in part(stored, "fleet").items()}
        before, began = float(stored.get("seconds", torch.zeros(()))), time.monotonic()
        scale = stored.get("scale")
        recent = stored.get("recent", torch.zeros(0, dtype=torch.float64)).tolist()
        with closing(Fleet(info.env_id, config.games, seed, state=state or None)) as fleet:
            while decision < config.decisions:
                rollout, returns = _rollout(start, actor, critic, fleet, config, generator)
                recent = [*recent, *returns][-50:]
                scale = size_of_returns(rollout, config.gamma) if scale is None else scale
                for group in optimizer.param_groups:
                    group["lr"] = config.learning_rate * (1.0 - 0.9 * decision / config.decisions)
                eps = config.eps_at(decision)
                loss = _improve(agent, optimizer, rollout, config, generator, float(scale), eps, decision)
                previous, decision = decision, decision + config.games * config.steps
                row: dict[str, Any] = {"decision": decision, "eps": eps, "loss": loss}
                row["training_return"] = sum(recent) / max(1, len(recent))
                gap = config.decisions / 5 / config.tests
                left = [max(0.0, config.decisions - x) for x in (previous, decision)]
                if left[1] < config.decisions / 5 and math.ceil(left[1] / gap) < math.ceil(left[0] / gap):
                    found_agent = copy.deepcopy(start)
                    found_agent.head.load_state_dict(actor.state_dict())
                    found_agent.eval().requires_grad_(False)
                    found = evaluate(found_agent, info.env_id, PGD(10), config.eps, config.test_episodes, TEST_SEED)
                    row["tested"] = found.mean
                    if found.mean >= max((r["tested"] for r in history if "tested" in r), default=-math.inf):
                        best = found_agent
                history.append(row)
                extra = prefixed("fleet", {name: torch.from_numpy(a) for name, a in fleet.state().items()})
                extra |= prefixed("best", best.head.state_dict())
                seconds = before + time.monotonic() - began
                extra |= {"scale": torch.as_tensor(scale), "seconds": torch.tensor(seconds, dtype=torch.float64)}
                extra["recent"] = torch.tensor(recent, dtype=torch.float64)
                checkpoint.save(agent, optimizer, generator, decision, history, extra)
                if progress is not None:
                    progress({"step": decision, "total": config.decisions, **row})
        return Tuned(best, history, decision, (before + time.monotonic() - began) / 60)


@torch.no_grad()
def _rollout(
    start: IntervalPolicy,
    actor: IntervalHead,
    critic: nn.Module,
    fleet: Fleet,
    config: RadialPPOConfig,
    generator: torch.Generator,
) -> tuple[Rollout, list[float]]:
    rows, returns = [], []
    values = []
    for _ in range(config.steps):
        states = start.normalize(torch.from_numpy(fleet.obs.copy()))
        log_probs = actor(states).log_softmax(1)
        actions = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
        values.append(critic(states)[:, 0])
        steps = fleet.step(actions.numpy())
        returns += steps.returns
        ended = torch.from_numpy(steps.terminated | steps.truncated)
        truncated = torch.from_numpy(steps.truncated & ~steps.terminated)
        rows.append((states, actions, gathered(log_probs, actions), torch.from_numpy(steps.rewards), ended, truncated))
    values.append(critic(start.normalize(torch.from_numpy(fleet.obs.copy())))[:, 0])
    states, actions, chosen, rewards, ended, truncated = (torch.stack(column) for column in zip(*rows, strict=True))
    return Rollout(states, states, actions, chosen, rewards, ended, truncated, torch.stack(values)), returns


def _improve(
    agent: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    config: RadialPPOConfig,
    generator: torch.Generator,
    scale: float,
    eps: float,
    decision: int,
) -> float:
    """A few passes over the rollout in random batches."""
    gains = advantages(rollout, scale, config.gamma, config.gae_lambda)
    targets = (gains + rollout.values[:-1]).flatten()
    gains, states = gains.flatten(), rollout.shown.flatten(0, 1)
    actions, before = rollout.actions.flatten(), rollout.log_probs.flatten()
    actor = agent["actor"]
    assert isinstance(actor, IntervalHead)
    loss = torch.zeros(())
    for _ in range(config.epochs):
        for rows in torch.split(torch.randperm(len(gains), generator=generator), config.batch):
            loss = 0.5 * nn.functional.mse_loss(agent["critic"](states[rows])[:, 0], targets[rows])
            if decision >= config.warm_up * config.decisions:
                gain = (gains[rows] - gains[rows].mean()) / (gains[rows].std(unbiased=False) + 1e-8)
                logits = actor(states[rows]).log_softmax(1)
                usual = surrogate(gathered(logits, actions[rows]), before[rows], gain, config.clip_range)
                worst = worst_log_probs(actor, states[rows], actions[rows], gain, eps)
                robust = surrogate(worst, before[rows], gain, config.clip_range)
                entropy = -(logits.exp() * logits).sum(1).mean()
                loss = loss + config.kappa * usual + (1.0 - config.kappa) * robust - config.ent_coef * entropy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()
    return float(loss.detach())

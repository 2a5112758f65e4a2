"""The one loop that all DQN-type methods share: replay, a target network, a growing eps; it resumes, and keeps the best agent.

Fine-tuning starts from action values that are learned already, in units of their own: rewards are scaled so that the start's best
action leads the next one by 1, at the median. Games explore more or less, so that the replay of an agent that never fails holds what
happens to one that does. A method says what its loss is (:class:`Method`); everything else is
the same for all, so that their results differ by the loss alone.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.attacks import PGD
from sortrl.attacks.valid import check_eps, valid_range
from sortrl.baselines.interval_q.network import Dueling, Valid, box, gathered
from sortrl.core import parallel
from sortrl.core.checkpoint import Checkpoint, part, prefixed
from sortrl.core.errors import SortRLError
from sortrl.core.identity import fingerprint
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import Fleet, describe
from sortrl.evaluate.returns import evaluate
from sortrl.nets.interval_policy import IntervalPolicy
from sortrl.nets.intervals import IntervalHead

MAX_GRAD_NORM = 10.0
TEST_SEED = 1_900  # of the episodes the best agent is chosen by; nobody is measured on them
Progress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainingConfig:
    """How to fine-tune. Defaults are for tasks with a few sensors; published ones, for Atari, are in docs/baselines.md."""

    eps: float
    """Size of the perturbation to resist, in unit space."""
    eps_from: float = 0.0
    """Where eps starts."""
    decisions: int = 4_800
    """Steps of the environments."""
    eps_reached: float = 0.7
    """Share of the decisions after which eps has its full size."""
    games: int = 8
    """Environments side by side."""
    every: int = 4
    """Decisions per update."""
    batch: int = 128
    """Transitions per update."""
    learning_rate: float = 5e-4
    """Of Adam; it falls linearly to a tenth."""
    gamma: float = 0.98
    """Discount factor."""
    buffer: int = 20_000
    """Transitions that are kept."""
    learning_starts: int = 800
    """Decisions before the first update."""
    target_every: int = 100
    """Updates between copies to the target network."""
    exploration: float = 0.02
    """Share of random actions in the game that explores least."""
    exploration_most: float = 0.4
    """In the one that explores most; those of the others lie between, geometrically (Horgan et al., 2018)."""
    anchor: float = 1.0
    """Weight of a margin of 1 by which the start's own action is to lead. The papers have none."""
    tests: int = 4
    """In the last fifth of the decisions the agent is tested this often, and the best one is kept; 0: that of the end."""
    test_episodes: int = 10
    """Episodes of a test, under PGD-10 at ``eps``."""

    def __post_init__(self) -> None:
        for name in ("decisions", "games", "every", "batch", "buffer", "target_every", "test_episodes"):
            if getattr(self, name) < 1:
                raise SortRLError(f"TrainingConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if self.tests < 0:
            raise SortRLError(f"TrainingConfig: tests is {self.tests}, expected 0 or more.")
        if not 0 <= self.eps_from <= self.eps < math.inf:
            raise SortRLError(
                f"TrainingConfig: eps from {self.eps_from} to {self.eps}, expected finite and not falling."
            )
        if not (
            0 <= self.gamma < 1
            and 0 < self.exploration <= self.exploration_most <= 1
            and 0 < self.eps_reached <= 1
            and self.learning_rate > 0
        ):
            raise SortRLError(
                f"TrainingConfig: gamma {self.gamma}, exploration {self.exploration} to {self.exploration_most}, eps_reached "
                f"{self.eps_reached}, learning_rate {self.learning_rate}: expected gamma below 1, shares above 0, at most 1 and not "
                "falling, and a positive learning rate."
            )

    def explorations(self) -> Tensor:
        """Of every game.

        >>> TrainingConfig(0.1, games=3, exploration=0.1, exploration_most=0.4).explorations()
        tensor([0.1000, 0.2000, 0.4000])
        """
        return torch.logspace(math.log10(self.exploration), math.log10(self.exploration_most), self.games)

    def eps_at(self, decision: int) -> float:
        """Of the schedule called "smoothed"."""
        return self.eps_from + (self.eps - self.eps_from) * smoothed(decision / (self.eps_reached * self.decisions))


def smoothed(x: float, bend: float = 0.25) -> float:
    """0 to 1 for x from 0 to 1: a x^4 up to ``bend``, then a straight line that continues it without a kink.

    >>> [round(smoothed(x), 3) for x in (0.0, 0.125, 0.25, 0.625, 1.0, 2.0)]
    [0.0, 0.005, 0.077, 0.538, 1.0, 1.0]
    """
    x = min(1.0, max(0.0, x))
    a = 1.0 / (bend**3 * (4.0 - 3.0 * bend))
    return a * x**4 if x <= bend else a * bend**3 * (bend + 4.0 * (x - bend))


class Batch(NamedTuple):
    """Transitions. States are in unit space; ``goes_on`` is 0 where an episode ended and 1 elsewhere."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    following: Tensor
    goes_on: Tensor


class Moment(NamedTuple):
    """How far the training is: what a loss may depend on beside networks and data."""

    eps: float
    progress: float
    """Of eps: 0 at the start, 1 when it has its full size."""
    gamma: float
    valid: Valid
    generator: torch.Generator


class Method(Protocol):
    """What tells one method from another. Settings are the fields of a dataclass."""

    plays: str
    """Which of the networks the agent is in the end. The one called "q" explores."""

    def networks(self, start: Dueling) -> dict[str, nn.Module]:
        """What is trained, by name: "q", which is dueling, and what else the method needs."""
        ...

    def loss(self, nets: Networks, target: Networks, batch: Batch, now: Moment) -> Tensor:
        """To be minimised with respect to ``nets``; ``target`` are copies of a little earlier."""
        ...


class Networks(nn.ModuleDict):
    """Networks by name."""

    def __getitem__(self, key: str) -> Dueling:
        found = super().__getitem__(key)
        assert isinstance(found, Dueling)
        return found

    def head(self, key: str) -> IntervalHead:
        """What of a network decides: of a dueling one its advantages."""
        found = super().__getitem__(key)
        found = found.advantage if isinstance(found, Dueling) else found
        assert isinstance(found, IntervalHead)
        return found


@torch.no_grad()
def td_target(nets: Networks, target: Networks, batch: Batch, gamma: float) -> Tensor:
    """r + gamma Q_target(s', argmax Q(s')): double Q-learning."""
    best = nets["q"](batch.following).argmax(1)
    return batch.rewards + gamma * batch.goes_on * gathered(target["q"](batch.following), best)


def td_loss(nets: Networks, target: Networks, batch: Batch, gamma: float) -> Tensor:
    """Huber loss of the action that was played."""
    played = gathered(nets["q"](batch.states), batch.actions)
    return functional.smooth_l1_loss(played, td_target(nets, target, batch, gamma))


class Replay:
    """The latest transitions, as raw observations; the oldest make room."""

    def __init__(self, size: int, obs: Tensor, stored: dict[str, Tensor]) -> None:
        shapes = {
            "obs": (obs.shape[1:], obs.dtype),
            "next": (obs.shape[1:], obs.dtype),
            "actions": ((), torch.int64),
            "rewards": ((), torch.float32),
            "goes_on": ((), torch.float32),
        }
        self._kept = stored or {
            **{name: torch.zeros((size, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()},
            "added": torch.zeros((), dtype=torch.int64),
        }
        self._size = size

    def play(self, fleet: Fleet, obs: Tensor, actions: Tensor) -> list[float]:
        """Play one action in every game and keep what happened; returns those of episodes that ended.

        What follows an end by the clock is not known, so such a transition is left out.
        """
        steps = fleet.step(actions.numpy())
        keep = torch.from_numpy(~(steps.truncated & ~steps.terminated))
        count = int(keep.sum())
        places = (int(self._kept["added"]) + torch.arange(count)) % self._size
        new = {
            "obs": obs,
            "next": torch.from_numpy(fleet.obs.copy()),
            "actions": actions,
            "rewards": torch.from_numpy(steps.rewards),
            "goes_on": torch.from_numpy(~steps.terminated).float(),
        }
        for name, values in new.items():
            self._kept[name][places] = values[keep]
        self._kept["added"] += count
        return steps.returns

    def __len__(self) -> int:
        return min(self._size, int(self._kept["added"]))

    def sample(self, count: int, normalize: Callable[[Tensor], Tensor], generator: torch.Generator) -> Batch:
        """So many transitions; of several processes, each gets its share of them."""
        rows = parallel.own(torch.randint(len(self), (count,), generator=generator))
        obs, after, actions, rewards, goes_on = (
            self._kept[name][rows] for name in ("obs", "next", "actions", "rewards", "goes_on")
        )
        return Batch(normalize(obs), actions, rewards, normalize(after), goes_on)

    def state(self) -> dict[str, Tensor]:
        return dict(self._kept)


def explored(greedy: Tensor, n_actions: int, share: float | Tensor, generator: torch.Generator) -> Tensor:
    """The greedy actions, a ``share`` of them (one for all games, or one for each) replaced by random ones."""
    random = torch.randint(n_actions, (len(greedy),), generator=generator)
    return torch.where(torch.rand(len(greedy), generator=generator) < share, random, greedy)


class Values(NamedTuple):
    """Action values, and what rewards were multiplied by to learn them."""

    q: Dueling
    scale: float


class Tuned(NamedTuple):
    """What a training made."""

    policy: IntervalPolicy
    history: list[dict[str, Any]]
    """Rows with ``decision``, ``eps``, ``loss``, ``training_return``, the median ``lead`` of the agent's actions in the last batch
    (in this process's part of it) and the share of it that is ``certified`` at the full eps, and of tests ``tested``."""
    decisions: int
    minutes: float
    values: Values | None = None
    """Of the agent, for a training that goes on from it."""


def values_of(start: IntervalPolicy, env_id: str, config: TrainingConfig, seed: int) -> Values:
    """The start's action values in units of the lead that its best action has, at the median of states that it visits."""
    generator, leads = torch.Generator().manual_seed(seed), []
    with closing(Fleet(env_id, config.games, seed)) as fleet, torch.no_grad():
        for _ in range(-(-1024 // config.games)):
            values = start.scores(start.normalize(torch.from_numpy(fleet.obs.copy())))
            best = values.topk(2).values
            leads.append(best[:, 0] - best[:, 1])
            fleet.step(explored(values.argmax(1), values.shape[1], config.explorations(), generator).numpy())
    lead = float(torch.cat(leads).median())
    scale = 1.0 / lead if lead > 0 else 1.0
    return Values(Dueling.of(start.head, scale), scale)


def anchored(advantage: IntervalHead, start: IntervalHead, states: Tensor) -> Tensor:
    """How far the start's own action is from a lead of 1, as in deep Q-learning from demonstrations (Hester et al., 2018)."""
    with torch.no_grad():
        own = start(states).argmax(1)
    scores = advantage(states)
    rivals = (scores + 1.0).scatter(1, own[:, None], gathered(scores, own)[:, None])
    behind: Tensor = (rivals.amax(1) - gathered(scores, own)).mean()
    return behind


def fine_tune(
    start: IntervalPolicy,
    env_id: str,
    method: Method,
    config: TrainingConfig,
    out_dir: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    values: Values | None = None,
) -> Tuned:
    """Train on from ``start``, whose scores are action values, or of which ``values`` are; return the agent that did best under
    attack near the end.

    With ``out_dir`` it checkpoints there; the same call goes on from that, and ends with the same weights as if never stopped.
    """
    info = describe(env_id)
    check_eps(start, info, config.eps)
    settings: Any = method  # a dataclass
    identity: dict[str, Any] = {"env_id": info.env_id, "seed": int(seed), "start": fingerprint(start)}
    identity |= {"method": [type(method).__name__, asdict(settings)], "config": asdict(config)}
    with one_thread(), generators_restored():
        torch.manual_seed(seed)
        values = values or values_of(start, info.env_id, config, seed)
        nets = Networks({name: copy.deepcopy(net) for name, net in method.networks(values.q).items()})
        model = nn.ModuleDict({"nets": nets, "target": copy.deepcopy(nets)})
        model["nets"].requires_grad_(True).train()
        model["target"].requires_grad_(False)
        optimizer = torch.optim.Adam(nets.parameters(), lr=config.learning_rate, eps=1.5e-4)
        generator = torch.Generator().manual_seed(seed)
        checkpoint = Checkpoint(out_dir, identity)
        decision, history = checkpoint.restore(model, optimizer, generator)
        if decision >= config.decisions:
            stored = checkpoint.extra
            best, best_q = _best(start, values, stored)
            return Tuned(best, history, decision, float(stored["seconds"]) / 60, Values(best_q, values.scale))
        job = _Tuning(
            start, env_id, method, config, seed, values, model, optimizer, generator, checkpoint, decision, history
        )
        return parallel.together(_tune, job, progress)


@dataclass(frozen=True)
class _Tuning:
    """All that the training depends on, for each process that computes its share of the batches; ``history`` is added to.

    Every process plays the same games: what they show is the same, because the networks are.
    """

    start: IntervalPolicy
    env_id: str
    method: Method
    config: TrainingConfig
    seed: int
    values: Values
    model: nn.ModuleDict
    optimizer: torch.optim.Adam
    generator: torch.Generator
    checkpoint: Checkpoint
    decision: int
    history: list[dict[str, Any]]


def _tune(job: _Tuning, progress: Progress | None) -> Tuned:
    start, method, config, values, model = job.start, job.method, job.config, job.values, job.model
    optimizer, generator, history, decision = job.optimizer, job.generator, job.history, job.decision
    nets, target = model["nets"], model["target"]
    assert isinstance(nets, Networks)
    assert isinstance(target, Networks)
    info = describe(job.env_id)
    with one_thread(), generators_restored():
        torch.manual_seed(job.seed)
        stored = job.checkpoint.extra
        best, best_q = _best(start, values, stored)
        state = {name: tensor.numpy() for name, tensor in part(stored, "fleet").items()}
        fleet = Fleet(info.env_id, config.games, job.seed, state=state or None)
        replay = Replay(config.buffer, torch.from_numpy(fleet.obs), part(stored, "replay"))
        recent = stored.get("recent", torch.zeros(0, dtype=torch.float64)).tolist()
        updates = int(stored.get("updates", torch.zeros(())))
        due = decision % config.every  # decisions since the last update
        before, began = float(stored.get("seconds", torch.zeros(()))), time.monotonic()
        valid = Valid(*valid_range(start, info))
        loss = torch.zeros(())
        shares = config.explorations()
        with closing(fleet):
            while decision < config.decisions:
                obs = torch.from_numpy(fleet.obs.copy())
                with torch.no_grad():
                    greedy = nets["q"](start.normalize(obs)).argmax(1)
                played = replay.play(fleet, obs, explored(greedy, info.n_actions, shares, generator))
                recent = [*recent, *played][-50:]
                previous, decision = decision, decision + config.games
                due += config.games
                while due >= config.every:
                    due -= config.every
                    if decision < config.learning_starts or len(replay) < config.batch:
                        continue
                    eps = config.eps_at(decision)
                    span = config.eps - config.eps_from
                    now = Moment(eps, (eps - config.eps_from) / span if span else 1.0, config.gamma, valid, generator)
                    for group in optimizer.param_groups:
                        group["lr"] = config.learning_rate * (1.0 - 0.9 * decision / config.decisions)
                    batch = replay.sample(config.batch, start.normalize, generator)
                    batch = batch._replace(rewards=values.scale * batch.rewards)
                    loss = method.loss(nets, target, batch, now)
                    if config.anchor:
                        loss = loss + config.anchor * anchored(nets.head("q"), start.head, batch.states)
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    parallel.average_gradients(nets.parameters())
                    nn.utils.clip_grad_norm_(nets.parameters(), MAX_GRAD_NORM)
                    optimizer.step()
                    updates += 1
                    if updates % config.target_every == 0:
                        target.load_state_dict(nets.state_dict())
                tested, last = _crossed(previous, decision, config), decision >= config.decisions
                if not tested and not last and decision // 1000 == previous // 1000:
                    continue
                row = {
                    "decision": decision,
                    "eps": config.eps_at(decision),
                    "loss": float(parallel.averaged(loss.detach())),
                }
                row["training_return"] = sum(recent) / max(1, len(recent))
                if len(replay) >= config.batch:
                    seen = replay.sample(
                        8 * config.batch, start.normalize, torch.Generator().manual_seed(decision)
                    ).states
                    row |= _leads(nets.head(method.plays), seen, config.eps)
                if not config.tests and last:
                    best = _agent(start, nets.head(method.plays))
                    best_q.load_state_dict(nets["q"].state_dict())
                if tested:
                    agent = _agent(start, nets.head(method.plays))
                    found = evaluate(agent, info.env_id, PGD(10), config.eps, config.test_episodes, TEST_SEED)
                    row["tested"] = found.mean
                    if found.mean >= max(
                        (known["tested"] for known in history if "tested" in known), default=-math.inf
                    ):
                        best = agent
                        best_q.load_state_dict(nets["q"].state_dict())
                history.append(row)
                if progress is not None:
                    progress({"step": decision, "total": config.decisions, **row})
                if tested or last or decision // 5000 > previous // 5000:
                    extra = prefixed("fleet", {name: torch.from_numpy(a) for name, a in fleet.state().items()})
                    extra |= prefixed("replay", replay.state()) | prefixed("best", best.head.state_dict())
                    extra |= prefixed("best_q", best_q.state_dict())
                    extra |= {"recent": torch.tensor(recent, dtype=torch.float64), "updates": torch.tensor(updates)}
                    seconds = before + time.monotonic() - began
                    extra["seconds"] = torch.tensor(seconds, dtype=torch.float64)
                    parallel.check_same(model)
                    job.checkpoint.save(model, optimizer, generator, decision, history, extra)
        return Tuned(best, history, decision, (before + time.monotonic() - began) / 60, Values(best_q, values.scale))


def _crossed(before: int, after: int, config: TrainingConfig) -> bool:
    """Whether a test is due: ``tests`` of them, evenly over the last fifth, the last one at the end."""
    if not config.tests:
        return False
    gap = config.decisions / 5 / config.tests
    left = [max(0.0, config.decisions - x) for x in (before, after)]
    return left[1] < config.decisions / 5 and math.ceil(left[1] / gap) < math.ceil(left[0] / gap)


def _agent(start: IntervalPolicy, head: IntervalHead) -> IntervalPolicy:
    """A frozen policy with a copy of the weights."""
    agent = copy.deepcopy(start)
    agent.head.load_state_dict(head.state_dict())
    return agent.eval().requires_grad_(False)


def _best(start: IntervalPolicy, values: Values, stored: dict[str, Tensor]) -> tuple[IntervalPolicy, Dueling]:
    """The best agent so far, and its action values."""
    best, best_q = copy.deepcopy(start).eval().requires_grad_(False), copy.deepcopy(values.q)
    if stored:
        best.head.load_state_dict(part(stored, "best"))
        best_q.load_state_dict(part(stored, "best_q"))
    return best, best_q


@torch.no_grad()
def _leads(head: IntervalHead, states: Tensor, eps: float) -> dict[str, float]:
    scores = head(states)
    best = scores.topk(2).values
    proven = (head.leads_over(*box(states, eps), scores.argmax(1)) > 0).all(1)
    return {"lead": float((best[:, 0] - best[:, 1]).median()), "certified": float(proven.float().mean())}

"""Parallel Q-learning (PQN; Gallici et al., 2024) for images, on a CPU.

Many games at once give batches varied enough to learn from as they come: there is no replay memory. Layer normalisation keeps
the values stable: there is no target network. Lambda-returns carry a reward back over many steps in one update.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.checkpoint import Checkpoint
from sortrl.core.errors import SortRLError
from sortrl.core.files import write_json
from sortrl.core.identity import fingerprint
from sortrl.core.normalizer import Normalizer
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import EnvInfo, Fleet, ParallelFleet, Predicts
from sortrl.envs.fleet import Lessons
from sortrl.nets.architecture import Architecture
from sortrl.teachers.config import PQNConfig
from sortrl.teachers.grading import LOG_FILE, Progress, grade
from sortrl.teachers.teacher import Teacher

MAX_GRAD_NORM = 10.0
RECENT = 100  # training episodes whose mean return is reported
SAVE_EVERY_S = 120.0


def train_pqn(
    info: EnvInfo,
    config: PQNConfig,
    out_dir: str | Path | None,
    seed: int,
    progress: Progress | None,
    processes: int = 1,
    start: Teacher | None = None,
) -> Teacher:
    """Train as :func:`sortrl.teachers.train_teacher` promises; ``progress`` is called after every update.

    A training that was killed plays its games up to where they stood and continues to the same result, bit for bit. So does
    one that goes on with another number of ``processes``, among which the games are shared out.
    """
    if not info.is_image:
        raise SortRLError(
            f"pqn learns from images, but {info.env_id} shows {info.obs_shape} {info.obs_dtype}. Use ppo."
        )
    architecture = Architecture(
        info.obs_shape, info.n_actions, config.hidden, "ReLU", "norm_cnn", channels=config.channels
    )
    identity = {"env_id": info.env_id, "seed": int(seed), "config": asdict(config)}
    with generators_restored():
        torch.manual_seed(seed)
        body = architecture.build()
    if start is not None:
        _check_start(start, architecture)
        body.load_state_dict(start.body.state_dict())
        identity["start"] = fingerprint(start)
    body.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # learns a third faster on CPUs
    out = None if out_dir is None else Path(out_dir)
    return q_learn(
        body,
        lambda: _frozen(body, architecture, info),
        Teacher.load,
        info,
        config,
        out,
        identity,
        progress,
        processes,
        trained=start is not None,
    )


@dataclass(frozen=True)
class Tutor:
    """A teacher whose values are learned in the states of the learner's own play; and states that it answered before, half of
    every batch, without which what is not met just now would be forgotten."""

    teacher: Teacher
    obs: Tensor
    """(n, *obs_shape), raw."""
    values: Tensor
    """(n, n_actions)."""

    @torch.no_grad()
    def values_of(self, obs: Tensor) -> Tensor:
        return torch.cat([self.teacher.scores(self.teacher.normalize(part)) for part in torch.split(obs, 512)])


class Learner(Predicts, Protocol):
    """An agent that can be kept in a folder."""

    def save(self, path: Path, /) -> None: ...


Agent = TypeVar("Agent", bound=Learner)


def q_learn(
    body: nn.Module,
    frozen: Callable[[], Agent],
    load: Callable[[Path], Agent],
    info: EnvInfo,
    config: PQNConfig,
    out: Path | None,
    identity: dict[str, Any],
    progress: Progress | None,
    processes: int = 1,
    trained: bool = False,
    tutor: Tutor | None = None,
) -> Agent:
    """Let ``body`` (unit-space images to action values) learn, and return the best agent seen: ``frozen`` makes one of the present
    weights, ``load`` reads back what it saved in ``out``. ``identity``, which has the seed, is what a resumed training must share.
    What is ``trained`` already is graded before it learns, so that nothing worse is returned.
    With a ``tutor`` it does not learn from rewards.

    Games are played one update ahead, by the weights of before the update: with several ``processes`` both go on at once.
    """
    seed, per_update = identity["seed"], config.n_envs * config.n_steps
    with one_thread(), generators_restored():
        torch.manual_seed(seed)
        optimizer = torch.optim.RAdam(body.parameters(), lr=config.learning_rate)
        generator = torch.Generator().manual_seed(seed)
        checkpoint = Checkpoint(out, identity)
        step, history = checkpoint.restore(body, optimizer, generator)
        best = load(out) if out is not None and history else frozen()
        if history and history[-1]["done"]:
            return best
        run = Run(info, config, seed, checkpoint.extra, processes)
        rollout, player = _stored_rollout(checkpoint.extra), copy.deepcopy(body)
        first, started = step, time.monotonic()
        saved = started
        with closing(run.fleet), ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as thread:
            while not (history and history[-1]["done"]):
                due = trained and not history  # the start may be the best there is
                if not due:
                    rollout = rollout or run.play(body, generator, step)
                    batches = torch.Generator().manual_seed(_mixed(seed, step))
                    lesson = (body, optimizer, rollout, config, batches, step, tutor)
                    before, step = step, step + per_update
                    rollout = run.play_ahead(player, generator, lesson, None if processes == 1 else thread)
                    due = step // config.eval_every > before // config.eval_every or step >= config.total_steps
                if due:
                    agent = frozen()
                    score, confirmed = grade(agent, info.env_id, config, seed, len(history))
                    # A confirmed agent wins over a lucky one: its return was measured on more episodes.
                    if confirmed or score > max((row["return"] for row in history), default=-math.inf):
                        best = agent
                        if out is not None:
                            best.save(out)
                    row = {"step": step, "return": score, "training_return": run.mean_return, "hours": run.hours()}
                    history.append({**row, "done": confirmed or step >= config.total_steps})
                    if out is not None:
                        write_json(out / LOG_FILE, {"identity": identity, "history": history})
                if due or time.monotonic() - saved >= SAVE_EVERY_S:
                    checkpoint.save(body, optimizer, generator, step, history, run.state() | _to_store(rollout))
                    saved = time.monotonic()
                if progress is not None:
                    rate = max(1, step - first) / (time.monotonic() - started)
                    row = {"step": step, "total": config.total_steps, "training_return": run.mean_return}
                    row |= {"steps_per_s": rate, "hours_left": (config.total_steps - step) / rate / 3600}
                    progress(row | ({"return": history[-1]["return"]} if history else {}))
    return best


class Rollout(NamedTuple):
    """A stretch of every game, time first: (steps, games, ...). ``next_values`` are the best action values one step on."""

    obs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    values: Tensor
    """Of the actions that were played, when they were played."""
    next_values: Tensor


def _stored_rollout(stored: dict[str, Tensor]) -> Rollout | None:
    """What was played ahead when the training was saved."""
    found = [stored.get(f"rollout.{name}") for name in Rollout._fields]
    parts = [tensor for tensor in found if tensor is not None]
    return Rollout(*parts) if len(parts) == len(found) else None


def _to_store(rollout: Rollout | None) -> dict[str, Tensor]:
    return {} if rollout is None else {f"rollout.{name}": part for name, part in rollout._asdict().items()}


def _mixed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, 7, step]).generate_state(1)[0])


class Run:
    """The games under way, how they explore, and what is known of their returns."""

    def __init__(
        self, info: EnvInfo, config: PQNConfig, seed: int, stored: dict[str, Tensor], processes: int = 1
    ) -> None:
        self.config = config
        state = {name[6:]: tensor.numpy() for name, tensor in stored.items() if name.startswith("fleet.")}
        options = {"episodic_life": True} if config.episodic_life else {}
        games = (info.env_id, config.n_envs, seed, config.stagger, options)
        lessons = Lessons(config.patience, config.retry, config.sticky)
        self.fleet: Fleet | ParallelFleet = (
            Fleet(*games, state=state or None, lessons=lessons)
            if processes == 1
            else ParallelFleet(*games, state=state or None, lessons=lessons, processes=processes)
        )
        self.left = stored.get("left", torch.zeros(config.n_envs, dtype=torch.int64))
        self.action = stored.get("action", torch.zeros(config.n_envs, dtype=torch.int64))
        self.recent: deque[float] = deque(stored.get("recent", torch.zeros(0)).tolist(), maxlen=RECENT)
        self.seconds_before = float(stored.get("seconds", torch.zeros(1)))
        self.started = time.monotonic()

    def play(self, body: nn.Module, generator: torch.Generator, step: int) -> Rollout:
        """``n_steps`` of every game, with fewer and fewer random actions as the training goes on."""
        config, n_actions = self.config, self.fleet.info.n_actions
        falling = config.exploration_fraction * config.total_steps
        decayed = min(1.0, step / falling) if falling else 1.0
        eps = 1.0 + (config.exploration_final_eps - 1.0) * decayed
        steps, best = [], []
        for _ in range(config.n_steps):
            obs = torch.from_numpy(self.fleet.obs.copy())
            with torch.no_grad():
                values = _values(body, obs, config)
            best.append(values.amax(1))
            actions = self.explore(values.argmax(1), eps, n_actions, generator)
            played = self.fleet.step(actions.numpy())
            self.recent.extend(played.returns)
            after = (torch.from_numpy(array) for array in played[:3])
            steps.append((obs, actions, *after, values.gather(1, actions[:, None]).squeeze(1)))
        with torch.no_grad():
            best.append(_values(body, torch.from_numpy(self.fleet.obs), config).amax(1))
        obs, actions, rewards, terminated, truncated, taken = (torch.stack(part) for part in zip(*steps, strict=True))
        return Rollout(obs, actions, rewards, terminated, truncated, taken, torch.stack(best[1:]))

    def play_ahead(
        self, player: nn.Module, generator: torch.Generator, lesson: tuple[Any, ...], thread: ThreadPoolExecutor | None
    ) -> Rollout | None:
        """Learn from a rollout (the arguments of :func:`learn`), in the ``thread`` if there is one, while ``player``, which gets the
        weights of before, plays the next one; None at the end of the training."""
        body, step = lesson[0], lesson[5] + self.config.n_envs * self.config.n_steps
        player.load_state_dict(body.state_dict())
        learned = None if thread is None else thread.submit(learn, *lesson)
        ahead = self.play(player, generator, step) if step < self.config.total_steps else None
        if learned is None:
            learn(*lesson)
        else:
            learned.result()
        return ahead

    def explore(self, greedy: Tensor, eps: float, n_actions: int, generator: torch.Generator) -> Tensor:
        """The greedy actions, but in games that explore the random action of their present run."""
        n = len(greedy)
        draws = torch.rand((2, n), generator=generator)
        random_actions = torch.randint(n_actions, (n,), generator=generator)
        starts = (self.left == 0) & (draws[0] < eps)
        # 1 / uniform is k or more with probability 1 / k.
        lengths = (1.0 / draws[1].clamp(min=1e-9)).long().clamp(max=self.config.longest_run)
        self.left = torch.where(starts, lengths, self.left)
        self.action = torch.where(starts, random_actions, self.action)
        actions = torch.where(self.left > 0, self.action, greedy)
        self.left = (self.left - 1).clamp(min=0)
        return actions

    @property
    def mean_return(self) -> float:
        return sum(self.recent) / max(1, len(self.recent))

    def hours(self) -> float:
        """Of training, all its parts together."""
        return (self.seconds_before + time.monotonic() - self.started) / 3600

    def state(self) -> dict[str, Tensor]:
        fleet = {f"fleet.{name}": torch.from_numpy(array) for name, array in self.fleet.state().items()}
        own = {"left": self.left, "action": self.action, "recent": torch.tensor(list(self.recent), dtype=torch.float64)}
        return {**fleet, **own, "seconds": torch.tensor(self.hours() * 3600, dtype=torch.float64)}


def lambda_returns(rollout: Rollout, gamma: float, q_lambda: float) -> Tensor:
    """What each played action was worth: R_t = r_t + gamma (lambda R_{t+1} + (1 - lambda) max_a Q(s_{t+1}, a)).

    Nothing follows the end of a game. Where a game ran out of time, what would have followed is not known: such a step keeps
    its own estimate, so that nothing is learned from it.
    """
    returns = torch.empty_like(rollout.rewards)
    ahead = rollout.next_values[-1]
    for t in reversed(range(len(returns))):
        ahead = q_lambda * ahead + (1.0 - q_lambda) * rollout.next_values[t]
        ahead = rollout.rewards[t] + gamma * ahead * ~rollout.terminated[t]
        ahead = torch.where(rollout.truncated[t] & ~rollout.terminated[t], rollout.values[t], ahead)
        returns[t] = ahead
    return returns


def learn(
    body: nn.Module,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    config: PQNConfig,
    generator: torch.Generator,
    step: int,
    tutor: Tutor | None = None,
) -> None:
    """A few passes over the rollout in random batches: squared error against its lambda-returns, or the tutor's values."""
    if config.linear_decay:
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1.0 - step / config.total_steps)
    rewards = rollout.rewards.sign() if config.clip_reward else rollout.rewards / config.reward_unit
    targets = lambda_returns(rollout._replace(rewards=rewards), config.gamma, config.q_lambda).flatten()
    obs, actions = rollout.obs.flatten(0, 1), rollout.actions.flatten()
    taught = None if tutor is None else tutor.values_of(obs)
    for batch in _batches(len(targets), config, generator):
        values = _values(body, obs[batch], config)
        if taught is None:
            played = values.gather(1, actions[batch, None]).squeeze(1)
            loss = 0.5 * nn.functional.mse_loss(played, targets[batch])
        else:
            assert tutor is not None
            index = torch.randint(len(tutor.obs), (len(batch),), generator=generator)
            earlier = value_loss(body(_unit(tutor.obs[index])), tutor.values[index])
            loss = (value_loss(values, taught[batch]) + earlier) / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(body.parameters(), MAX_GRAD_NORM)
        optimizer.step()


def value_loss(values: Tensor, taught: Tensor) -> Tensor:
    """Of a student that learns action values: squared error, and cross-entropy of its choices, both in units of what usually lies
    between the values of two actions. Errors that are small beside the values would otherwise decide how it plays.

    >>> taught = torch.tensor([[3.0, 3.5], [1.0, 0.5]])
    >>> bool(value_loss(taught.flip(1), taught) > value_loss(taught, taught) + 1)
    True
    """
    unit = (taught - taught.mean(1, keepdim=True)).square().mean().sqrt().clamp(min=1e-6)
    error = nn.functional.mse_loss(values / unit, taught / unit)
    return 0.5 * error + nn.functional.cross_entropy(4 * values / unit, taught.argmax(1))


def _batches(n: int, config: PQNConfig, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(config.n_epochs):
        yield from torch.split(torch.randperm(n, generator=generator), config.batch_size)


def _values(body: nn.Module, obs: Tensor, config: PQNConfig) -> Tensor:
    """Of bytes. The last layer is never in half precision: actions differ by less than it can tell apart."""
    if not config.half:
        values: Tensor = body(_unit(obs))
        return values
    assert isinstance(body, nn.Sequential)
    with torch.autocast("cpu", torch.bfloat16):
        features = body[:-1](_unit(obs))
    last: Tensor = body[-1](features.float())
    return last


def _unit(obs: Tensor) -> Tensor:
    return obs.float().div_(255.0)


def _check_start(start: Teacher, architecture: Architecture) -> None:
    if start.algorithm != "pqn" or start.architecture != architecture:
        raise SortRLError(
            f"Training cannot go on from {start.name} ({start.algorithm}, {start.architecture}): expected a teacher trained by pqn "
            f"with the same network ({architecture}). Start from another, or from nothing."
        )


def _frozen(body: nn.Module, architecture: Architecture, info: EnvInfo) -> Teacher:
    """A teacher with a copy of the weights."""
    copy = architecture.build()
    copy.load_state_dict(body.state_dict())
    name = f"pqn-{info.env_id}"
    return Teacher(copy, Normalizer.from_pixels(info.obs_shape), info.n_actions, name, "pqn", architecture)

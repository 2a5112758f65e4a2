"""A teacher that copes with attacks: trained on by reinforcement learning, from the one that was given, while it is attacked.

A student can follow its teacher closely and still be led astray, because it is asked about states to which its teacher never had an
answer: those that an adversary leads to. Here the teacher itself learns what to do there. It plays on under a gradient attack on its own
decisions, of a size that is drawn for every episode, and proximal policy optimisation (PPO; Schulman et al., 2017) improves what it does.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.attacks import PGD
from sortrl.attacks.valid import valid_range
from sortrl.core.checkpoint import Checkpoint, damage_named, part, prefixed
from sortrl.core.errors import SortRLError
from sortrl.core.identity import fingerprint
from sortrl.core.progress import Progress
from sortrl.core.seeding import one_thread
from sortrl.envs import EnvInfo, EnvSlots, Episode, Fleet, describe, play_episodes
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.proximal import Rollout, improve, size_of_returns
from sortrl.teachers.teacher import Teacher
from sortrl.teachers.wrappers import Rescored

CHECKED = 4  # states of the training that are compared with the teacher on fresh episodes at the end
CRITIC = 128  # width of its two hidden layers
CRITIC_RATE = 1e-3
SAVE_EVERY_S = 60.0
CALM = 0.4  # share of the episodes that nobody attacks, so that the skill of the teacher is kept
ATTACK_STEPS = 3


@dataclass(frozen=True)
class HardenConfig:
    """How to train on."""

    eps: float
    """Episodes are played under attacks of sizes between 0 and this (unit space, l_inf)."""
    steps: int = 3_000_000
    """Environment steps altogether."""
    warm_updates: int = 5
    """Updates in which only the critic learns: a fresh one would lead the teacher astray."""
    learning_rate: float = 3e-4
    """Of the teacher; it falls linearly to zero."""
    gamma: float = 0.995
    n_envs: int = 64
    n_steps: int = 128
    """Steps of each environment between updates."""
    batch_size: int = 1024
    check_episodes: int = 128
    """Fresh episodes at the end, attacked by all sizes, on which the training must beat the teacher."""
    seed: int = 0
    """Of the training; students with seeds of their own can share one hardened teacher."""

    @property
    def updates(self) -> int:
        return max(1, self.steps // (self.n_envs * self.n_steps))

    @property
    def quarters(self) -> set[int]:
        """Updates after which the state of the training is kept for the comparison at the end."""
        return {math.ceil(self.updates * share / CHECKED) for share in range(1, CHECKED + 1)}

    def __post_init__(self) -> None:
        whole = {"warm_updates": 0, "seed": 0, "n_steps": 2, "check_episodes": 2}
        whole |= dict.fromkeys(("steps", "n_envs", "batch_size"), 1)
        for name, least in whole.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SortRLError(f"HardenConfig: {name} is {value!r}, expected a whole number, at least {least}.")
        for name in ("eps", "learning_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SortRLError(f"HardenConfig: {name} is {getattr(self, name)}, expected a positive number.")
        if not 0 <= self.gamma <= 1:
            raise SortRLError(f"HardenConfig: gamma is {self.gamma}, expected between 0 and 1.")


class Adversary:
    """PGD against an agent that is still learning, within the declared range of observations."""

    def __init__(self, teacher: Teacher, info: EnvInfo) -> None:
        self.teacher, self.attack = teacher, PGD(ATTACK_STEPS, step_share=1.0 / ATTACK_STEPS)
        self.low, self.high = valid_range(teacher, info)

    def __call__(self, body: nn.Module, unit: Tensor, sizes: Tensor) -> Tensor:
        """What to show the agent in the place of ``unit`` (batch, size), each within its own distance (batch,)."""
        return self.attack(Rescored(self.teacher, body), unit, sizes, self.low, self.high).perturbed


class _Run:
    """The games under way and the sizes of the attacks in them."""

    def __init__(self, env_id: str, teacher: Teacher, config: HardenConfig, stored: dict[str, Tensor]) -> None:
        self.config, self.teacher = config, teacher
        state = {name: tensor.numpy() for name, tensor in part(stored, "fleet").items()}
        self.fleet = Fleet(env_id, config.n_envs, config.seed, state=state or None)
        self.adversary = Adversary(teacher, self.fleet.info)
        self.sizes = stored.get("sizes", torch.zeros(config.n_envs))
        self.scale = stored.get("scale", torch.zeros(()))
        self.fresh = "sizes" not in stored

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        calm, size = torch.rand((2, n), generator=generator)
        return torch.where(calm < CALM, 0.0, size * self.config.eps)

    def play(self, agent: nn.ModuleDict, generator: torch.Generator) -> tuple[Rollout, list[float]]:
        """``n_steps`` of every game, and the returns of the episodes that ended."""
        if self.fresh:
            self.sizes, self.fresh = self.draw(len(self.fleet), generator), False
        rows, values, returns = [], [], []
        for _ in range(self.config.n_steps):
            unit, true = self._view()
            shown = self.adversary(agent["actor"], unit, self.sizes)
            with torch.no_grad():
                log_probs = agent["actor"](shown).log_softmax(1)
                values.append(agent["critic"](true)[:, 0])
            actions = torch.multinomial(log_probs.exp(), 1, generator=generator)
            played = self.fleet.step(actions[:, 0].numpy())
            returns += played.returns
            rewards, terminated, truncated = (torch.from_numpy(array) for array in played[:3])
            ended = terminated | truncated
            rows.append(
                (
                    shown,
                    true,
                    actions[:, 0],
                    log_probs.gather(1, actions)[:, 0],
                    rewards,
                    ended,
                    truncated & ~terminated,
                )
            )
            self.sizes = torch.where(ended, self.draw(len(self.fleet), generator), self.sizes)
        with torch.no_grad():
            values.append(agent["critic"](self._view()[1])[:, 0])
        parts = [torch.stack(part) for part in zip(*rows, strict=True)]
        return Rollout._make([*parts, torch.stack(values)]), returns

    def _view(self) -> tuple[Tensor, Tensor]:
        unit = self.teacher.normalize(self.fleet.obs)
        return unit, torch.cat([unit, self.sizes[:, None] / self.config.eps], 1)

    def state(self) -> dict[str, Tensor]:
        fleet = {name: torch.from_numpy(array) for name, array in self.fleet.state().items()}
        return prefixed("fleet", fleet) | {"sizes": self.sizes, "scale": self.scale}


def hardened(
    teacher: Teacher,
    env_id: str,
    config: HardenConfig,
    out_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Teacher:
    """Train the teacher on, under attack; return the best of four states of that training and the teacher itself.

    They are compared on fresh episodes under attacks of all sizes, so at worst the teacher comes back as it was. With ``out_dir``
    the training is kept there, and the same call continues it to the same result.

    >>> from sortrl.core.normalizer import Normalizer
    >>> from sortrl.teachers import Architecture
    >>> architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(8,), activation="Tanh")
    >>> pilot = Teacher(architecture.build(), Normalizer.identity((4,)), 2, "pilot", "ppo", architecture)
    >>> quick = HardenConfig(eps=0.1, steps=64, n_envs=2, n_steps=8, check_episodes=2)
    >>> hardened(pilot, "CartPole-v1", quick).name
    'pilot, hardened at 0.1'
    """
    architecture, info = _known(teacher), describe(env_id)
    check_fit(teacher, info)
    identity = {"env": env_id, "config": asdict(config), "teacher": fingerprint(teacher)}
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        actor = architecture.build_with(_copy(teacher.body), teacher.name).requires_grad_(True)
        agent = nn.ModuleDict({"actor": actor, "critic": _critic(info.obs_size + 1)})
        groups = [{"params": agent[name].parameters()} for name in ("actor", "critic")]
        optimizer = torch.optim.Adam(groups, lr=CRITIC_RATE)
        generator = torch.Generator().manual_seed(config.seed)
        checkpoint = Checkpoint(out_dir, identity)
        update, history = checkpoint.restore(agent, optimizer, generator)
        with damage_named(checkpoint.path or Path()):
            found = [_copy(teacher.body), *_kept(checkpoint.extra)]
            if history and "chosen" in history[-1]:
                return _with(teacher, found[history[-1]["chosen"]], config)
            run = _Run(env_id, teacher, config, checkpoint.extra)
        saved = time.monotonic()
        with closing(run.fleet):
            while update < config.updates:
                returns = _learn(run, agent, optimizer, generator, update)
                update += 1
                history += [{"update": update, "return": float(np.mean(returns))}] if returns else []
                due = update in config.quarters
                if due:
                    found.append(_copy(actor))
                if due or time.monotonic() - saved >= SAVE_EVERY_S:
                    checkpoint.save(agent, optimizer, generator, update, history, run.state() | _numbered(found[1:]))
                    saved = time.monotonic()
                if progress is not None:
                    row = {"return": history[-1]["return"]} if history else {}
                    progress({"step": update, "total": config.updates, **row})
            candidates = [_with(teacher, weights, config) for weights in found]
            means = [float(returns_under_attack(candidate, info, config).mean()) for candidate in candidates]
            history.append({"means": means, "chosen": int(np.argmax(means))})
            checkpoint.save(agent, optimizer, generator, update, history, run.state() | _numbered(found[1:]))
        return candidates[int(np.argmax(means))]


def _learn(
    run: _Run, agent: nn.ModuleDict, optimizer: torch.optim.Optimizer, generator: torch.Generator, update: int
) -> list[float]:
    """One update, with a rate that falls to zero; the returns of the episodes that ended in it."""
    config, left = run.config, 1.0 - update / run.config.updates
    optimizer.param_groups[0]["lr"] = config.learning_rate * left if update >= config.warm_updates else 0.0
    optimizer.param_groups[1]["lr"] = CRITIC_RATE * left
    rollout, returns = run.play(agent, generator)
    if update == 0:
        run.scale = size_of_returns(rollout, config.gamma)
    improve(agent, optimizer, rollout, config, generator, float(run.scale))
    return returns


def returns_under_attack(teacher: Teacher, info: EnvInfo, config: HardenConfig) -> npt.NDArray[np.float64]:
    """Greedy returns of fresh episodes, the first ones calm and the others attacked by sizes that rise evenly up to eps."""
    n = config.check_episodes
    calm = round(CALM * n)
    sizes = torch.cat([torch.zeros(calm), torch.linspace(0, config.eps, n - calm)])
    seeds = np.random.SeedSequence([config.seed, 8]).generate_state(n) >> 1  # hashed: no episodes of an evaluation
    adversary = Adversary(teacher, info)

    def act(episodes: list[Episode]) -> npt.NDArray[np.int64]:
        unit = teacher.normalize(np.stack([episode.obs for episode in episodes]))
        shown = adversary(teacher.body, unit, sizes[[episode.number for episode in episodes]])
        actions: npt.NDArray[np.int64] = teacher.scores(shown).argmax(1).numpy()
        return actions

    with EnvSlots(info.env_id, n) as slots:
        played = play_episodes(slots, seeds.tolist(), act, Episode)
    return np.array([episode.total for episode in played])


def _numbered(kept: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"kept.{n}.{name}": tensor for n, weights in enumerate(kept) for name, tensor in weights.items()}


def _kept(stored: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The inverse of :func:`_numbered`."""
    return [weights for number in range(CHECKED) if (weights := part(stored, f"kept.{number}"))]


def _critic(size: int) -> nn.Sequential:
    hidden = [nn.Linear(size, CRITIC), nn.Tanh(), nn.Linear(CRITIC, CRITIC), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(CRITIC, 1))


def _known(teacher: Teacher) -> Any:
    known = teacher.architecture
    if known is None or known.trunk != "mlp" or known.action_groups or not teacher.is_stochastic:
        raise SortRLError(
            f"hardened: {teacher.name} ({teacher.algorithm}) is not a policy over vectors whose weights are known, so it cannot be "
            "trained on. Leave harden out."
        )
    return known


def _copy(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def _with(teacher: Teacher, weights: dict[str, Tensor], config: HardenConfig) -> Teacher:
    name = f"{teacher.name}, hardened at {config.eps:g}"
    body = _known(teacher).build_with(weights, name)
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm, teacher.architecture)

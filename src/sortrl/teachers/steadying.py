"""A teacher that decides less often by a hair's breadth: searched for by simulation, near the teacher that was given.

How large a share of its decisions a student can have certified is settled by its teacher. A controller that crosses its
switching surface at every step has every state near it; one that swings a little slower, or switches by another sum of the same
inputs, may play as well and be far from the surface most of the time. An ordinary training has no reason to prefer the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.attacks import PGD
from sortrl.core.checkpoint import damage_named
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.identity import check_same, fingerprint
from sortrl.core.progress import Progress
from sortrl.core.records import IntArray
from sortrl.core.seeding import one_thread
from sortrl.envs import EnvSlots, Episode, play_episodes
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher
from sortrl.teachers.wrappers import Rescored

Array = npt.NDArray[np.float64]
STATE = ("mean", "variance", "path", "step_path")


class Evolution:
    """A normal distribution with independent coordinates that moves to where scores are high.

    :meth:`ask` draws a population in opposite pairs, :meth:`tell` takes its scores. The draws depend on the seed and the number of
    the generation alone, so that a search goes on from its :attr:`state` to the same result.

    >>> search = Evolution(size=3, population=12, seed=0)
    >>> for generation in range(60):
    ...     search.tell(-((search.ask() - np.array([1.0, -2.0, 0.5])) ** 2).sum(1))
    >>> search.mean.round(2).tolist()
    [1.0, -2.0, 0.5]
    """

    def __init__(self, size: int, population: int, seed: int) -> None:
        self.population, self.seed, self.generation, self.sigma = 2 * (population // 2), seed, 0, 1.0
        self.mean, self.variance = np.zeros(size), np.ones(size)
        self.path, self.step_path = np.zeros(size), np.zeros(size)
        best = self.population // 2
        weights = math.log(best + 0.5) - np.log(np.arange(1, best + 1))
        self._weights: Array = weights / weights.sum()
        mass = self._mass = 1.0 / float((self._weights**2).sum())
        # The constants of the paper; n + 2 over 3 is what independent coordinates gain in speed.
        self._step_rate = (mass + 2) / (size + mass + 5)
        self._damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (size + 1)) - 1) + self._step_rate
        self._path_rate = (4 + mass / size) / (size + 4 + 2 * mass / size)
        one, many = 2 / ((size + 1.3) ** 2 + mass), 2 * (mass - 2 + 1 / mass) / ((size + 2) ** 2 + mass)
        self._one_rate = min(0.5, one * (size + 2) / 3)
        self._many_rate = max(0.0, min(0.49, many * (size + 2) / 3))
        self._length = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))

    def _draws(self) -> Array:
        rng = np.random.default_rng([self.seed, 8, self.generation])
        half = rng.standard_normal((self.population // 2, len(self.mean)))
        return np.concatenate([half, -half])

    def ask(self) -> Array:
        """The points (population, size) of this generation."""
        points: Array = self.mean + self.sigma * self._draws() * np.sqrt(self.variance)
        return points

    def tell(self, scores: Array) -> None:
        """Move on, given the scores (population,) of the points asked for: more is better."""
        best = np.argsort(-scores, kind="stable")[: len(self._weights)]
        draws = self._draws()[best]
        moves = draws * np.sqrt(self.variance)
        move, rate = self._weights @ moves, self._step_rate
        self.generation += 1
        self.mean = self.mean + self.sigma * move
        self.step_path = (1 - rate) * self.step_path + math.sqrt(rate * (2 - rate) * self._mass) * (
            self._weights @ draws
        )
        length = float(np.linalg.norm(self.step_path))
        usual = length / math.sqrt(1 - (1 - rate) ** (2 * self.generation))
        steady = usual < (1.4 + 2 / (len(self.mean) + 1)) * self._length
        rate = self._path_rate
        self.path = (1 - rate) * self.path + steady * math.sqrt(rate * (2 - rate) * self._mass) * move
        kept = 1 - self._one_rate - self._many_rate
        spread = self._weights @ moves**2
        self.variance = kept * self.variance + self._one_rate * self.path**2 + self._many_rate * spread
        self.sigma *= math.exp(min(1.0, self._step_rate / self._damping * (length / self._length - 1)))

    @property
    def state(self) -> dict[str, Array]:
        """All that changes, as arrays."""
        return {name: getattr(self, name) for name in STATE} | {"counts": np.array([self.generation, self.sigma])}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a :attr:`state`."""
        for name in STATE:
            value = np.asarray(state[name], np.float64)
            if value.shape != self.mean.shape or not np.isfinite(value).all():
                raise ValueError(f"{name} of shape {value.shape}, expected {self.mean.shape} and finite numbers")
            setattr(self, name, value)
        generation, sigma = map(float, np.asarray(state["counts"], np.float64))
        if not (0 <= generation < 2**53 and 0 < sigma < math.inf and (self.variance >= 0).all()):
            raise ValueError(
                f"generation {generation:g}, step size {sigma:g} and variances, expected no negative numbers"
            )
        self.generation, self.sigma = int(generation), sigma


FORMAT = "sortrl-steadying-1"
FILE_NAME = "steadying.safetensors"
CHECKED = 4  # states of the search that are compared with the teacher on fresh episodes at the end
GIVE = 0.02  # share of the teacher's return that may be given up for free
PRICE = 0.2  # share of the return beyond that, that is worth as much as all decisions together
STEP = PGD(1, step_share=1.0, loss="margin")


@dataclass(frozen=True)
class SteadyConfig:
    """How to search."""

    eps: float
    """Decisions should not change within this distance (unit space, l_inf)."""
    eps_attack: float = 0.0
    """If not 0, half of the episodes are played under a one-step attack of this size, and their return counts too."""
    generations: int = 40
    population: int = 20
    """Variants of the teacher in each."""
    episodes: int = 6
    """That each of them plays; the same ones for all."""
    check_episodes: int = 64
    """Fresh episodes at the end, on which the search must beat the teacher."""
    seed: int = 0
    """Of the search; students with seeds of their own can share one steady teacher."""

    def __post_init__(self) -> None:
        for name, least in (("generations", 1), ("population", 4), ("episodes", 2), ("check_episodes", 2), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SortRLError(f"SteadyConfig: {name} is {value!r}, expected a whole number, at least {least}.")
        if not 0 < self.eps < float("inf"):
            raise SortRLError(f"SteadyConfig: eps is {self.eps}, expected a positive number.")
        if not 0 <= self.eps_attack < float("inf"):
            raise SortRLError(f"SteadyConfig: eps_attack is {self.eps_attack}, expected a finite number >= 0.")


class Played(NamedTuple):
    """What became of variants, one entry each."""

    clean: Array
    """Mean return of episodes that nobody attacked."""
    attacked: Array
    """Of those under attack; of all if there were none."""
    steady: Array
    """Share of the decisions, in the former, that a step of size eps against them does not change."""


class Variants:
    """Teachers near a given one, all asked in one batch.

    A point has, per variant: logarithms of factors on the inputs, shifts of the inputs, shifts of the scores and changes of the
    last layer, each in steps of a size that makes some difference.
    """

    def __init__(self, teacher: Teacher, points: Array) -> None:
        self.origin = teacher
        self.trunk, self.head = _mlp(teacher)
        n_actions, width = self.head.weight.shape
        size = teacher.obs_shape[0]
        parts = torch.split(torch.from_numpy(points).float(), [size, size, n_actions, n_actions * width], 1)
        self.factors, self.shifts, self.biases = (0.3 * parts[0]).exp(), 0.2 * parts[1], 0.5 * parts[2]
        self.changes = (0.3 * self.head.weight.std() * parts[3]).view(-1, n_actions, width)

    @staticmethod
    def size(teacher: Teacher) -> int:
        """How many numbers a point has."""
        head = _mlp(teacher)[1]
        return 2 * teacher.obs_shape[0] + head.weight.shape[0] + head.weight.numel()

    def scores(self, unit: Tensor, which: Tensor) -> Tensor:
        """Scores (batch, n_actions) of unit-space observations, each by the variant with the number ``which`` (batch,)."""
        hidden = self.trunk(unit * self.factors[which] + self.shifts[which])
        own = torch.einsum("bh,bah->ba", hidden, self.changes[which])
        scores: Tensor = self.head(hidden) + own + self.biases[which]
        return scores

    def decide(self, unit: Tensor, which: Tensor, eps: Tensor) -> tuple[IntArray, IntArray]:
        """Actions, and what a step of size eps (batch,) against the lead of each makes of it."""
        found = STEP(Rescored(self.origin, lambda shown: self.scores(shown, which)), unit, eps)
        return found.clean_action, found.action

    def teacher(self, number: int) -> Teacher:
        """One variant as a teacher of its own, with the network of the one it came from."""
        like = self.origin
        tensors = {name: tensor.clone() for name, tensor in like.body.state_dict().items()}
        weights = [name for name in tensors if name.endswith("weight")]
        first, last = (name.removesuffix("weight") for name in (weights[0], weights[-1]))
        tensors[f"{last}weight"] += self.changes[number]
        tensors[f"{last}bias"] += self.biases[number]
        tensors[f"{first}bias"] += tensors[f"{first}weight"] @ self.shifts[number]  # shifts come after factors
        tensors[f"{first}weight"] *= self.factors[number]
        assert like.architecture is not None
        body = like.architecture.build_with(tensors, f"a variant of {like.name}")
        return Teacher(body, like.normalizer, like.n_actions, like.name, like.algorithm, like.architecture)


def _mlp(teacher: Teacher) -> tuple[nn.Sequential, nn.Linear]:
    """All but the last layer, and the last."""
    known = teacher.architecture
    if known is None or known.trunk != "mlp" or known.n_quantiles or known.action_groups or len(known.obs_shape) != 1:
        raise SortRLError(
            f"steadied: {teacher.name} ({teacher.algorithm}) is not a plain MLP over a vector, whose weights can be searched. "
            "Leave steady out."
        )
    layers = list(teacher.body.children())
    assert isinstance(layers[-1], nn.Linear)
    return nn.Sequential(*layers[:-1]), layers[-1]


def play(
    teacher: Teacher, env_id: str, points: Array, seeds: Sequence[int], eps: float, eps_attack: float = 0.0
) -> Played:
    """Let variants play the episodes named by ``seeds`` side by side; with ``eps_attack``, the second half of them under attack."""
    n, per = len(points), len(seeds)
    variants = Variants(teacher, points)
    which = np.repeat(np.arange(n), per)
    attacked = np.tile(np.arange(per) >= (per + 1) // 2, n) & (eps_attack > 0)
    sizes = torch.from_numpy(np.where(attacked, eps_attack, eps)).float()
    held = np.zeros(n * per)

    def act(episodes: list[Episode]) -> Array:
        playing = np.array([episode.number for episode in episodes])
        unit = teacher.normalize(np.stack([episode.obs for episode in episodes]))
        actions, pushed = variants.decide(unit, torch.from_numpy(which[playing]), sizes[playing])
        held[playing] += actions == pushed
        chosen: Array = np.where(attacked[playing], pushed, actions)
        return chosen

    with EnvSlots(env_id, n * per) as slots:
        played = play_episodes(slots, list(seeds) * n, act, Episode)
    returns = np.array([episode.total for episode in played]).reshape(n, per)
    steps = np.array([episode.steps for episode in played]).reshape(n, per)
    steady = held.reshape(n, per)
    calm = ~attacked[:per]
    hurt = returns[:, ~calm] if not calm.all() else returns
    return Played(returns[:, calm].mean(1), hurt.mean(1), steady[:, calm].sum(1) / steps[:, calm].sum(1))


def fitness(played: Played, config: SteadyConfig) -> Array:
    """Steadiness less the price of lost return; the first entry is the teacher itself, whose clean return is the measure."""
    own = float(played.clean[0])
    size = max(abs(own), 1e-6)
    lost = np.maximum(0.0, own - played.clean - GIVE * size)
    if config.eps_attack > 0:
        lost = lost + np.maximum(0.0, own - played.attacked - GIVE * size)
    result: Array = played.steady - lost / (PRICE * size)
    return result


def steadied(
    teacher: Teacher,
    env_id: str,
    config: SteadyConfig,
    out_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Teacher:
    """Search near the teacher for one that plays as well and whose decisions fewer small displacements change.

    Needs simulation only, no gradient of the return. The states of the search after each quarter are compared with the teacher on
    fresh episodes, and the best of them all is returned: at worst the teacher itself. With ``out_dir`` the search is kept there
    after every generation, and the same call continues it.

    >>> from sortrl.core.normalizer import Normalizer
    >>> from sortrl.teachers import Architecture
    >>> architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(), activation="Tanh")
    >>> weights = {"1.weight": torch.tensor([[0.0] * 4, [0.0, 0.5, 5.0, 1.0]]), "1.bias": torch.zeros(2)}
    >>> unit = Normalizer.identity((4,))
    >>> pilot = Teacher(architecture.build_with(weights, "weights"), unit, 2, architecture=architecture)
    >>> quick = SteadyConfig(eps=0.05, generations=2, population=4, episodes=2, check_episodes=2)
    >>> steadied(pilot, "CartPole-v1", quick).name
    'teacher, steadied at 0.05'
    """
    search = Evolution(Variants.size(teacher), config.population, config.seed)
    identity = {"env": env_id, "config": asdict(config), "teacher": fingerprint(teacher)}
    path = None if out_dir is None else Path(out_dir) / FILE_NAME
    kept = _restored(search, path, identity)
    quarters = {round(config.generations * part / CHECKED) for part in range(1, CHECKED + 1)}
    itself = np.zeros((1, len(search.mean)))
    with one_thread(), EnvSlots(env_id, 1) as slots:
        check_fit(teacher, slots.info)
        while search.generation < config.generations:
            points = np.concatenate([itself, search.ask()])
            seeds = _seeds(config.seed, search.generation, config.episodes)
            played = play(teacher, env_id, points, seeds, config.eps, config.eps_attack)
            search.tell(fitness(played, config)[1:])
            if search.generation in quarters:
                kept.append(search.mean)
            if path is not None:
                _keep(search, kept, path, identity)
            if progress is not None:
                row = {"return": float(np.median(played.clean[1:])), "steady": float(np.median(played.steady[1:]))}
                progress({"step": search.generation, "total": config.generations, **row})
        points = np.concatenate([itself, kept])
        seeds = _seeds(config.seed, config.generations, config.check_episodes)
        chosen = int(np.argmax(fitness(play(teacher, env_id, points, seeds, config.eps, config.eps_attack), config)))
    found = Variants(teacher, points).teacher(chosen)
    found.name = f"{teacher.name}, steadied at {config.eps:g}"
    return found


def _seeds(seed: int, generation: int, n: int) -> list[int]:
    """Hashed, so that they are no episodes of an evaluation, which counts up from its own seed."""
    numbers = np.random.SeedSequence([seed, 7, generation]).generate_state(n) >> 1
    return [int(number) for number in numbers]


def _keep(search: Evolution, kept: list[Array], path: Path, identity: dict[str, Any]) -> None:
    tensors = {name: torch.from_numpy(value.copy()) for name, value in search.state.items()}
    tensors |= {f"kept.{number}": torch.from_numpy(point.copy()) for number, point in enumerate(kept)}
    write_tensors(path, tensors, {"format": FORMAT, "identity": identity})


def _restored(search: Evolution, path: Path | None, identity: dict[str, Any]) -> list[Array]:
    """Set the search back to where it was, and return the states of it that were kept."""
    if path is None or not path.exists():
        return []
    tensors, metadata = read_tensors(path)
    advice = "Use another directory, or delete it to start over."
    if metadata.get("format") != FORMAT:
        raise SortRLError(f"{path} has format {metadata.get('format')!r}, expected {FORMAT!r}. {advice}")
    check_same(metadata.get("identity"), identity, f"{path} belongs to another search", advice)
    with damage_named(path, "Delete it to start this search over."):
        search.restore({name: tensors[name].numpy() for name in (*STATE, "counts")})
        kept = [tensors[f"kept.{number}"].double().numpy() for number in range(len(tensors) - len(STATE) - 1)]
        if any(point.shape != search.mean.shape for point in kept):
            raise ValueError(f"points of shapes {[point.shape for point in kept]}, expected {search.mean.shape}")
        return kept

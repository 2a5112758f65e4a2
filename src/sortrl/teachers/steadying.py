"""A teacher that decides less often by a hair's breadth: searched for by simulation, near the teacher that was given.

How large a share of its decisions a student can have certified is settled by its teacher. A controller that crosses its
switching surface at every step has every state near it; one that swings a little slower, or switches by another sum of the same
inputs, may play as well and be far from the surface most of the time. An ordinary training has no reason to prefer the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.checkpoint import damage_named
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.identity import check_same, fingerprint
from sortrl.core.seeding import one_thread
from sortrl.envs import EnvSlots, Episode, play_episodes
from sortrl.teachers.evolution import STATE, Evolution
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

FORMAT = "sortrl-steadying-1"
FILE_NAME = "steadying.safetensors"
CHECKED = 4  # states of the search that are compared with the teacher on fresh episodes at the end
Progress = Callable[[dict[str, Any]], None]
Array = npt.NDArray[np.float64]


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
    give: float = 0.02
    """Share of the teacher's return that may be given up for free."""
    price: float = 0.2
    """Share of the return beyond that, that is worth as much as all decisions together."""
    last_layer: bool = True
    """Search the weights of the last layer too, not only factors and shifts of inputs and shifts of scores. Where the return
    depends on chance a lot, fewer numbers are found sooner."""
    check_episodes: int = 64
    """Fresh episodes at the end, on which the search must beat the teacher."""
    seed: int = 0
    """Of the search; students with seeds of their own can share one steady teacher."""

    def __post_init__(self) -> None:
        for name, least in (("generations", 1), ("population", 4), ("episodes", 2), ("check_episodes", 2), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise SortRLError(f"SteadyConfig: {name} is {value!r}, expected a whole number, at least {least}.")
        for name in ("eps", "price"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SortRLError(f"SteadyConfig: {name} is {getattr(self, name)}, expected a positive number.")
        for name in ("eps_attack", "give"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SortRLError(f"SteadyConfig: {name} is {getattr(self, name)}, expected a finite number >= 0.")


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

    A point has, per variant: logarithms of factors on the inputs, shifts of the inputs, shifts of the scores and (if it is long
    enough for them) changes of the last layer, each in steps of a size that makes some difference.
    """

    def __init__(self, teacher: Teacher, points: Array) -> None:
        self.trunk, self.head = _mlp(teacher)
        n_actions, width = self.head.weight.shape
        size = teacher.obs_shape[0]
        few = 2 * size + n_actions
        every = np.zeros((len(points), few + n_actions * width))
        every[:, : points.shape[1]] = points
        parts = torch.split(torch.from_numpy(every).float(), [size, size, n_actions, n_actions * width], 1)
        self.factors, self.shifts, self.biases = (0.3 * parts[0]).exp(), 0.2 * parts[1], 0.5 * parts[2]
        self.changes = (0.3 * self.head.weight.std() * parts[3]).view(-1, n_actions, width)

    @staticmethod
    def size(teacher: Teacher, last_layer: bool) -> int:
        """How many numbers a point has."""
        head = _mlp(teacher)[1]
        return 2 * teacher.obs_shape[0] + head.weight.shape[0] + (head.weight.numel() if last_layer else 0)

    def scores(self, unit: Tensor, which: Tensor) -> Tensor:
        """Scores (batch, n_actions) of unit-space observations, each by the variant with the number ``which`` (batch,)."""
        hidden = self.trunk(unit * self.factors[which] + self.shifts[which])
        own = torch.einsum("bh,bah->ba", hidden, self.changes[which])
        scores: Tensor = self.head(hidden) + own + self.biases[which]
        return scores

    def decide(self, unit: Tensor, which: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, and what a step of size eps (batch,) against the lead of each makes of it."""
        unit = unit.requires_grad_(True)
        scores = self.scores(unit, which)
        two = scores.topk(2, 1)
        gradient = torch.autograd.grad((two.values[:, 0] - two.values[:, 1]).sum(), unit)[0]
        with torch.no_grad():
            pushed = self.scores(unit.detach() - eps[:, None] * gradient.sign(), which)
        return two.indices[:, 0], pushed.argmax(1)

    def teacher(self, number: int, like: Teacher) -> Teacher:
        """One variant as a teacher of its own, with the network of the one it came from."""
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
        held[playing] += (actions == pushed).numpy()
        chosen: Array = np.where(attacked[playing], pushed.numpy(), actions.numpy())
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
    lost = np.maximum(0.0, own - played.clean - config.give * size)
    if config.eps_attack > 0:
        lost = lost + np.maximum(0.0, own - played.attacked - config.give * size)
    result: Array = played.steady - lost / (config.price * size)
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
    search = Evolution(Variants.size(teacher, config.last_layer), config.population, config.seed)
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
    found = Variants(teacher, points).teacher(chosen, teacher)
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

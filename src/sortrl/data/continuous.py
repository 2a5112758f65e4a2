"""States to learn continuous actions from, each with the teacher's answer to it undisturbed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.progress import Progress
from sortrl.envs import EnvSlots, Episode, Predicts, play_episodes
from sortrl.teachers.continuous import ContinuousTeacher

FORMAT = "sortrl-continuous-data-1"


@dataclass(frozen=True)
class Answers:
    """Raw observations ``obs`` (n, *obs_shape), and the teacher's actions (n, numbers) there; ``episodes`` (n,) says which of them
    were met in the same one."""

    env_id: str
    obs: npt.NDArray[np.floating[Any]]
    actions: npt.NDArray[np.floating[Any]]
    episodes: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        shapes = self.obs.shape, self.actions.shape, self.episodes.shape
        if list(map(len, shapes)) != [2, 2, 1] or len({shape[0] for shape in shapes}) > 1 or not len(self.obs):
            raise SortRLError(
                f"Answers: obs {self.obs.shape}, actions {self.actions.shape} and episodes {self.episodes.shape}; expected (n, "
                "sensors), (n, numbers) and (n,) with n > 0."
            )
        if not (np.isfinite(self.obs).all() and np.isfinite(self.actions).all()):
            raise SortRLError("Answers: observations or actions contain NaN or infinity.")

    def __len__(self) -> int:
        return len(self.obs)

    @property
    def spread(self) -> npt.NDArray[np.float64]:
        """Standard deviation of each number of the actions; 1 where it never changes."""
        spread = self.actions.astype(np.float64).std(0)
        found: npt.NDArray[np.float64] = np.where(spread > 1e-6, spread, 1.0)
        return found

    def joined(self, other: Answers) -> Answers:
        """All the states in one."""
        numbers = other.episodes + int(self.episodes.max()) + 1
        parts = ((self.obs, other.obs), (self.actions, other.actions), (self.episodes, numbers))
        return Answers(self.env_id, *(np.concatenate(pair) for pair in parts))

    def split(self, share: float, seed: int) -> tuple[Answers, Answers]:
        """(training, held out): whole episodes are held out, at least one."""
        names = np.unique(self.episodes)
        if len(names) < 2:
            raise SortRLError("There is only one episode, so none can be held out. Collect more states.")
        held = np.random.default_rng(seed).permutation(names)[: max(1, round(share * len(names)))]
        mask = np.isin(self.episodes, held)
        return self._where(~mask), self._where(mask)

    def _where(self, mask: npt.NDArray[np.bool_]) -> Answers:
        return Answers(self.env_id, self.obs[mask], self.actions[mask], self.episodes[mask])

    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        columns = {"obs": self.obs, "actions": self.actions, "episodes": self.episodes}
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
        write_tensors(path, tensors, {"format": FORMAT, "env_id": self.env_id})

    @classmethod
    def load(cls, path: str | Path) -> Answers:
        """Read what :meth:`save` wrote."""
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT or {*tensors} != {"obs", "actions", "episodes"}:
            raise SortRLError(f"{path} holds no states with continuous actions (format {metadata.get('format')!r}).")
        for name, kind in (("obs", torch.float32), ("actions", torch.float32), ("episodes", torch.int64)):
            if tensors[name].dtype != kind:
                raise SortRLError(f"{path}: {name} is {tensors[name].dtype}, expected {kind}.")
        return cls(str(metadata.get("env_id")), *(tensors[name].numpy() for name in ("obs", "actions", "episodes")))


@dataclass(frozen=True)
class Visit:
    """Which states to visit."""

    states: int = 20_000
    exploration: float = 0.5
    """Share of the episodes in which noise is added to what is played."""
    action_noise: float = 0.3
    """Its standard deviation at most, in half ranges of the action; each exploring episode draws its own."""
    eps_unit: float = 0.0
    """Act on observations with uniform noise, in the teacher's input units; each episode draws its own size between 0 and this."""
    slots: int = 16
    """Episodes side by side."""

    def __post_init__(self) -> None:
        if self.states < 1 or self.slots < 1 or not 0 <= self.exploration <= 1:
            raise SortRLError(f"Visit: expected at least one state and slot and a share of exploration, got {self}.")


class _Recorded(Episode):
    """An episode with the noise that it drew."""

    action_noise = 0.0
    obs_noise = 0.0


def collect_answers(
    teacher: ContinuousTeacher,
    env_id: str,
    visit: Visit | None = None,
    seed: int = 0,
    actor: Predicts | None = None,
    progress: Progress | None = None,
) -> Answers:
    """Play episodes, the teacher's own or those of ``actor`` (DAgger), and record the teacher's answer to every state met.

    Actions are played with noise in exploring episodes; the answers never have any. The same seed gives the same data.

    >>> from sortrl.teachers import load_continuous
    >>> teacher = load_continuous(lambda obs: -obs[:, 2:], "Pendulum-v1")
    >>> collect_answers(teacher, "Pendulum-v1", Visit(states=450)).actions.shape
    (450, 1)
    """
    visit = visit or Visit()
    rng = np.random.default_rng([seed, 1])
    scale = teacher.normalizer.scale.numpy()
    columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

    def seeds() -> Any:  # hashed, so that no episode of a collection is also one of an evaluation
        episode = 0
        while True:
            yield int(np.random.SeedSequence([seed, 2, episode]).generate_state(1)[0] >> 1)
            episode += 1

    def begin(number: int, env_seed: int, obs: npt.NDArray[Any]) -> _Recorded:
        episode = _Recorded(number, env_seed, obs)
        draws = rng.random(3)
        episode.action_noise = visit.action_noise * draws[1] if draws[0] < visit.exploration else 0.0
        episode.obs_noise = visit.eps_unit * draws[2]
        return episode

    with EnvSlots(env_id, visit.slots, continuous=True) as slots:
        box = slots.info.action_box
        assert box is not None

        def act(episodes: list[_Recorded]) -> npt.NDArray[Any] | None:
            if len(columns[0]) >= visit.states:
                return None
            obs = np.stack([episode.obs for episode in episodes])
            answers = teacher.predict(obs)[0]
            met: tuple[Any, Any, Any] = (obs, answers, [episode.number for episode in episodes])
            for column, values in zip(columns, met, strict=True):
                column.extend(values)
            if progress is not None:
                progress({"step": min(len(columns[0]), visit.states), "total": visit.states})
            noises = np.array([[episode.obs_noise, episode.action_noise] for episode in episodes])
            seen = obs + noises[:, :1] * scale * rng.uniform(-1.0, 1.0, obs.shape)
            played = (teacher if actor is None else actor).predict(seen.astype(np.float32))[0]
            pushed: npt.NDArray[Any] = played + noises[:, 1:] * 0.5 * box.span * rng.standard_normal(played.shape)
            return pushed

        play_episodes(slots, seeds(), act, begin)
    obs, actions, episodes = (np.array(column[: visit.states]) for column in columns)
    order = np.argsort(episodes, kind="stable")
    return Answers(slots.info.env_id, obs[order], actions[order], episodes[order].astype(np.int64))

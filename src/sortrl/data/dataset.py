"""Demonstrations as data sets: joined, split by episodes, saved, loaded, exported."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.records import Demonstrations, Transitions

FORMAT = "sortrl-demonstrations-1"


class Labels(Protocol):
    """Whoever can answer states: a teacher."""

    def normalize(self, obs: npt.ArrayLike) -> Tensor: ...

    def scores(self, unit: Tensor) -> Tensor: ...


def merge(*demos: Demonstrations) -> Demonstrations:
    """All the states in one; episodes get new numbers where they would clash. Transitions are kept if all have them."""
    if not demos:
        raise SortRLError("merge: nothing to merge; give at least one Demonstrations.")
    kinds = sorted({f"{one.env_id}, observations {one.obs.shape[1:]}, {one.n_actions} actions" for one in demos})
    if len(kinds) > 1:
        raise SortRLError(f"merge: demonstrations of different tasks: {'; '.join(kinds)}.")
    offset, episodes = 0, []
    for one in demos:
        numbers = np.unique(one.episodes, return_inverse=True)[1]
        episodes.append(numbers + offset)
        offset += int(numbers.max()) + 1
    after = [one.transitions for one in demos if one.transitions is not None]
    fields = ("played", "rewards", "terminated", "truncated", "final_obs")
    transitions = None
    if len(after) == len(demos):
        starts = [one.starts if one.starts is not None else np.full(len(one.final_obs), -1) for one in after]
        columns = {name: np.concatenate([getattr(one, name) for one in after]) for name in fields}
        transitions = Transitions(**columns, starts=np.concatenate(starts))
    joined = [np.concatenate([getattr(one, name) for one in demos]) for name in ("obs", "actions", "logits")]
    return Demonstrations(demos[0].env_id, joined[0], joined[1], joined[2], np.concatenate(episodes), transitions)


def check_splits(demos: Demonstrations) -> None:
    """Refuse data of which :func:`split` can hold out nothing."""
    if len(np.unique(demos.episodes)) < 2:
        raise SortRLError("split: there is only one episode, so none can be held out. Collect more states.")


def split(demos: Demonstrations, share: float, seed: int = 0) -> tuple[Demonstrations, Demonstrations]:
    """(train, held_out): whole episodes are held out, at least one, until they hold about ``share`` of the states.

    States of one episode resemble each other, so a split by states would measure memory, not generalisation.
    """
    if not 0 < share < 1:
        raise SortRLError(f"split: share is {share}, expected the held-out part strictly between 0 and 1.")
    check_splits(demos)
    numbers, sizes = np.unique(demos.episodes, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(numbers))
    n_held = 1 + int(np.searchsorted(np.cumsum(sizes[order]), share * len(demos)))
    held = np.isin(demos.episodes, numbers[order[: min(n_held, len(numbers) - 1)]])
    return select(demos, ~held), select(demos, held)


def select(demos: Demonstrations, mask: npt.NDArray[np.bool_]) -> Demonstrations:
    """Some of the states."""
    after = demos.transitions
    if after is not None:
        kept = np.isin(np.unique(demos.episodes), demos.episodes[mask])
        steps = (after.played[mask], after.rewards[mask], after.terminated[mask], after.truncated[mask])
        after = Transitions(*steps, after.final_obs[kept], None if after.starts is None else after.starts[kept])
    return Demonstrations(
        demos.env_id, demos.obs[mask], demos.actions[mask], demos.logits[mask], demos.episodes[mask], after
    )


def save_demonstrations(path: str | Path, demos: Demonstrations) -> None:
    """Write the demonstrations as one safetensors file."""
    arrays = {name: getattr(demos, name) for name in ("obs", "actions", "logits", "episodes")}
    if demos.transitions is not None:
        columns = vars(demos.transitions).items()
        arrays |= {f"transitions.{name}": array for name, array in columns if array is not None}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    write_tensors(path, tensors, {"format": FORMAT, "env_id": demos.env_id})


def load_demonstrations(path: str | Path) -> Demonstrations:
    """Read what :func:`save_demonstrations` wrote, checking kinds and shapes."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT or not isinstance(metadata.get("env_id"), str):
        raise SortRLError(f"{path} holds no demonstrations (format {metadata.get('format')!r}, expected {FORMAT!r}).")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    kinds = {"actions": "i", "logits": "f", "episodes": "i"}
    kinds |= {"transitions.played": "i", "transitions.rewards": "f", "transitions.terminated": "b"}
    kinds |= {"transitions.truncated": "b", "transitions.starts": "i"}
    for name in ("obs", "actions", "logits", "episodes"):
        if name not in arrays:
            raise SortRLError(f"{path} lacks {name}; found {', '.join(arrays) or 'nothing'}.")
    for name, kind in kinds.items():
        if name in arrays and arrays[name].dtype.kind != kind:
            raise SortRLError(f"{path}: {name} has dtype {arrays[name].dtype}, expected kind {kind!r}.")
    if arrays["obs"].dtype.kind == "b":
        raise SortRLError(f"{path}: obs has dtype {arrays['obs'].dtype}, expected numbers.")
    after = {name.removeprefix("transitions."): array for name, array in arrays.items() if "." in name}
    try:
        transitions = Transitions(**after) if after else None
    except TypeError as error:
        raise SortRLError(f"{path}: its transitions are incomplete ({error}).") from error
    columns = (arrays["obs"], arrays["actions"], arrays["logits"], arrays["episodes"])
    return Demonstrations(metadata["env_id"], *columns, transitions)


def import_minari(dataset_id: str, teacher: Labels | None = None) -> Demonstrations:
    """The states of a local Minari dataset (``sortrl[minari]``), to be distilled from; nothing is downloaded.

    The answers to learn are those of ``teacher`` or, without one, the dataset's own: ``infos["teacher_action"]``, as
    :func:`export_minari` writes it, else the actions that were played. The dataset's actions must be discrete, and its observations
    arrays.
    """
    minari = _minari("Reading")
    try:
        dataset = minari.load_dataset(dataset_id, download=False)
    except (FileNotFoundError, ValueError, KeyError, OSError) as error:
        raise SortRLError(
            f"No Minari dataset {dataset_id!r} on this machine ({str(error)[:200]}). Fetch it: minari download {dataset_id}"
        ) from error
    n_actions, start = getattr(dataset.action_space, "n", None), int(getattr(dataset.action_space, "start", 0))
    if n_actions is None or start != 0 or not hasattr(dataset.observation_space, "low"):
        raise SortRLError(
            f"{dataset_id} has observations {dataset.observation_space} and actions {dataset.action_space}; expected a Box and "
            "Discrete(n) counted from 0."
        )
    columns: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in ("obs", "actions", "episodes", "played", "rewards", "terminated", "truncated", "final_obs")
    }
    for number, episode in enumerate(dataset.iterate_episodes()):
        steps = len(episode.actions)
        answers = (episode.infos or {}).get("teacher_action", episode.actions)
        found = (episode.observations[:-1], answers[:steps], np.full(steps, number), episode.actions)
        ends = (episode.rewards, episode.terminations, episode.truncations, episode.observations[-1:])
        for name, values in zip(columns, (*found, *ends), strict=True):
            columns[name].append(np.asarray(values))
    if not columns["obs"]:
        raise SortRLError(f"{dataset_id} has no episodes.")
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    obs = joined["obs"]
    if teacher is None:
        labels = joined["actions"].astype(np.int64)
        logits = np.eye(int(n_actions), dtype=np.float32)[labels]
    else:
        with torch.no_grad():
            parts = [
                teacher.scores(teacher.normalize(obs[i : i + 1024])).float().cpu() for i in range(0, len(obs), 1024)
            ]
        logits = torch.cat(parts).numpy()
        labels = logits.argmax(1).astype(np.int64)
    transitions = Transitions(
        joined["played"].astype(np.int64),
        joined["rewards"].astype(np.float32),
        joined["terminated"].astype(bool),
        joined["truncated"].astype(bool),
        joined["final_obs"],
    )
    env_id = dataset.env_spec.id if dataset.env_spec is not None else dataset_id
    return Demonstrations(env_id, obs, labels, logits, joined["episodes"].astype(np.int64), transitions)


def _minari(doing: str) -> Any:
    try:
        # Minari asks for its storage only after making the dataset's folder, so ask before it.
        importlib.import_module("h5py")
        return importlib.import_module("minari")
    except ImportError as error:
        raise MissingDependency(f"{doing} Minari datasets needs a package: pip install 'sortrl[minari]'") from error


def export_minari(demos: Demonstrations, dataset_id: str) -> Any:
    """Write the episodes as a local Minari dataset (``sortrl[minari]``) for offline reinforcement learning; return it.

    Its actions are those that were played; the teacher's answers are in ``infos["teacher_action"]``.
    """
    minari = _minari("Writing")
    from minari.data_collector import EpisodeBuffer

    after = demos.transitions
    if after is None:
        raise SortRLError(
            "export_minari: these demonstrations lack transitions (rewards and ends). Collect them again."
        )
    buffers = []
    for number, episode in enumerate(np.unique(demos.episodes)):
        rows = np.flatnonzero(demos.episodes == episode)
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.concatenate([demos.obs[rows], after.final_obs[number][None]]),
                actions=after.played[rows],
                rewards=after.rewards[rows].tolist(),
                terminations=after.terminated[rows].tolist(),
                truncations=after.truncated[rows].tolist(),
                infos={"teacher_action": np.append(demos.actions[rows], 0)},
            )
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # advice on authors and links of published datasets
            return minari.create_dataset_from_buffers(
                dataset_id,
                buffers,
                env=demos.env_id,
                algorithm_name="sortrl teacher",
                description=export_minari.__doc__,
            )
    except (ValueError, FileExistsError) as error:
        raise SortRLError(f"Minari refused dataset {dataset_id!r}: {error}") from error

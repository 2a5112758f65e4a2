"""The agent to be made robust, frozen: scores of actions, with its observation normalisation inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer, as_array, stored_normalizer
from sortrl.nets.architecture import Architecture

FILE_NAME = "teacher.safetensors"
FORMAT = "sortrl-teacher-1"
Q_ALGORITHMS = ("dqn", "qrdqn", "pqn")
ACTOR_CRITICS = ("ppo", "a2c", "trpo", "actor-critic")


class Teacher(nn.Module):
    """A frozen agent with discrete actions. It satisfies :class:`sortrl.core.records.Policy`.

    ``body`` maps unit-space observations to scores: logits of an actor-critic, action values of a Q-learner. The
    teacher takes it over: it is put in evaluation mode for good and its parameters get no gradients (its inputs do).
    ``architecture`` is what makes the teacher savable; None for a network of unknown design.

    >>> architecture = Architecture(obs_shape=(4,), n_actions=2, hidden=(8,), activation="Tanh")
    >>> teacher = Teacher(architecture.build(), Normalizer.identity((4,)), 2, architecture=architecture)
    >>> action, _ = teacher.predict(np.zeros(4))
    >>> action.shape, teacher.scores(teacher.normalize(np.zeros((3, 4)))).shape
    ((), torch.Size([3, 2]))
    """

    def __init__(
        self,
        body: nn.Module,
        normalizer: Normalizer,
        n_actions: int,
        name: str = "teacher",
        algorithm: str = "module",
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.normalizer = normalizer
        self.n_actions = int(n_actions)
        self.obs_shape = normalizer.obs_shape
        self.name = name
        self.algorithm = algorithm
        self.architecture = architecture
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """A teacher never leaves evaluation mode: dropout or batch statistics would change its answers."""
        super().train(False)
        return self

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, float32."""
        unit: Tensor = self.normalizer(obs)
        return unit

    def scores(self, unit: Tensor) -> Tensor:
        """Scores (batch, n_actions) of unit-space observations, differentiable with respect to them."""
        scores: Tensor = self.body(unit)
        return scores

    def forward(self, unit: Tensor) -> Tensor:
        return self.scores(unit)

    def values(self, unit: Tensor) -> Tensor | None:
        """Action values (batch, n_actions) if the teacher estimates them (DQN, QR-DQN, PQN), else None."""
        return self.scores(unit) if self.algorithm in Q_ALGORITHMS else None

    @property
    def is_stochastic(self) -> bool:
        """Whether the scores are logits of a policy one may sample from, as an actor-critic's are."""
        return self.algorithm in ACTOR_CRITICS

    def predict(
        self,
        obs: npt.ArrayLike | Tensor,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.int64], Any]:
        """Actions for raw observations, by the contract of Stable-Baselines3.

        One observation of shape ``obs_shape`` gives one action (a 0-d array), a batch gives one action each.
        ``state`` is handed back and ``episode_start`` ignored: teachers have no memory. ``deterministic=False``
        samples the softmax of an actor-critic; other teachers stay greedy.
        """
        observations = obs if isinstance(obs, Tensor) else torch.as_tensor(as_array(obs, self.obs_shape))
        single = tuple(observations.shape) == self.obs_shape
        with torch.no_grad():
            scores = self.scores(self.normalize(observations[None] if single else observations))
            if deterministic or not self.is_stochastic:
                actions = scores.argmax(dim=1)
            else:
                actions = torch.multinomial(scores.softmax(dim=1), 1).squeeze(1)
        result = actions.cpu().numpy()
        return (result[0:1].reshape(()) if single else result), state

    def save(self, directory: str | Path) -> None:
        """Write ``teacher.safetensors`` into ``directory``: tensors and a JSON description, no pickle."""
        if self.architecture is None:
            raise SortRLError(
                f"{self.name} ({self.algorithm}) cannot be saved: its network was not built by sortrl, so its code "
                "would be missing. Keep your own file, and pass the object to load_teacher again."
            )
        clip = self.normalizer.clip
        metadata = {
            "format": FORMAT,
            "name": self.name,
            "algorithm": self.algorithm,
            "architecture": self.architecture.to_json(),
            "clip": clip if np.isfinite(clip) else None,  # JSON has no infinity
        }
        write_tensors(Path(directory) / FILE_NAME, self.state_dict(), metadata)

    @classmethod
    def load(cls, directory: str | Path) -> Teacher:
        """Read what :meth:`save` wrote, from the directory or the file itself."""
        path = Path(directory)
        path = path / FILE_NAME if path.is_dir() else path
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            found = metadata.get("format")
            raise SortRLError(f"{path} is not a saved teacher (format {found!r}, expected {FORMAT!r}).")
        architecture = Architecture.from_json(metadata.get("architecture"))
        body = {n.removeprefix("body."): tensor for n, tensor in tensors.items() if not n.startswith("normalizer.")}
        normalizer = stored_normalizer(tensors, metadata, "normalizer.", path)
        if normalizer.obs_shape != architecture.obs_shape:
            raise SortRLError(
                f"{path}: normalisation {normalizer.obs_shape} and network {architecture.obs_shape} differ."
            )
        return cls(
            architecture.build_with(body, str(path)),
            normalizer,
            architecture.n_actions,
            str(metadata.get("name")),
            str(metadata.get("algorithm")),
            architecture,
        )


class CallableBody(nn.Module):
    """A black box as a network: numpy batch of raw observations (float32) -> actions (batch,) or scores (batch, n)."""

    def __init__(self, function: Any, normalizer: Normalizer, n_actions: int) -> None:
        super().__init__()
        self.function = function
        self.n_actions = n_actions
        # In a list, so that it is not a submodule: its buffers are the teacher's, and must not be counted twice.
        self._normalizer = [normalizer]

    def forward(self, unit: Tensor) -> Tensor:
        if unit.requires_grad and torch.is_grad_enabled():
            raise SortRLError(
                "This teacher is a plain callable, so it has no gradient. Use a gradient-free attack, "
                "or give the agent as a torch module or a Stable-Baselines3 zip."
            )
        raw = self._normalizer[0].to_raw(unit).float().cpu().numpy()
        answer = self.function(raw)
        # Stable-Baselines3's own predict returns (actions, state).
        result = np.asarray(answer[0] if isinstance(answer, tuple) else answer)
        if result.shape == (len(raw),) and np.issubdtype(result.dtype, np.integer):
            if result.min() < 0 or result.max() >= self.n_actions:
                raise SortRLError(
                    f"The callable played actions {result.min()}..{result.max()}, expected 0..{self.n_actions - 1}."
                )
            return nn.functional.one_hot(torch.from_numpy(result.astype(np.int64)), self.n_actions).float()
        if result.shape == (len(raw), self.n_actions) and np.issubdtype(result.dtype, np.number):
            return torch.from_numpy(result.astype(np.float32))
        raise SortRLError(
            f"The callable returned {result.dtype} of shape {result.shape} for {len(raw)} observations; expected "
            f"integer actions ({len(raw)},) or scores ({len(raw)}, {self.n_actions})."
        )

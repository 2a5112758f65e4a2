"""Training checkpoints: weights, optimiser and generator in one safetensors file, written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.identity import check_same, plain

FILE_NAME = "checkpoint.safetensors"
FORMAT = "sortrl-checkpoint-1"


class Checkpoint:
    """The checkpoint of one training run in a directory (or nowhere, for ``None``).

    ``identity`` is what must match for a resume to make sense: configuration, seed, data. ``extra`` are tensors of the
    training's own: after :meth:`restore`, those that were saved last.
    """

    def __init__(self, directory: str | Path | None, identity: dict[str, Any]) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME
        self.identity = plain(identity)
        self.extra: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: one alone writes the file."""
        return {**self.__dict__, "path": None}

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        step: int,
        history: list[dict[str, Any]],
        extra: Mapping[str, Tensor] | None = None,
    ) -> None:
        if self.path is None:
            return
        tensors = prefixed("model", model.state_dict()) | prefixed("optimizer", optimizer_tensors(optimizer))
        tensors |= prefixed("extra", extra or {})
        tensors["generator"] = generator.get_state()
        metadata = {"format": FORMAT, "identity": self.identity, "step": step, "history": history}
        write_tensors(self.path, tensors, metadata)

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> tuple[int, list[dict[str, Any]]]:
        """Load the checkpoint if there is one; return the next step and the history so far."""
        if self.path is None or not os.path.lexists(self.path):
            return 0, []
        tensors, metadata = read_tensors(self.path)
        advice = "Use another output directory, or delete this one to start over."
        if metadata.get("format") != FORMAT:
            raise SortRLError(f"{self.path} has format {metadata.get('format')!r}, expected {FORMAT!r}. {advice}")
        check_same(
            metadata.get("identity"),
            self.identity,
            f"{self.path} belongs to a run with other settings, seed or data",
            advice,
        )
        with damage_named(self.path):
            model.load_state_dict(part(tensors, "model"))
            restore_optimizer(optimizer, part(tensors, "optimizer"))
            generator.set_state(tensors["generator"])
            self.extra = part(tensors, "extra")
            step, history = metadata["step"], metadata["history"]
            if type(step) is not int or step < 0 or not all(isinstance(row, dict) for row in history):
                raise ValueError(f"step {step!r} and a history of {type(history).__name__}")
        return step, list(history)


@contextmanager
def damage_named(path: Path, advice: str = "Delete it to start this training over.") -> Iterator[None]:
    """A file that cannot be used as what it says it is is damaged, whichever part of its user notices first."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise SortRLError(f"{path} is damaged ({reason}). {advice}") from error


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The inverse of :func:`prefixed`."""
    return {n.removeprefix(f"{prefix}."): tensor for n, tensor in tensors.items() if n.startswith(f"{prefix}.")}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimiser remembers of each parameter, named ``<number of the parameter>.<name>``."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": torch.as_tensor(value) for i, known in state.items() for name, value in known.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`optimizer_tensors`; settings such as the learning rate stay those of ``optimizer``."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = tensor
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    for index, known in state.items():
        for key, tensor in known.items():
            # torch would take any shape over and fail, or worse broadcast, at the next step.
            if tensor.ndim and tuple(tensor.shape) != shapes[index]:
                raise SortRLError(
                    f"{key} of parameter {index} has shape {tuple(tensor.shape)}, expected {shapes[index]}"
                )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

"""Training checkpoints: weights, optimiser and generator in one safetensors file, written atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sortrl.errors import SortRLError
from sortrl.files import read_tensors, write_tensors

FILE_NAME = "checkpoint.safetensors"


class Checkpoint:
    """The checkpoint of one training run in a directory (or nowhere, for ``None``).

    ``identity`` is what must match for a resume to make sense: configuration, seed, data. ``extra`` are tensors of the
    training's own: after :meth:`restore`, those that were saved last.
    """

    def __init__(self, directory: str | Path | None, identity: dict[str, Any]) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME
        self.identity = json.loads(json.dumps(identity))  # as it will be read back: tuples become lists
        self.extra: dict[str, Tensor] = {}

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
        tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors |= {f"extra.{name}": tensor for name, tensor in (extra or {}).items()}
        tensors["generator"] = generator.get_state()
        write_tensors(self.path, tensors, {"identity": self.identity, "step": step, "history": history})

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> tuple[int, list[dict[str, Any]]]:
        """Load the checkpoint if there is one; return the next step and the history so far."""
        if self.path is None or not self.path.exists():
            return 0, []
        tensors, metadata = read_tensors(self.path)
        if metadata.get("identity") != self.identity:
            raise SortRLError(
                f"{self.path} belongs to a run with other settings, seed or data. "
                "Use another output directory, or delete this one to start over."
            )
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                index, _, key = rest.partition(".")
                state.setdefault(int(index), {})[key] = tensor
        model.load_state_dict({name[6:]: tensor for name, tensor in tensors.items() if name.startswith("model.")})
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        generator.set_state(tensors["generator"])
        self.extra = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("extra.")}
        return int(metadata["step"]), list(metadata["history"])

"""The agents published for ProcGen: residual CNNs of IMPALA (Espeholt et al., 2018), read from their tensors alone.

The file is the state dict of one sequence of layers, ``model.0`` to ``model.16``; the last has an output for each action
and one more, the value of the state. ``logits_fc`` is a second name of that layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.files import regular_file
from sortrl.nets.architecture import Architecture
from sortrl.teachers.load import archives, sb3
from sortrl.teachers.load.archives import listed, read_state


def read_checkpoint(path: Path) -> sb3.Agent:
    """Read a published checkpoint (``.pt``) without unpickling anything but tensors."""
    state = read_state(regular_file(path, archives.MOST_BYTES).read_bytes(), path, "the file")
    tensors = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    architecture = _architecture(tensors, state, path)
    head = len(architecture.build()) - 1
    for part in ("weight", "bias"):
        tensors[f"{head}.{part}"] = tensors[f"{head}.{part}"][:-1]  # without the value, which chooses no action
    # On the meta device: compare shapes before any memory is spent on what the file claims.
    with torch.device("meta"):
        expected = {name: tuple(parameter.shape) for name, parameter in architecture.build().named_parameters()}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != expected:
        raise _unknown_layout(state, path)
    parameters = tuple(tensors[name].float() for name in expected)
    return sb3.Agent("ppo", architecture, parameters, sb3.AgentFacts(pixels=True))


def _architecture(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], path: Path) -> Architecture:
    """The sizes, from the shapes of the weights."""
    try:
        first, second, third = (tensors[f"{layer}.weight"] for layer in (0, 4, 8))
        features, inputs = tensors["14.weight"].shape
        side = 8 * math.isqrt(inputs // len(third))  # three poolings halve the image
        return Architecture(
            obs_shape=(first.shape[1], side, side),
            n_actions=len(tensors["16.weight"]) - 1,
            hidden=(),
            activation="ReLU",
            trunk="impala",
            cnn_features=features,
            channels=(len(first), len(second), len(third)),
        )
    except (KeyError, IndexError, ValueError) as error:
        raise _unknown_layout(state, path) from error


def _unknown_layout(state: Mapping[str, Tensor], path: Path) -> SortRLError:
    found = listed(state, 6)
    return SortRLError(
        f"{path}: not an IMPALA network as published for ProcGen; found {found or 'no tensors'}. Load the agent "
        "yourself and pass a torch module (observations -> scores)."
    )

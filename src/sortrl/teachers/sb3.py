"""Stable-Baselines3 agents, read from their tensors alone.

A saved agent is a zip whose ``data`` member holds base64 pickles and whose ``policy.pth`` holds tensors. Only the
tensors are loaded (``weights_only=True``), and the readable text beside the pickles tells the activation and shapes:
nothing is unpickled, so old agents open without the packages they were trained with, and hostile ones do nothing.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sortrl.errors import SortRLError
from sortrl.files import regular_file
from sortrl.teachers.architecture import Architecture
from sortrl.teachers.pickles import scan

# A 1 GiB network is far beyond any Stable-Baselines3 agent: a larger declared size is a damaged file or a zip bomb.
MAX_BYTES = 2**30
_MAX_TEXT_BYTES = 64 * 2**20

# What torch.save writes for a dictionary of tensors, and all that may occur in one: its own loader also knows functions
# that allocate whatever they are told.
_STORAGES = ("Float", "Double", "Half", "Long", "Int", "Short", "Char", "Byte", "Bool")
_NAMES = frozenset(
    (
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {kind}Storage" for kind in _STORAGES),
    )
)

# Parts of an agent that do not choose its actions, or are second names of parts that do (pi_features_extractor).
_UNUSED = (
    "value_net.",
    "mlp_extractor.value_net.",
    "vf_features_extractor.",
    "pi_features_extractor.",
    "q_net_target.",
    "quantile_net_target.",
)


@dataclass(frozen=True)
class AgentFacts:
    """What is known of an agent beside its tensors; None where it is not known."""

    algorithm: str | None = None
    activation: str | None = None
    obs_shape: tuple[int, ...] | None = None
    n_actions: int | None = None
    n_quantiles: int | None = None
    pixels: bool = False
    vecnormalized: bool = False


@dataclass(frozen=True)
class Agent:
    """A converted agent: its network's description and that network's parameters in order."""

    algorithm: str
    architecture: Architecture
    parameters: tuple[Tensor, ...]
    facts: AgentFacts


def read_zip(path: Path) -> Agent:
    """Read an agent saved by ``model.save``, without unpickling anything."""
    try:
        with zipfile.ZipFile(regular_file(path)) as archive:
            if "policy.pth" not in archive.namelist():
                found = ", ".join(archive.namelist()[:8]) or "nothing"
                raise SortRLError(f"{path} is not a Stable-Baselines3 agent: no policy.pth in it, found {found}.")
            state = read_state(_read_member(archive, "policy.pth", MAX_BYTES, path), path)
            facts = _facts_of_data(archive, path) if "data" in archive.namelist() else AgentFacts()
    except SortRLError:
        raise
    # zipfile passes on what its decompressors and decoders raise: zlib.error, LZMAError, UnicodeDecodeError, ...
    except Exception as error:
        raise SortRLError(f"{path} is not a readable zip file ({error}). Save the agent again.") from error
    return convert(state, facts, str(path))


def read_model(model: Any) -> Agent:
    """Convert a live Stable-Baselines3 model; its tensors are copied."""
    policy = model.policy
    space = model.observation_space
    facts = AgentFacts(
        algorithm=type(model).__name__.lower(),
        activation=getattr(getattr(policy, "activation_fn", None), "__name__", None),
        obs_shape=tuple(space.shape) if space.shape else None,
        n_actions=int(getattr(model.action_space, "n", 0)) or None,
        n_quantiles=getattr(model, "n_quantiles", None),
        pixels=_is_pixels(str(space.dtype), space.shape, getattr(policy, "normalize_images", True)),
    )
    state = {name: tensor.detach().cpu().clone() for name, tensor in policy.state_dict().items()}
    return convert(state, facts, type(model).__name__)


def convert(state: Mapping[str, Tensor], facts: AgentFacts, where: str) -> Agent:
    """Find the network that chooses actions among the tensors of an agent."""
    if "log_std" in state or any(name.startswith(("actor.", "critic.")) for name in state):
        raise SortRLError(f"{where} is an agent with continuous actions: not supported yet, only discrete actions are.")
    if "action_net.weight" in state:
        cnn, heads, default = "features_extractor.", ["mlp_extractor.shared_net.", "mlp_extractor.policy_net."], "Tanh"
        algorithm = facts.algorithm or "actor-critic"
    elif any(name.startswith("quantile_net.") for name in state):
        cnn, heads, default = "quantile_net.features_extractor.", ["quantile_net.quantile_net."], "ReLU"
        algorithm = "qrdqn"
    else:
        cnn, heads, default = "q_net.features_extractor.", ["q_net.q_net."], "ReLU"
        algorithm = "dqn"
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(_UNUSED)}
    layers: list[Tensor] = []
    trunk: Literal["mlp", "nature_cnn"] = "mlp"
    if f"{cnn}cnn.0.weight" in tensors:
        trunk = "nature_cnn"
        layers += _take(tensors, f"{cnn}cnn.", 4, where) + _take(tensors, f"{cnn}linear.", 2, where)
    n_trunk = len(layers)
    for head in heads:
        layers += _take(tensors, head, 2, where)
    if "action_net.weight" in tensors and "action_net.bias" in tensors:
        layers += [tensors.pop("action_net.weight"), tensors.pop("action_net.bias")]
    if tensors or len(layers) == n_trunk:
        raise _unknown_layout(state, where)
    architecture = _architecture(layers, n_trunk, trunk, facts, algorithm, default, where)
    return Agent(algorithm, architecture, tuple(layer.float() for layer in layers), facts)


def _architecture(
    layers: list[Tensor],
    n_trunk: int,
    trunk: Literal["mlp", "nature_cnn"],
    facts: AgentFacts,
    algorithm: str,
    default_activation: str,
    where: str,
) -> Architecture:
    weights = layers[n_trunk::2]
    outputs = len(weights[-1])
    n_quantiles = 0
    if algorithm == "qrdqn":
        n_quantiles = facts.n_quantiles or outputs // (facts.n_actions or outputs)
        if outputs % max(1, n_quantiles) or (facts.n_actions and n_quantiles * facts.n_actions != outputs):
            raise SortRLError(
                f"{where}: {outputs} outputs cannot be {n_quantiles} quantiles of {facts.n_actions} actions."
            )
        if facts.n_quantiles is None and facts.n_actions is None:
            raise SortRLError(f"{where}: a QR-DQN without its data member; the number of quantiles is unknown.")
    obs_shape = facts.obs_shape or ((weights[0].shape[1],) if trunk == "mlp" else None)
    if obs_shape is None:
        raise SortRLError(f"{where}: an image agent without its data member; the image size is unknown.")
    if trunk == "mlp" and math.prod(obs_shape) != weights[0].shape[1]:
        raise SortRLError(
            f"{where}: observations {obs_shape} do not fit a first layer with {weights[0].shape[1]} inputs."
        )
    architecture = Architecture(
        obs_shape=obs_shape,
        n_actions=outputs // max(1, n_quantiles),
        hidden=tuple(len(weight) for weight in weights[:-1]),
        activation=facts.activation or default_activation,
        trunk=trunk,
        cnn_features=int(weights[0].shape[1]) if trunk == "nature_cnn" else 512,
        n_quantiles=n_quantiles,
        channels=_channels(layers[0:n_trunk:2]),
    )
    # On the meta device: compare shapes before any memory is spent on what the file claims.
    with torch.device("meta"):
        expected = [tuple(parameter.shape) for parameter in architecture.build().parameters()]
    found = [tuple(layer.shape) for layer in layers]
    if found != expected:
        raise SortRLError(f"{where}: layers have shapes {found}, expected {expected} for {architecture}.")
    return architecture


def _channels(weights: list[Tensor]) -> tuple[int, ...]:
    """Of the convolutions of a NatureCNN, where they are not its usual ones; the caller compares all the shapes."""
    found = tuple(len(weight) for weight in weights if weight.ndim == 4)
    return found if len(found) == 3 and found != (32, 64, 64) else ()


def _take(tensors: dict[str, Tensor], prefix: str, ndim: int, where: str) -> list[Tensor]:
    """Remove and return weight, bias, weight, ... of the layers ``prefix0, prefix2, ...`` (activations in between)."""
    layers: list[Tensor] = []
    while f"{prefix}{len(layers)}.weight" in tensors and f"{prefix}{len(layers)}.bias" in tensors:
        name = f"{prefix}{len(layers)}"
        weight, bias = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias")
        if weight.ndim != ndim or bias.shape != weight.shape[:1]:
            raise SortRLError(
                f"{where}: {name} has weight {tuple(weight.shape)}, bias {tuple(bias.shape)}: unknown layer."
            )
        layers += [weight, bias]
    return layers


def _unknown_layout(state: Mapping[str, Tensor], where: str) -> SortRLError:
    found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in list(state.items())[:12])
    more = f" and {len(state) - 12} more" if len(state) > 12 else ""
    return SortRLError(
        f"{where}: unknown network layout. Known are PPO, A2C, DQN and QR-DQN with MlpPolicy or CnnPolicy; found "
        f"{found or 'no tensors'}{more}. Load the agent yourself and pass a torch module (observations -> scores)."
    )


def _read_member(archive: zipfile.ZipFile, name: str, cap: int, path: Path) -> bytes:
    size = archive.getinfo(name).file_size  # zipfile never yields more than the declared size
    if size > cap:
        raise SortRLError(f"{path}: {name} declares {size} bytes, more than the {cap} any agent needs. Not opened.")
    return archive.read(name)


def read_state(content: bytes, path: Path, what: str = "policy.pth") -> dict[str, Tensor]:
    """The tensors that ``torch.save`` wrote, and nothing else; ``what`` names them in errors."""
    try:
        _check_pickles(content, f"{path}: {what}")
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except SortRLError:
        raise
    # zipfile and torch raise BadZipFile, UnpicklingError, RuntimeError, KeyError, ... according to where the damage is.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SortRLError(f"{path}: {what} holds something else than tensors, or is damaged ({reason}).") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SortRLError(f"{path}: {what} is not a dictionary of tensors. Save the agent with model.save().")
    if sum(tensor.numel() for tensor in state.values()) * 4 > MAX_BYTES:
        raise SortRLError(f"{path}: {what} claims tensors of more than {MAX_BYTES} bytes. Not loaded.")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
        raise SortRLError(f"{path}: its weights contain NaN or infinity; the training diverged.")
    return {str(name): tensor for name, tensor in state.items()}


def _check_pickles(content: bytes, where: str) -> None:
    """Refuse what is not a dictionary of tensors before torch opens it: weights_only bounds neither memory nor time."""
    if zipfile.is_zipfile(io.BytesIO(content)):  # since torch 1.6 the file is itself a zip, whose members may be packed
        with zipfile.ZipFile(io.BytesIO(content)) as inner:
            if sum(member.file_size for member in inner.infolist()) > MAX_BYTES:
                raise SortRLError(f"{where} unpacks to more than {MAX_BYTES} bytes. Not opened.")
            for member in inner.namelist():
                if member.endswith(".pkl"):
                    scan(io.BytesIO(inner.read(member)), where, _NAMES)
        return
    stream = io.BytesIO(content)
    for _ in range(5):  # before torch 1.6: magic number, protocol, system, state, names of the storages
        scan(stream, where, _NAMES)


def _facts_of_data(archive: zipfile.ZipFile, path: Path) -> AgentFacts:
    """Read the text of the ``data`` member; its base64 pickles are passed over."""
    try:
        data = json.loads(_read_member(archive, "data", _MAX_TEXT_BYTES, path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, SortRLError):
            raise
        raise SortRLError(f"{path}: its data member is not JSON ({error}). Save the agent again.") from error
    data = _object(data)
    kwargs, space = _object(data.get("policy_kwargs")), _object(data.get("observation_space"))
    activation = re.search(r"(\w+)'>$", str(kwargs.get("activation_fn", "")))
    shape = _shape(space.get("_shape", space.get("shape")))
    return AgentFacts(
        algorithm="ppo" if "clip_range" in data else "trpo" if "cg_max_steps" in data else "a2c",
        activation=activation.group(1) if activation else None,
        obs_shape=shape,
        n_actions=_integer(_object(data.get("action_space")).get("n")),
        n_quantiles=_integer(data.get("n_quantiles")) or _integer(kwargs.get("n_quantiles")),
        pixels=_is_pixels(str(space.get("dtype")), shape, kwargs.get("normalize_images", True) is not False),
        # Set only by an agent trained behind VecNormalize.
        vecnormalized=data.get("_last_original_obs") is not None,
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shape(value: Any) -> tuple[int, ...] | None:
    known = isinstance(value, list) and bool(value) and all(isinstance(size, int) and size > 0 for size in value)
    return tuple(value) if known else None


def _integer(value: Any) -> int | None:
    """An integer written as a number or, by older versions, as text."""
    match = re.fullmatch(r"\d{1,9}", str(value))
    return int(match.group()) if match and int(match.group()) > 0 else None


def _is_pixels(dtype: str, shape: Any, scaled: bool) -> bool:
    """Whether Stable-Baselines3 divides the observations by 255 before the network sees them."""
    return dtype.endswith("uint8") and shape is not None and len(shape) == 3 and scaled

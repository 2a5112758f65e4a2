"""Stable-Baselines3 agents, read from their tensors alone.

A saved agent is a zip whose ``data`` member holds base64 pickles and whose ``policy.pth`` holds tensors. Only the
tensors are loaded (:mod:`sortrl.teachers.load.archives`), and the readable text beside the pickles tells the activation and shapes:
nothing else is opened, so old agents load without the packages they were trained with, and hostile ones do nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.files import LARGEST_JSON, parse_json, regular_file
from sortrl.envs.shapes import MOST_JOINT_ACTIONS
from sortrl.nets.architecture import Architecture
from sortrl.teachers.load import archives
from sortrl.teachers.load.archives import Archive, listed, read_state

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
    action_parts: tuple[int, ...] = ()
    """Of MultiDiscrete actions: how many there are of each part."""
    n_quantiles: int | None = None
    pixels: bool = False
    vecnormalized: bool = False
    squashed: bool = False
    """Of an actor-critic with continuous actions: whether they go through tanh."""


@dataclass(frozen=True)
class Agent:
    """A converted agent: its network's description and that network's parameters in order."""

    algorithm: str
    architecture: Architecture
    parameters: tuple[Tensor, ...]
    facts: AgentFacts


def read_zip(path: Path) -> Agent:
    """Read an agent saved by ``model.save``, without unpickling anything."""
    return convert(*read_parts(path), str(path))


def read_parts(path: Path) -> tuple[dict[str, Tensor], AgentFacts]:
    """The tensors of a saved agent, and what is known of it beside them."""
    try:
        with regular_file(path).open("rb", buffering=0) as stream:
            archive = Archive(stream, str(path))
            if "policy.pth" not in archive.names:
                found = ", ".join(name[:100] for name in archive.names[:8]) or "nothing"
                raise SortRLError(f"{path} is not a Stable-Baselines3 agent: no policy.pth in it, found {found}.")
            state = read_state(archive.read("policy.pth", archives.MOST_BYTES), path)
            return state, _facts_of_data(archive, path) if "data" in archive.names else AgentFacts()
    except SortRLError:
        raise
    # zipfile passes on what its decompressors and decoders raise: zlib.error, LZMAError, UnicodeDecodeError, ...
    except Exception as error:
        raise SortRLError(f"{path} is not a readable zip file ({error}). Save the agent again.") from error


def read_model(model: Any) -> Agent:
    """Convert a live Stable-Baselines3 model; its tensors are copied."""
    return convert(*model_parts(model), type(model).__name__)


def model_parts(model: Any) -> tuple[dict[str, Tensor], AgentFacts]:
    """Of a live model what :func:`read_parts` reads of a saved one."""
    policy = model.policy
    space = model.observation_space
    facts = AgentFacts(
        algorithm=type(model).__name__.lower(),
        activation=getattr(getattr(policy, "activation_fn", None), "__name__", None),
        obs_shape=tuple(space.shape) if space.shape else None,
        n_actions=int(getattr(model.action_space, "n", 0)) or None,
        action_parts=tuple(map(int, getattr(model.action_space, "nvec", ()))),
        n_quantiles=getattr(model, "n_quantiles", None),
        pixels=_is_pixels(str(space.dtype), space.shape, getattr(policy, "normalize_images", True)),
        squashed=bool(getattr(policy, "squash_output", False)),
    )
    return {name: tensor.detach().cpu().clone() for name, tensor in policy.state_dict().items()}, facts


def convert(state: Mapping[str, Tensor], facts: AgentFacts, where: str) -> Agent:
    """Find the network that chooses actions among the tensors of an agent."""
    if "log_std" in state or any(name.startswith(("actor.", "critic.")) for name in state):
        raise SortRLError(
            f"{where} is an agent with continuous actions, and this is for discrete ones. What takes it: sortrl robustify, with the "
            "agent's own task, and sortrl.teachers.load_continuous."
        )
    if "action_net.weight" in state:
        cnn, heads, default = "features_extractor.", ["mlp_extractor.shared_net.", "mlp_extractor.policy_net."], "Tanh"
        algorithm = facts.algorithm or "actor-critic"
    elif "action_net.0.weight" in state:
        cnn, heads, default, algorithm = "features_extractor.", ["action_net."], "ReLU", "ars"
    elif any(name.startswith("quantile_net.") for name in state):
        cnn, heads, default = "quantile_net.features_extractor.", ["quantile_net.quantile_net."], "ReLU"
        algorithm = "qrdqn"
    else:
        cnn, heads, default = "q_net.features_extractor.", ["q_net.q_net."], "ReLU"
        algorithm = "dqn"
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(_UNUSED)}
    if algorithm == "ars":  # its layers may have no bias
        for name in [name for name in tensors if name.endswith(".weight")]:
            tensors.setdefault(name.replace(".weight", ".bias"), torch.zeros(len(tensors[name])))
    layers: list[Tensor] = []
    trunk: Literal["mlp", "nature_cnn"] = "mlp"
    if f"{cnn}cnn.0.weight" in tensors:
        trunk = "nature_cnn"
        layers += take(tensors, f"{cnn}cnn.", 4, where) + take(tensors, f"{cnn}linear.", 2, where)
    n_trunk = len(layers)
    for head in heads:
        layers += take(tensors, head, 2, where)
    if "action_net.weight" in tensors and "action_net.bias" in tensors:
        layers += [tensors.pop("action_net.weight"), tensors.pop("action_net.bias")]
    if tensors or len(layers) == n_trunk:
        raise _unknown_layout(state, where)
    if facts.action_parts:
        layers[-2:] = _joint(layers[-2], layers[-1], facts.action_parts, where)
    architecture = _architecture(layers, n_trunk, trunk, facts, algorithm, default, where)
    return Agent(algorithm, architecture, tuple(layer.float() for layer in layers), facts)


def _joint(weight: Tensor, bias: Tensor, parts: tuple[int, ...], where: str) -> list[Tensor]:
    """The last layer over all combinations of the parts of an action: their logits add up, as their probabilities multiply."""
    if sum(parts) != len(weight) or not 1 < math.prod(parts) <= MOST_JOINT_ACTIONS:
        raise SortRLError(
            f"{where}: {len(weight)} outputs for actions of {parts}; expected {sum(parts)}, and at most {MOST_JOINT_ACTIONS} "
            "combinations."
        )
    firsts = torch.tensor([0, *parts[:-1]]).cumsum(0)
    rows = torch.cartesian_prod(*map(torch.arange, parts)).reshape(-1, len(parts)) + firsts
    return [weight[rows].sum(1), bias[rows].sum(1)]


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


def take(tensors: dict[str, Tensor], prefix: str, ndim: int, where: str) -> list[Tensor]:
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
    found = listed(state, 12)
    more = f" and {len(state) - 12} more" if len(state) > 12 else ""
    return SortRLError(
        f"{where}: unknown network layout. Known are PPO, A2C, TRPO, DQN, QR-DQN and ARS with MlpPolicy, CnnPolicy "
        f"or MultiInputPolicy over vectors; found "
        f"{found or 'no tensors'}{more}. Load the agent yourself and pass a torch module (observations -> scores)."
    )


def _facts_of_data(archive: Archive, path: Path) -> AgentFacts:
    """Read the text of the ``data`` member; its base64 pickles are passed over."""
    data = _object(parse_json(archive.read("data", LARGEST_JSON), f"{path}: its data member"))
    kwargs, space = _object(data.get("policy_kwargs")), _object(data.get("observation_space"))
    activation = re.search(r"(\w+)'>$", _ending(kwargs.get("activation_fn")))
    shape = _shape(space.get("_shape", space.get("shape")))
    return AgentFacts(
        algorithm="ppo" if "clip_range" in data else "trpo" if "cg_max_steps" in data else "a2c",
        activation=activation.group(1) if activation else None,
        obs_shape=shape,
        n_actions=_integer(_object(data.get("action_space")).get("n")),
        action_parts=_parts(_object(data.get("action_space")).get("nvec")),
        n_quantiles=_integer(data.get("n_quantiles")) or _integer(kwargs.get("n_quantiles")),
        pixels=_is_pixels(_ending(space.get("dtype")), shape, kwargs.get("normalize_images", True) is not False),
        # Of an on-policy agent set only by VecNormalize; off-policy ones (with a replay buffer) always have it, and do not say.
        vecnormalized=data.get("_last_original_obs") is not None and "buffer_size" not in data,
        squashed=kwargs.get("squash_output") is True,
    )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ending(value: Any) -> str:
    """Of a text: what is looked for stands there, and a search through megabytes would take hours."""
    return value[-100:] if isinstance(value, str) else ""


def _shape(value: Any) -> tuple[int, ...] | None:
    known = isinstance(value, list) and 0 < len(value) <= 16 and all(type(n) is int and 0 < n < 2**31 for n in value)
    return tuple(value) if known else None


def _parts(value: Any) -> tuple[int, ...]:
    """The text of a MultiDiscrete's sizes, such as ``[2 3]``."""
    match = re.fullmatch(r"\[((?: *\d{1,4}){1,16} *)\]", value[:200]) if isinstance(value, str) else None
    return tuple(map(int, match[1].split())) if match else ()


def _integer(value: Any) -> int | None:
    """An integer written as a number or, by older versions, as text."""
    text = str(value) if type(value) is int and 0 < value < 10**9 else value
    match = re.fullmatch(r"\d{1,9}", text) if isinstance(text, str) else None
    return int(match.group()) if match and int(match.group()) > 0 else None


def _is_pixels(dtype: str, shape: Any, scaled: bool) -> bool:
    """Whether Stable-Baselines3 divides the observations by 255 before the network sees them."""
    return dtype.endswith("uint8") and shape is not None and len(shape) == 3 and scaled

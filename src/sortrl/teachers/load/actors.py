"""Actors of Stable-Baselines3 agents with continuous actions: PPO, A2C and TRPO (a Gaussian's mean), SAC (the mean through tanh), TD3
and DDPG. Their tensors are read as those of agents with discrete actions are, and nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.nets.architecture import Architecture
from sortrl.teachers.load.sb3 import AgentFacts, take

# What does not choose actions: critics, targets, spreads of distributions.
_UNUSED = (
    "critic",
    "actor_target.",
    "value_net.",
    "mlp_extractor.value_net.",
    "log_std",
    "actor.log_std",
    "log_ent_coef",
)


@dataclass(frozen=True)
class ContinuousAgent:
    """A converted agent. ``squashed``: its numbers go through tanh to the action's range; else they are clipped to it."""

    algorithm: str
    architecture: Architecture
    parameters: tuple[Tensor, ...]
    squashed: bool
    vecnormalized: bool


def convert_actor(state: Mapping[str, Tensor], facts: AgentFacts, numbers: int, where: str) -> ContinuousAgent:
    """Find the network of the actor, whose actions have so many ``numbers``."""
    tensors = {name: tensor for name, tensor in state.items() if not name.startswith(_UNUSED)}
    if "log_std" in state:
        algorithm, heads, squashed, activation = (
            facts.algorithm or "ppo",
            ["mlp_extractor.policy_net."],
            facts.squashed,
            "Tanh",
        )
        last = "action_net"
    elif "actor.mu.weight" in state:
        algorithm, heads, squashed, activation, last = "sac", ["actor.latent_pi."], True, "ReLU", "actor.mu"
    else:
        algorithm, heads, squashed, activation, last = "td3", ["actor.mu."], True, "ReLU", ""
    layers = [layer for head in heads for layer in take(tensors, head, 2, where)]
    if last and {f"{last}.weight", f"{last}.bias"} <= tensors.keys():
        layers += [tensors.pop(f"{last}.weight"), tensors.pop(f"{last}.bias")]
    if tensors or not layers:
        raise SortRLError(
            f"{where}: no actor with continuous actions that is known. Known are PPO, A2C, TRPO, SAC, TD3 and DDPG with MlpPolicy; "
            f"found {', '.join(list(tensors or state)[:12])[:600] or 'no tensors'}. Load the agent yourself and pass a torch module "
            "(observations -> actions)."
        )
    weights = layers[::2]
    obs_shape = facts.obs_shape or (int(weights[0].shape[1]),)
    if len(weights[-1]) != numbers or len(obs_shape) != 1 or math.prod(obs_shape) != weights[0].shape[1]:
        raise SortRLError(
            f"{where}: an actor from {weights[0].shape[1]} inputs to {len(weights[-1])} numbers, for observations {obs_shape} and "
            f"actions of {numbers}. Is this the agent of another task?"
        )
    hidden = tuple(len(weight) for weight in weights[:-1])
    architecture = Architecture(obs_shape, numbers, hidden, facts.activation or activation)
    return ContinuousAgent(
        algorithm, architecture, tuple(layer.float() for layer in layers), squashed, facts.vecnormalized
    )

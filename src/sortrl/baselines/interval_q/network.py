"""The networks that all methods train, what they start from, and the bounds their losses use.

Bounds are those of interval propagation (IBP): :class:`sortrl.nets.intervals.IntervalHead`. CROWN's tighter linear bounds, which
SA-DQN's authors mix in while eps is small, are not used.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.nets.architecture import Architecture
from sortrl.nets.interval_policy import IntervalConfig, IntervalPolicy
from sortrl.nets.intervals import IntervalHead
from sortrl.teachers.teacher import Teacher


class Valid(NamedTuple):
    """The range of possible observations in unit space; None where there is none."""

    low: Tensor | None = None
    high: Tensor | None = None

    def clip(self, unit: Tensor, state: Tensor) -> Tensor:
        """Into the range. What the state itself is outside by is left as it is."""
        unit = unit if self.low is None else torch.maximum(unit, torch.minimum(self.low, state))
        return unit if self.high is None else torch.minimum(unit, torch.maximum(self.high, state))


def box(state: Tensor, eps: float, valid: Valid | None = None) -> tuple[Tensor, Tensor]:
    """Corners of what a state can be made to look like, clipped to the valid range if one is given."""
    lo, hi = state - eps, state + eps
    return (lo, hi) if valid is None else (valid.clip(lo, state), valid.clip(hi, state))


class Dueling(nn.Module):
    """Action values V(s) + A_a(s) - mean A(s), as the papers' dueling networks have them; the agent is A alone.

    Values are a hundred times the differences between actions. Where one network holds both, its bounds are those of the value,
    and a loss that narrows them leaves nothing of the differences.

    >>> head, states = IntervalHead(4, (8,), 3), torch.randn(5, 4)
    >>> torch.allclose(Dueling.of(head, 2.0)(states), 2.0 * head(states), atol=1e-5)
    True
    """

    def __init__(self, value: IntervalHead, advantage: IntervalHead) -> None:
        super().__init__()
        self.value = value
        self.advantage = advantage

    @classmethod
    @torch.no_grad()
    def of(cls, values: IntervalHead, scale: float = 1.0) -> Dueling:
        """The same action values times ``scale``, exactly: the last layer's mean over actions is V, the rest is A."""
        value, advantage = copy.deepcopy(values), copy.deepcopy(values)
        last = values.layers[-1]
        assert isinstance(last, nn.Linear)
        for network, change in ((value, _mean), (advantage, _centred)):
            weight = scale * change(last.weight)
            layer = nn.Linear(last.in_features, len(weight), dtype=weight.dtype)
            layer.weight.copy_(weight)
            layer.bias.copy_(scale * change(last.bias))
            network.layers[-1] = layer
        return cls(value, advantage)

    def forward(self, states: Tensor) -> Tensor:
        """Action values (batch, n_actions)."""
        advantages = self.advantage(states)
        values: Tensor = self.value(states) + advantages - advantages.mean(1, keepdim=True)
        return values

    def bounds_over(self, states: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of the action values where the advantages are anywhere in [lo, hi], and the value is that of ``states``."""
        lower, upper = self.advantage.bounds_over(lo, hi)
        n = lower.shape[1]
        others = [(bound.sum(1, keepdim=True) - bound) / n for bound in (lower, upper)]
        value = self.value(states)
        return value + (1 - 1 / n) * lower - others[1], value + (1 - 1 / n) * upper - others[0]


def _mean(parameter: Tensor) -> Tensor:
    return parameter.mean(0, keepdim=True)


def _centred(parameter: Tensor) -> Tensor:
    return parameter - parameter.mean(0, keepdim=True)


def interval_config(architecture: Architecture | None) -> IntervalConfig | None:
    """The same network as an :class:`IntervalPolicy` has; None for one that it cannot be (other activations, residual blocks).

    >>> interval_config(Architecture((4,), 2, (8, 8), "ReLU"))
    IntervalConfig(obs_shape=(4,), n_actions=2, hidden=(8, 8), conv=(), norm=False)
    >>> interval_config(Architecture((4,), 2, (8, 8), "Tanh")) is None
    True
    """
    if architecture is None or architecture.trunk == "impala":
        return None
    if (
        architecture.n_quantiles
        or architecture.action_groups
        or (architecture.hidden and architecture.activation != "ReLU")
    ):
        return None
    norm = architecture.trunk == "norm_cnn"
    if norm and architecture.activation != "ReLU":
        return None
    with torch.device("meta"):
        layers = architecture.build()
    conv = tuple((m.out_channels, m.kernel_size[0], m.stride[0]) for m in layers if isinstance(m, nn.Conv2d))
    widths = [m.out_features for m in layers if isinstance(m, nn.Linear)]
    return IntervalConfig(architecture.obs_shape, architecture.n_actions, tuple(widths[:-1]), conv, norm)


def same_network(teacher: Teacher) -> IntervalPolicy | None:
    """The teacher's own network and weights as an :class:`IntervalPolicy`; None if it is of another design."""
    config = interval_config(teacher.architecture)
    if config is None:
        return None
    policy = IntervalPolicy(
        config.obs_shape, config.n_actions, config.hidden, config.conv, config.norm, teacher.normalizer
    )
    parts = [m for m in teacher.body.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    norms = [m for m in teacher.body.modules() if isinstance(m, (nn.LayerNorm, nn.GroupNorm))]
    pairs = [*zip(policy.head.layers, parts, strict=True), *zip(policy.head.norms, norms, strict=True)]
    for ours, theirs in pairs:
        ours.load_state_dict(theirs.state_dict())
    return policy


def as_teacher(policy: IntervalPolicy, name: str) -> Teacher:
    """The agent as a teacher, for a student of a robust agent; only linear layers, without normalisation."""
    config = policy.config
    if config.conv or config.norm:
        raise SortRLError(f"{name}: its network has convolutions or layer norm, expected linear layers alone.")
    architecture = Architecture(config.obs_shape, config.n_actions, config.hidden, "ReLU")
    body = architecture.build()
    parts = [m for m in body.modules() if isinstance(m, nn.Linear)]
    for theirs, ours in zip(parts, policy.head.layers, strict=True):
        theirs.load_state_dict(ours.state_dict())
    return Teacher(body, policy.normalizer, config.n_actions, name, "dqn", architecture)


def fresh_network(teacher: Teacher, seed: int) -> IntervalPolicy:
    """With random weights: the teacher's widths, ReLU for whatever it has between them."""
    architecture = teacher.architecture
    if architecture is None or architecture.trunk != "mlp":
        raise SortRLError(
            f"{teacher.name}: its network ({'unknown' if architecture is None else architecture.trunk}) is not one of linear layers "
            "or convolutions with ReLU, whose bounds the baselines know. Give a DQN, PQN or PPO agent of such layers."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return IntervalPolicy(
            teacher.obs_shape, teacher.n_actions, architecture.hidden or (64, 64), normalizer=teacher.normalizer
        )


def gathered(values: Tensor, actions: Tensor) -> Tensor:
    """The value (batch,) of one action per state."""
    return values.gather(1, actions[:, None])[:, 0]


def overlap(q: Dueling, state: Tensor, action: Tensor, eps: float) -> Tensor:
    """RADIAL's worst-case loss (batch,): how far upper bounds of worse actions reach above the lower bound of ``action``.

    sum over a of d_a relu(U_a - L_action + d_a / 2), where d_a = relu(Q_action - Q_a), through which no gradient goes. U and L are
    bounds of the advantages: the value is the same for all actions.
    """
    with torch.no_grad():
        values = q(state)
        gap = (gathered(values, action)[:, None] - values).relu()
    lower, upper = q.advantage.bounds_over(*box(state, eps))
    worst: Tensor = (gap * (upper - gathered(lower, action)[:, None] + gap / 2).relu()).sum(1)
    return worst

"""Networks that are Lipschitz in l_inf by construction, and policies made of them."""

from pathlib import Path

from sortrl.core.errors import SortRLError
from sortrl.nets import zoo
from sortrl.nets.base import CertifiedPolicy, load_policy
from sortrl.nets.continuous import ContinuousConfig, ContinuousPolicy
from sortrl.nets.front import AveragePool, BoundedConv, Centre, Crop, Pixels, Ramp, Scale
from sortrl.nets.hybrid import HybridConfig, HybridPolicy
from sortrl.nets.interval_policy import IntervalConfig, IntervalPolicy
from sortrl.nets.intervals import IntervalHead
from sortrl.nets.layers import MeanShift, SortConv, SortLinear, truncated_mix
from sortrl.nets.sort import PolicyConfig, SortPolicy
from sortrl.nets.thresholds import Rounding, ThresholdPolicy, ThresholdPolicyConfig

__all__ = [
    "AveragePool",
    "BoundedConv",
    "Centre",
    "CertifiedPolicy",
    "ContinuousConfig",
    "ContinuousPolicy",
    "Crop",
    "HybridConfig",
    "HybridPolicy",
    "IntervalConfig",
    "IntervalHead",
    "IntervalPolicy",
    "MeanShift",
    "Pixels",
    "PolicyConfig",
    "Ramp",
    "Rounding",
    "Scale",
    "SortConv",
    "SortLinear",
    "SortPolicy",
    "ThresholdPolicy",
    "ThresholdPolicyConfig",
    "load",
    "load_discrete",
    "sort_layers_only",
    "truncated_mix",
]


def sort_layers_only(policy: CertifiedPolicy, what: str) -> SortPolicy:
    """The policy, if it is made of sort layers alone; an error that says what cannot be done with it otherwise."""
    if not isinstance(policy, SortPolicy):
        raise SortRLError(
            f"{what} needs a policy of sort layers alone, and this one is of kind {policy.kind!r} (with ordinary layers). "
            "Distil it with head=None and the preset 'fast'."
        )
    return policy


Discrete = SortPolicy | HybridPolicy | ThresholdPolicy | IntervalPolicy


def load(path: str | Path) -> Discrete | ContinuousPolicy:
    """A saved policy of any kind, from its directory the file itself, the zoo (``"zoo:NAME"``) or the Hugging
    Face Hub (``"hf:user/name"`` or ``"hf:user/name@revision"``; ``sortrl[hub]``).

    >>> load("zoo:cartpole").n_actions
    2
    """
    kinds = (SortPolicy, HybridPolicy, ThresholdPolicy, IntervalPolicy, ContinuousPolicy)
    policy = load_policy(zoo.locate(path), {kind.kind: kind for kind in kinds})
    assert isinstance(policy, kinds)
    return policy


def load_discrete(path: str | Path) -> Discrete:
    """:func:`load`, for what needs actions that are chosen from a list."""
    policy = load(path)
    if isinstance(policy, ContinuousPolicy):
        raise SortRLError(
            f"{path} holds a policy with continuous actions, and this is for discrete ones. What takes it: sortrl evaluate, and in "
            "Python predict and certify."
        )
    return policy

"""Networks that are Lipschitz in l_inf by construction, and policies made of them."""

from pathlib import Path

from sortrl import zoo
from sortrl.errors import SortRLError
from sortrl.nets.certified import CertifiedPolicy, load_policy
from sortrl.nets.hybrid import HybridConfig, HybridPolicy, IntervalHead
from sortrl.nets.layers import (
    AveragePool,
    BoundedConv,
    Crop,
    MeanShift,
    Pixels,
    Scale,
    SortConv,
    SortLinear,
    truncated_mix,
)
from sortrl.nets.policy import PolicyConfig, SortPolicy

__all__ = [
    "AveragePool",
    "BoundedConv",
    "CertifiedPolicy",
    "Crop",
    "HybridConfig",
    "HybridPolicy",
    "IntervalHead",
    "MeanShift",
    "Pixels",
    "PolicyConfig",
    "Scale",
    "SortConv",
    "SortLinear",
    "SortPolicy",
    "load",
    "sort_layers_only",
    "truncated_mix",
]


def sort_layers_only(policy: CertifiedPolicy, what: str) -> SortPolicy:
    """The policy, if it is made of sort layers alone; an error that says what cannot be done with it otherwise."""
    if not isinstance(policy, SortPolicy):
        raise SortRLError(
            f"{what} needs a policy of sort layers alone, and this one is of kind {policy.kind!r} (with linear layers). "
            "Distil it with head=None."
        )
    return policy


def load(path: str | Path) -> SortPolicy | HybridPolicy:
    """A saved policy of any kind, from its directory or the file itself, or from the zoo (``"zoo:NAME"``).

    >>> load("zoo:cartpole").n_actions
    2
    """
    policy = load_policy(zoo.locate(path), {SortPolicy.kind: SortPolicy, HybridPolicy.kind: HybridPolicy})
    assert isinstance(policy, SortPolicy | HybridPolicy)
    return policy

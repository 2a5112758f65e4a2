"""Networks that are Lipschitz in l_inf by construction."""

from sortrl.nets.layers import AveragePool, Crop, MeanShift, Scale, SortConv, SortLinear, truncated_mix
from sortrl.nets.policy import PolicyConfig, SortPolicy

__all__ = [
    "AveragePool",
    "Crop",
    "MeanShift",
    "PolicyConfig",
    "Scale",
    "SortConv",
    "SortLinear",
    "SortPolicy",
    "truncated_mix",
]

"""Robustness of single decisions as VNN-LIB instances, in the layout of the competition of verifiers of neural networks (VNN-COMP)."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.files import write_text
from sortrl.nets.float_bounds import box_around
from sortrl.nets.onnx import export_scores
from sortrl.nets.sort import SortPolicy

INSTANCES, NETWORK = "instances.csv", "onnx/policy.onnx"


def export_vnnlib(
    policy: SortPolicy, unit: Tensor, eps: float, directory: str | Path, timeout: int = 300
) -> list[Path]:
    """Write the network, one instance for each of the unit-space states (n, *obs_shape), and ``instances.csv``; return the instances.

    An instance is the negated property: an input within ``eps`` of the state for which another action has at least the score of the
    one that is played there. ``unsat`` therefore means that no such input changes the decision, and ``sat`` comes with one that does
    (or levels the scores). The box is the smallest one of float32 numbers that holds all inputs within eps. ``timeout`` is in seconds.
    """
    if tuple(unit.shape[1:]) != policy.obs_shape or not len(unit) or unit.dtype != torch.float32:
        raise SortRLError(
            f"export_vnnlib: states are {unit.dtype} of shape {tuple(unit.shape)}, expected torch.float32 (n, "
            f"{', '.join(map(str, policy.obs_shape))}) in unit space, as policy.normalize gives them."
        )
    if not 0 < eps < math.inf:
        raise SortRLError(f"export_vnnlib: eps is {eps}, expected a positive number in the policy's input units.")
    folder = Path(directory)
    export_scores(policy, folder / NETWORK)
    low, high = (end.flatten(1) for end in box_around(unit, eps, None, None))
    actions = policy.certify_unit(unit).action
    width, written = len(str(len(unit) - 1)), []
    for row in range(len(unit)):
        name = f"vnnlib/state-{row:0{width}}.vnnlib"
        write_text(folder / name, instance(low[row], high[row], int(actions[row]), policy.n_actions, eps))
        written.append(name)
    write_text(folder / INSTANCES, "".join(f"{NETWORK},{name},{timeout}\n" for name in written))
    return [folder / name for name in written]


def instance(low: Tensor, high: Tensor, action: int, n_actions: int, eps: float) -> str:
    """The text of one instance.

    >>> print(instance(torch.tensor([-0.5]), torch.tensor([0.5]), 1, 2, 0.5))
    ; Within 0.5 of a state (l_inf, unit space), action 1 is played. Is there an input for which another one scores as high?
    (declare-const X_0 Real)
    (declare-const Y_0 Real)
    (declare-const Y_1 Real)
    (assert (>= X_0 -0.5))
    (assert (<= X_0 0.5))
    (assert (or (and (>= Y_0 Y_1))))
    <BLANKLINE>
    """
    lines = [
        f"; Within {eps:g} of a state (l_inf, unit space), action {action} is played. Is there an input for which another one scores "
        "as high?"
    ]
    lines += [f"(declare-const X_{i} Real)" for i in range(len(low))]
    lines += [f"(declare-const Y_{j} Real)" for j in range(n_actions)]
    for i, (least, most) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        lines += [f"(assert (>= X_{i} {_decimal(least)}))", f"(assert (<= X_{i} {_decimal(most)}))"]
    others = " ".join(f"(and (>= Y_{j} Y_{action}))" for j in range(n_actions) if j != action)
    return "\n".join([*lines, f"(assert (or {others}))", ""])


def _decimal(value: float) -> str:
    """The number in digits that are read back as the same one, without an exponent, which not every reader knows."""
    short = repr(value)
    return f"{value:.60f}".rstrip("0") if "e" in short else short

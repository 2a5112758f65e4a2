"""An independent check of certificate files: plain NumPy in float64, written from the definition and sharing no code.

It reads the safetensors files itself, computes every score again and asks, per state: is the action the arg-max, is the
radius at most margin / (2 L) (with ordinary layers: does the action lead at that radius, by intervals), do the weights have
the stated hash?
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.errors import SortRLError
from sortrl.verify.reading import Array, Doubles, read_safetensors, weights_hash
from sortrl.verify.rounded import RoundedNetwork, rounded_network
from sortrl.verify.sorting import SortNetwork, sort_network

__all__ = ["Verdict", "read_safetensors", "verify"]

FORMAT = "sortrl-certificates-1"


@dataclass(frozen=True)
class Verdict:
    """What was checked and what is wrong, one line each."""

    states: int
    lipschitz: float
    failures: tuple[str, ...]
    smallest_spare: float
    """The least of margin / (2 L) (or what intervals allow) - radius over the states: what rounding slack was kept."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what could not be computed is null."""
        numbers = {"lipschitz": self.lipschitz, "smallest_spare": self.smallest_spare}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**vars(self), **known, "failures": list(self.failures), "ok": self.ok}


def verify(path: str | Path, policy: str | Path | None = None) -> Verdict:
    """Check a file of certificates; ``policy`` overrides where the policy's file is."""
    tensors, metadata = read_safetensors(Path(path))
    if metadata.get("format") != FORMAT:
        raise SortRLError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT}. It holds no certificates.")
    file = Path(path).parent / str(metadata.get("policy")) if policy is None else Path(policy)
    file = file / "policy.safetensors" if os.path.isdir(file) else file  # False for names that no system takes
    weights, description = read_safetensors(file)
    try:
        read = rounded_network if description.get("kind") == "rounded" else sort_network
        network, unfit = read(weights, description["config"], tensors)
        states, action, radius = (tensors[name] for name in ("states", "action", "radius"))
        unfit += _wrong_answers(description["config"], tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise SortRLError(f"{path} or {file} lacks something ({error!r}). Write the certificates again.") from error
    digest, stated = weights_hash(weights), str(metadata.get("weights_sha256"))
    failures = [] if digest == stated else [f"{file} has weights {digest[:12]}…, the certificates are of {stated[:64]}"]
    if unfit:  # then there is no network, or no state, to compute with
        return Verdict(len(states) if states.ndim else 0, math.nan, (*failures, *unfit), math.nan)
    with np.errstate(all="ignore"):  # what overflows is not finite, and that is a failure below
        wrong, spare = _wrong_states(network, states.astype(np.float64), action, radius.astype(np.float64))
    return Verdict(len(states), network.lipschitz, (*failures, *wrong), spare)


def _wrong_answers(config: dict[str, Any], tensors: dict[str, Array]) -> list[str]:
    """What does not fit of the states and what is said of them."""
    n, n_actions, action = len(tensors["action"]), int(config["n_actions"]), tensors["action"]
    expected = {"states": (n, *map(int, config["obs_shape"])), "action": (n,), "radius": (n,)}
    lines = [
        f"{name}: shape {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if action.dtype.kind != "i":
        lines.append(f"action: type {action.dtype}, expected integers")
    elif n and not 0 <= action.min() <= action.max() < n_actions:
        lines.append(f"action: outside 0..{n_actions - 1}")
    return lines


def _wrong_states(
    network: SortNetwork | RoundedNetwork, states: Doubles, action: Array, radius: Doubles
) -> tuple[list[str], float]:
    if not len(states):
        return [], math.inf
    if not np.isfinite(states).all():
        return ["a state contains NaN or infinity"], math.nan
    scores, bound = network.judge(states)
    best = scores.argmax(1)
    lines = []
    for i in range(len(states)):
        if not (np.isfinite(radius[i]) and radius[i] >= 0):
            lines.append(f"state {i}: its radius is {radius[i]}")
        elif best[i] != action[i] and (radius[i] > 0 or scores[i, action[i]] < scores[i, best[i]] - _tie(scores[i])):
            lines.append(f"state {i}: action {action[i]} is stated, the scores say {best[i]}")
        elif not radius[i] <= bound[i]:  # a score that is not a number proves nothing
            lines.append(f"state {i}: radius {radius[i]:.9g} is stated, at most {bound[i]:.9g} can be proven")
    return lines, float((bound - radius).min())


def _tie(scores: Doubles) -> float:
    """Without a certificate the float32 policy may see a near-tie the other way round."""
    return 1e-3 * float(1.0 + np.abs(scores).max())

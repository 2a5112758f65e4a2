"""An independent check of certificate files: plain NumPy in float64, written from the definition and sharing no code.

It reads the safetensors files itself, derives the whole network from the policy's own file, computes every score again and asks,
per state: is the action the one that the policy plays, and does it lead everywhere within the radius, whatever float32 rounds?
The certificates' file is believed in nothing: it states states, actions, runners-up, radii and which policy they are of (the hash of
configuration and weights), and each of these is checked.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.core.errors import SortRLError
from sortrl.verify.described import SortDescription, ThresholdDescription, described, wrong_tensors
from sortrl.verify.intervals import LARGEST_SINGLE
from sortrl.verify.reading import Array, Doubles, policy_hash, read_safetensors, weights_hash
from sortrl.verify.sorting import SortNetwork, sort_network
from sortrl.verify.thresholds import ThresholdNetwork, threshold_network

__all__ = ["Verdict", "read_safetensors", "verify"]

FORMAT = "sortrl-certificates-2"
FIRST_FORMAT = "sortrl-certificates-1"
CLAIM = (
    "For every state (unit space) and every float32 input within its radius in l_inf, the policy's action is the one stated. "
    "Observations alone are perturbed; one state at a time."
)
_FIELDS = {
    FORMAT: {"format", "claim", "policy", "policy_sha256"},
    FIRST_FORMAT: {"format", "claim", "policy", "weights_sha256", "lipschitz", "obs_shape"},
}
_TYPES = {"states": "<f4", "action": "<i8", "runner_up": "<i8", "radius": "<f8"}
_SAME = 1e-6  # of constants that were computed in another order
_ULP = 2.0**-23

Description = SortDescription | ThresholdDescription
Network = SortNetwork | ThresholdNetwork


@dataclass(frozen=True)
class Verdict:
    """What was checked and what is wrong, one line each."""

    states: int
    lipschitz: float
    failures: tuple[str, ...]
    smallest_spare: float
    """The least of what can be proven - radius over the states."""
    distinct: int = 0
    """States that differ: the same one may be stated any number of times."""
    notes: tuple[str, ...] = ()
    """What the file's format leaves unchecked, and what to do about it."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what could not be computed is null."""
        numbers = {"lipschitz": self.lipschitz, "smallest_spare": self.smallest_spare}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        lines = {"failures": list(self.failures), "notes": list(self.notes)}
        return {**vars(self), **known, **lines, "ok": self.ok}


def verify(path: str | Path, policy: str | Path | None = None) -> Verdict:
    """Check a file of certificates; ``policy`` overrides where the policy's file is."""
    tensors, metadata = read_safetensors(Path(path))
    form = metadata.get("format")
    if form not in (FORMAT, FIRST_FORMAT):
        raise SortRLError(f"{path}: format {str(form)[:60]!r}, expected {FORMAT}. It holds no certificates.")
    if metadata.keys() != _FIELDS[form] or not isinstance(metadata["policy"], str):
        raise SortRLError(
            f"{path}: format {form} with the fields {', '.join(sorted(metadata))[:200]}, expected "
            f"{', '.join(sorted(_FIELDS[form]))}. Write the certificates again."
        )
    file = Path(path).parent / metadata["policy"] if policy is None else Path(policy)
    file = file / "policy.safetensors" if os.path.isdir(file) else file  # False for names that no system takes
    weights, own = read_safetensors(file)
    if own.get("kind") == "interval":
        raise SortRLError(
            f"{file}: a policy of kind 'interval', the kind of baselines, which this independent check does not know. Its certificates "
            "rest on the code that wrote them (sortrl certify) alone."
        )
    try:
        description = described(own, weights)
    except (ValueError, TypeError, OverflowError) as error:
        raise SortRLError(f"{file} is no policy that can be checked ({error}). Save the policy again.") from error
    failures = _wrong_identity(form, metadata, own, weights, file)
    unfit = wrong_tensors(description.tensors, weights)
    if not unfit:
        try:
            network: Network = (
                threshold_network(weights, description)
                if isinstance(description, ThresholdDescription)
                else sort_network(weights, description)
            )
        except ValueError as error:  # a mix that no policy has
            raise SortRLError(f"{file} is no policy that can be checked ({error}). Save the policy again.") from error
        failures += _wrong_statements(metadata, tensors, description, network) if form == FIRST_FORMAT else []
    unfit += _wrong_answers(description, tensors, form)
    states = len(tensors["states"]) if "states" in tensors and tensors["states"].ndim else 0
    if unfit:  # then there is no network, or no state, to compute with
        return Verdict(states, math.nan, (*failures, *unfit), math.nan)
    with np.errstate(all="ignore"):  # what overflows is not finite, and that is a failure below
        lipschitz, spare = network.lipschitz, math.inf
        for begin in range(0, states, network.rows):
            part = {name: tensors[name][begin : begin + network.rows] for name in _TYPES}
            lines, least = _wrong_states(network, part, begin)
            failures, spare = failures + lines, min(spare, least)
    distinct = len({(state + 0.0).tobytes() for state in tensors["states"]})  # -0 is 0
    return Verdict(states, lipschitz, tuple(failures), spare, distinct, _notes(form, path))


def _notes(form: str, path: str | Path) -> tuple[str, ...]:
    if form == FORMAT:
        return ()
    return (
        f"{path} is of format {form}, whose hash covers the policy's weights and not its configuration. Everything stated holds "
        "for the policy as it is now; to have its configuration covered too, write the certificates again (sortrl certify --save).",
    )


def _wrong_identity(
    form: str, metadata: dict[str, Any], own: dict[str, Any], weights: dict[str, Array], file: Path
) -> list[str]:
    """Whether the certificates are of this policy, and say what certificates say."""
    if form == FORMAT:
        what, digest, stated = "configuration and weights", policy_hash(own, weights), metadata["policy_sha256"]
    else:
        what, digest, stated = "weights", weights_hash(weights), metadata["weights_sha256"]
    lines = [] if metadata["claim"] == CLAIM else [f"claim: {str(metadata['claim'])[:80]!r}, expected {CLAIM!r}"]
    if digest != stated:
        lines.append(f"{file} has {what} {digest[:12]}…, the certificates are of {str(stated)[:64]}")
    return lines


def _wrong_statements(
    metadata: dict[str, Any], tensors: dict[str, Array], description: Description, network: Network
) -> list[str]:
    """Files of the first format state mixes, constant and shape, all of which follow from the policy's own file."""
    lines, stated = [], metadata["lipschitz"]
    known = network.lipschitz if math.isfinite(network.lipschitz) else None
    same = stated is None if known is None else type(stated) is float and abs(stated - known) <= _SAME * known
    if not same:
        lines.append(f"lipschitz: {str(stated)[:40]} is stated, the policy's is {known}")
    if metadata["obs_shape"] != list(description.obs_shape):
        lines.append(f"obs_shape: {str(metadata['obs_shape'])[:40]} is stated, the policy's is {description.obs_shape}")
    mixes = network.mixes if isinstance(network, SortNetwork) else []
    for index, mix in enumerate(mixes):
        found = tensors.get(f"mix.{index}", np.empty(0, "<f4"))
        # The last bit may differ where another machine computed the powers of rho.
        if found.dtype != "<f4" or found.shape != mix.shape or not (np.abs(found - mix) <= _ULP * mix).all():
            lines.append(f"mix of layer {index}: not that of the policy's rho ({len(mix)} numbers)")
        elif math.fsum(found) > 1.0:
            lines.append(f"mix of layer {index}: its sum exceeds 1")
    return lines


def _wrong_answers(description: Description, tensors: dict[str, Array], form: str) -> list[str]:
    """What does not fit of the states and what is said of them."""
    n, shape = len(tensors["action"]) if "action" in tensors and tensors["action"].ndim else 0, description.obs_shape
    layers = len(description.fans) if form == FIRST_FORMAT and isinstance(description, SortDescription) else 0
    allowed = _TYPES.keys() | {f"mix.{index}" for index in range(layers)}
    lines = [f"{name[:80]}: expected no such tensor" for name in sorted(tensors.keys() - allowed)]
    for name, kind in _TYPES.items():
        found, wanted = tensors.get(name), (n, *shape) if name == "states" else (n,)
        if found is None:
            lines.append(f"{name}: nothing, expected {wanted} of {np.dtype(kind)}")
        elif found.shape != wanted or found.dtype != np.dtype(kind):
            lines.append(f"{name}: shape {found.shape} of {found.dtype}, expected shape {wanted} of {np.dtype(kind)}")
        elif name == "states" and not np.isfinite(found).all():
            lines.append("a state contains NaN or infinity")
        elif found.dtype.kind == "i" and n and not 0 <= found.min() <= found.max() < description.n_actions:
            lines.append(f"{name}: outside 0..{description.n_actions - 1}")
    return lines


def _wrong_states(network: Network, part: dict[str, Array], first: int) -> tuple[list[str], float]:
    """One line for each state of which something false is said, and the least that the radii leave of what can be proven."""
    action, runner_up, radius = part["action"], part["runner_up"], part["radius"]
    rows, zero = np.arange(len(action)), np.zeros(len(action))
    seen: Any = network.look(part["states"].astype(np.float64))
    scores = network.scores(seen)
    overflow: Array = np.logical_or(network.overflows(seen), ~(np.abs(scores).max(1) < LARGEST_SINGLE))
    best, others = scores.argmax(1), scores.copy()
    others[rows, action] = -np.inf
    second = others.argmax(1)
    proven: Array = np.all(network.leads(seen, action, radius) > 0, axis=1)
    # Without a radius, near-ties may be seen the other way round in float32; what rounding cannot explain is false.
    unplayed: Array = (best != action) & (network.leads(seen, best, zero)[rows, action] > 0)
    behind: Array = (second != runner_up) & (network.leads(seen, second, zero)[rows, runner_up] > 0)
    bound = _bound(network, seen, action)
    bound = np.where(proven, np.maximum(bound, radius), bound)
    lines = []
    for i in range(len(action)):
        where = f"state {first + i}"
        if not (np.isfinite(radius[i]) and radius[i] >= 0):
            lines.append(f"{where}: its radius is {radius[i]}")
        elif overflow[i]:
            lines.append(f"{where}: its scores overflow in float32, so no action is certain")
        elif unplayed[i] or (best[i] != action[i] and radius[i] > 0):
            lines.append(f"{where}: action {action[i]} is stated, the scores say {best[i]}")
        elif radius[i] > 0 and not proven[i]:
            lines.append(f"{where}: radius {radius[i]:.9g} is stated, at most {bound[i]:.9g} can be proven")
        elif runner_up[i] == action[i] or behind[i]:
            lines.append(f"{where}: runner-up {runner_up[i]} is stated, the scores say {second[i]}")
    return lines, float((bound - radius).min())


def _bound(network: Network, seen: Any, action: Array) -> Doubles:
    """The largest radius (batch,) that can be proven, by bisection."""
    high = network.most(seen, action)
    low = np.zeros(len(high))
    for _ in range(network.bisections):
        middle = (low + high) / 2
        holds = (network.leads(seen, action, middle) > 0).all(1)
        low, high = np.where(holds, middle, low), np.where(holds, high, middle)
    return low

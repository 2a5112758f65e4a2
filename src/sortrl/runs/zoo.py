"""From a run to an entry of the zoo: a small policy, and a card that says what it is and how it was measured."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sortrl import nets
from sortrl.core.checkpoint import damage_named
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, read_tensors, write_json, write_tensors, write_text
from sortrl.data.dataset import load_demonstrations
from sortrl.nets import zoo
from sortrl.nets.base import FILE_NAME, CertifiedPolicy
from sortrl.nets.cards import card_of, card_text
from sortrl.runs.run import TRAINED_HERE, identity_of
from sortrl.teachers.grading import LOG_FILE

HALF_AGREEMENT = 0.999
AGAIN = "Fetch the entry again."
SAMPLE = 20_000  # states on which the two precisions are compared


def publish(run: Path, name: str, folder: Path = Path("zoo"), with_teacher: bool = False) -> Path:
    """Write ``folder/name`` from a finished run; ``with_teacher`` says that its teacher, if it was given, may be passed on.

    Weights are stored in half precision if the policy's action stays the same in 99.9 % of its training states; the
    certificates of such a policy are those of the rounded weights, so they hold either way.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
        raise SortRLError(f"An entry of the zoo cannot be called {name!r}; use lower-case letters, digits and hyphens.")
    identity, results = identity_of(run), read_object(run / "results.json")
    entry = folder / name
    if entry.exists():
        raise SortRLError(f"{entry} exists already. Delete it first to replace it.")
    try:
        agreement = _write_policy(run, entry)
        files = [FILE_NAME, "run.json"]
        identity["teacher"] = Path(str(identity.get("teacher"))).name  # not where it once lay
        write_json(entry / "run.json", {"identity": identity})
        # A teacher that was given is somebody's; one that was trained for the run is ours to pass on.
        ours = with_teacher or identity["teacher"] == TRAINED_HERE
        kept = run / "teacher" / zoo.TEACHER_FILE
        shared = _shared(kept, folder) if ours and kept.exists() else None
        if ours and kept.exists() and shared is None:
            (entry / "teacher").mkdir()
            shutil.copy(kept, entry / "teacher")
            files.append(f"teacher/{zoo.TEACHER_FILE}")
        log = run / "teacher" / LOG_FILE
        trained = _training(read_object(log)) if ours and log.exists() else None
        hashes = {file: zoo.sha256(entry / file) for file in files}
        found = card_of(name, results, hashes, agreement, trained)
        if shared is not None:
            found["shared_teacher"] = shared
        write_text(entry / "README.md", card_text(found))
        write_json(entry / zoo.CARD, found)  # the last: without it there is no entry
    except BaseException:
        shutil.rmtree(entry, ignore_errors=True)
        raise
    return entry


def _shared(teacher: Path, folder: Path) -> dict[str, str] | None:
    """Which of the zoo's teachers this is, if it is one of them."""
    digest = zoo.sha256(teacher)
    for place in sorted((folder / zoo.TEACHERS).glob(f"*/{zoo.TEACHER_FILE}")):
        if zoo.sha256(place) == digest:
            return {"name": place.parent.name, "sha256": digest}
    return None


def _write_policy(run: Path, entry: Path) -> float | None:
    """In half precision if that changes next to nothing: then the share of states with the same action."""
    policy = nets.load_discrete(run)
    tensors, metadata = read_tensors(run / FILE_NAME)
    halved = {name: tensor.half() if _is_weight(name, tensor) else tensor for name, tensor in tensors.items()}
    write_tensors(entry / FILE_NAME, halved, metadata)
    states = load_demonstrations(run / "data.safetensors").obs
    states = states[:: -(-len(states) // SAMPLE)]
    agreement = float((_actions(nets.load_discrete(entry), states) == _actions(policy, states)).mean())
    if agreement >= HALF_AGREEMENT:
        return agreement
    write_tensors(entry / FILE_NAME, tensors, metadata)
    return None


def _is_weight(name: str, tensor: torch.Tensor) -> bool:
    """Positions of units and linear weights; not means, statistics of observations or settings."""
    return name.endswith(".weight") and tensor.dtype == torch.float32


def _actions(policy: CertifiedPolicy, states: Any) -> Any:
    return np.concatenate([policy.predict(part)[0] for part in np.array_split(states, -(-len(states) // 1024))])


def _training(log: dict[str, Any]) -> dict[str, Any]:
    """How long the teacher took to the state that was kept, its best."""
    try:
        best = max(log["history"], key=lambda row: float(row["return"]))
        found = {key: best[key] for key in ("step", "return", "hours") if key in best}
    except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
        raise SortRLError(f"The teacher's training log lacks a return for each entry ({str(error)[:200]}).") from error
    if "before" in log:  # of an agent that imitates its own best tries
        found["imitates"] = _training(log["before"]) if isinstance(log["before"], dict) else None
    return found


def described(where: Path) -> str:
    """The card of an entry for people, from its folder."""
    with damage_named(where / zoo.CARD, AGAIN):
        return card_text(zoo.card(where))


def summed_up(where: Path) -> str:
    """An entry in a line."""
    with damage_named(where / zoo.CARD, AGAIN):
        found = zoo.card(where)
        clean = [row["mean"] for row in found["returns"] if row["policy"] == "student" and row["eps"] == 0]
        return f"{found['env']:<24} clean return {clean[0]:.1f}, trained for eps {found['eps']:.4g}"

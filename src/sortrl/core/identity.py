"""Does this file belong to that run? One fingerprint of weights, one comparison of settings, one error that says what differs.

Whatever is kept to be continued or taken over later (a run, a checkpoint, a search, the rows of a suite, the units of a figure)
says in its file what it was made with: its *identity*, plain JSON. Before it is used, that is compared with what is asked for now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from torch import nn

from sortrl.core.errors import SortRLError

Identity = dict[str, Any]
_ABSENT = object()
_SHOWN = 8  # differences that an error names
UNKNOWN = object()
"""Files without this field do not say: they are taken at their word."""

# Fields added after files without them were written, and what they were in effect before.
ADDED_LATER: dict[str, Any] = {
    # a run
    "teacher_weights": UNKNOWN,
    # RobustifyConfig
    "noise": 0.0,
    "smoothing": 0.0,
    "dagger_eps": 0.0,
    "start_radius": 0.0,
    "remember": False,
    "eps_keep": 20 / 255,
    "memory_bytes": 5_000_000,
    "search": {
        "steps": 0,
        "goal": 0.0,
        "horizon": 120,
        "patience": 64,
        "random_share": 0.5,
        "longest_run": 30,
        "temperatures": [1.0, 2.0, 4.0],
        "slots": 32,
    },
    "rounding": None,
    "polish": None,
    "tutored": True,
    "harden": None,
    "steady": None,
    "candidates": 1,
    "choose_eps": [0.0],
    "choose_episodes": 50,
    "units": "teacher",
    "sensor_eps": None,
    # CollectConfig
    "focus": 0.0,
    "spread": False,
    "sticky": 0.0,
    # SearchConfig
    "straighten": False,
    # DistillConfig
    "conv": [],
    "pool": 1,
    "crop": [0, 0, 0, 0],
    "head": None,
    "head_learning_rate": 0.002,
    "bounded_conv": [],
    "conv_learning_rate": 0.001,
    "worst_share": 0.0,
    "soft_temperature": 1.0,
    "ramps": False,
    "p_end": 1024.0,
    "scalar_learning_rate": None,
    "eps_rise": 0.0,
    # ThresholdConfig
    "norm": False,
    # PQNConfig
    "reward_unit": 1.0,
    "half": False,
    "patience": 0,
    "retry": 0.0,
    # an imitation
    "imitates_weights": UNKNOWN,
}

# Fields that files have and settings have no more, and the value at which such a file is still what it says.
GIVEN_UP: dict[str, Any] = {
    # settings of other kinds of students, which once stood in every run
    "distill": UNKNOWN,
    "remember": False,
    "rounding": None,
    "polish": None,
    "eps_keep": 20 / 255,
    "memory_bytes": 5_000_000,
    "search": ADDED_LATER["search"] | {"straighten": False},
    "tutored": True,
    "lambda_start": 1.0,
    "mask_chunk": 128,
    "conv_learning_rate": 0.001,
    "temperature": 1.0,
    "beta": 0.0,
    # HardenConfig
    "calm": 0.4,
    "attack_steps": 3,
    "gae_lambda": 0.97,
    "ent_coef": 0.003,
    "clip_range": 0.2,
    "n_epochs": 6,
    # SteadyConfig
    "give": 0.02,
    "price": 0.2,
    "last_layer": True,
    # SearchConfig
    "horizon": 120,
    "random_share": 0.5,
    "longest_run": 30,
    "temperatures": [1.0, 2.0, 4.0],
}


RENAMED = {"preset": {"rounded": "thresholds"}}
"""By field: values that have another name now."""


class Fingerprint(str):
    """A hash of weights that also knows how earlier versions wrote it, for files that have it so."""

    earlier: Callable[[], tuple[str, ...]]
    """Computed when asked for: hardly any file needs it."""


def fingerprint(network: object) -> Fingerprint:
    """What tells two agents apart: a hash of their weights. Of what is no network, only its type is known.

    >>> fingerprint(nn.Identity())[:8], fingerprint(nn.Linear(1, 1)) == fingerprint(nn.Linear(1, 1))
    ('e3b0c442', False)
    """
    if not isinstance(network, nn.Module):
        mark = Fingerprint(type(network).__name__)
        mark.earlier = tuple
        return mark
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    mark = Fingerprint(digest.hexdigest())
    mark.earlier = lambda: (_of_values(network), _of_name_and_values(network))
    return mark


def _of_values(network: nn.Module) -> str:
    """As checkpoints had it up to 0.1."""
    parts = [tensor.double().contiguous().numpy().tobytes() for tensor in network.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _of_name_and_values(network: nn.Module) -> str:
    """As suites had it up to 0.1."""
    digest = hashlib.sha256(str(getattr(network, "name", "")).encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def plain(value: Any) -> Any:
    """As JSON has it: dataclasses as objects, tuples as lists. Fingerprints stay what they are, and are strings there."""
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class Difference(NamedTuple):
    """A field that is not what is asked for now."""

    field: str
    """With the names of the objects around it: ``config.distill.steps``."""
    stored: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.field} is {_short(self.stored)} there and {_short(self.wanted)} now"


def differences(stored: Any, wanted: Any, ignored: Collection[str] = ()) -> list[Difference]:
    """Where an identity as a file has it is not the one that is wanted.

    A field that the file does not have counts as what it was before there was one (``ADDED_LATER``). One that is no longer known
    must have had the value that is now a constant (``GIVEN_UP``), or have been off.

    >>> [str(one) for one in differences({"config": {"eps": 0.1, "steps": 9}}, {"config": {"eps": 0.2, "steps": 9, "norm": False}})]
    ['config.eps is 0.1 there and 0.2 now']
    >>> differences({"config": {"preset": "rounded"}}, {"config": {"preset": "thresholds"}})  # it was renamed
    []
    """
    return [one for one in _differences(stored, plain(wanted), "") if one.field not in ignored]


def _differences(stored: Any, wanted: Any, field: str) -> Iterator[Difference]:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for name in dict.fromkeys((*wanted, *stored)):
            inner = f"{field}.{name}" if field else name
            before = stored.get(name, ADDED_LATER.get(name, _ABSENT))
            if name in wanted:
                yield from _differences(before, wanted[name], inner)
            elif not _was_in_effect(name, before):
                yield Difference(inner, before, _ABSENT)
    else:
        names = RENAMED.get(field.rpartition(".")[2], {})
        if not _equal(names.get(stored, stored) if isinstance(stored, str) else stored, wanted):
            yield Difference(field or "identity", stored, wanted)


def _was_in_effect(name: str, stored: Any) -> bool:
    """Whether a field that settings have no more says what they do without it; one that nobody knows must have been off."""
    if stored is None or name not in GIVEN_UP:
        return not stored
    return _equal(GIVEN_UP[name], stored)


def _equal(stored: Any, wanted: Any) -> bool:
    return stored is UNKNOWN or stored == wanted or (isinstance(wanted, Fingerprint) and stored in wanted.earlier())


def check_same(stored: Any, wanted: Any, what: str, advice: str, ignored: Collection[str] = ()) -> None:
    """Refuse what has another identity than the wanted one; ``what`` is the beginning of the sentence that says so."""
    found = differences(stored, wanted, ignored)
    if found:
        raise SortRLError(f"{what}: {named(found)}. {advice}")


def named(found: list[Difference]) -> str:
    """Differences as a part of a sentence."""
    shown = "; ".join(map(str, found[:_SHOWN]))
    return shown + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    text = repr(str(value)) if isinstance(value, str) else str(value)
    return text if len(text) <= 70 else f"{text[:40]}...{text[-20:]}"

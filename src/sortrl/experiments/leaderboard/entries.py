"""An entry of the leaderboard: one agent on one task, as its file has it, and the folder of all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.experiments.cells import file_name
from sortrl.experiments.leaderboard.protocols import PROTOCOLS, Protocol

FORMAT = "sortrl-leaderboard-1"
FOLDER = Path("results/leaderboard")
Kind = Literal["SortRL", "threshold", "memory", "baseline", "teacher", "published", "outside"]
KINDS: tuple[Kind, ...] = get_args(Kind)
AGAIN = "Measure the agent again (sortrl evaluate ... --protocol), or delete the file."


class Row(TypedDict):
    """Returns under one condition."""

    attack: str
    eps: float
    episodes: int
    mean: float
    sem: float
    iqm: float
    iqm_interval: list[float]
    changed_share: float
    returns: list[float]


class Spared(TypedDict):
    attack: str
    why: str


class Marked(TypedDict):
    name: str
    mark: str


class Entry(TypedDict):
    """One file of the leaderboard."""

    format: str
    protocol: Marked
    agent: str
    kind: Kind
    task: str
    source: str
    """Where the agent is from: a run, an entry of the zoo, or ``module:load``."""
    weights: str | None
    """Their fingerprint; None of an agent of which only the answers are known."""
    parameters: int | None
    clean: Row
    attacks: list[Row]
    worst: Row
    """Of the lowest mean return; clean play is among the candidates, as an adversary may do nothing."""
    spared: list[Spared]
    """Attacks of the protocol that were not run, and why."""
    missing: list[str]
    """Attacks of the protocol that are not computed yet."""
    certified: dict[str, float] | None
    """Share of the decisions of clean play that are proven, by eps; None of an agent without certificates."""
    seconds_per_decision: float
    """Of the processor, for single observations, one thread: the fastest of several rounds."""
    training_minutes: float | None
    """After its teacher, or from nothing if it had none; None where nobody wrote it down."""
    versions: dict[str, str]
    machine: dict[str, Any]


def path_of(folder: Path, protocol: str, task: str, agent: str) -> Path:
    """The file of an entry."""
    return folder / f"{file_name(protocol, task.rpartition('/')[2], agent)}.json"


def write_entry(folder: Path, entry: Entry) -> Path:
    """Into the folder, unless the name is taken by an agent of other weights."""
    path = path_of(folder, entry["protocol"]["name"], entry["task"], entry["agent"])
    check_free(path, entry["weights"], entry["source"])
    write_json(path, entry)
    return path


def check_free(path: Path, weights: str | None, source: str) -> None:
    """Refuse to replace the entry of another agent: of other weights or, where these are not known, from elsewhere."""
    if not path.exists():
        return
    there = read_object(path)
    if there.get("weights") != weights or (weights is None and there.get("source") != source):
        raise SortRLError(
            f"{path} is the entry of another agent (weights {str(there.get('weights'))[:12]} from {str(there.get('source'))[:80]}; now "
            f"{str(weights)[:12]} from {source[:80]}). "
            "Choose another --name, or delete that file."
        )


def read_entry(path: Path) -> Entry:
    """A file of the leaderboard, if it is whole; whether its protocol is today's is asked by :func:`refused`."""
    found: Any = read_object(path)
    if found.get("format") != FORMAT:
        raise SortRLError(
            f"{path}: format {str(found.get('format'))[:60]!r}, expected {FORMAT!r}. It is no entry of a leaderboard."
        )
    texts = ("agent", "task", "source")
    wrong = [name for name in texts if not isinstance(found.get(name), str)]
    wrong += [] if found.get("kind") in KINDS else ["kind"]
    marked = found.get("protocol")
    wrong += [] if isinstance(marked, dict) and {"name", "mark"} <= marked.keys() else ["protocol"]
    wrong += [name for name in ("attacks", "spared", "missing") if not isinstance(found.get(name), list)]
    rows = [
        found.get("clean"),
        found.get("worst"),
        *(found["attacks"] if isinstance(found.get("attacks"), list) else ()),
    ]
    wrong += [] if all(map(_is_row, rows)) else ["clean, worst or attacks"]
    shares = found.get("certified")
    whole = shares is None or (
        isinstance(shares, dict) and all(_number(share) and 0 <= share <= 1 for share in shares.values())
    )
    wrong += [] if whole else ["certified"]
    wrong += [] if _number(found.get("seconds_per_decision")) else ["seconds_per_decision"]
    minutes = found.get("training_minutes")
    wrong += [] if minutes is None or _number(minutes) else ["training_minutes"]
    if wrong:
        raise SortRLError(f"{path} lacks or garbles {', '.join(wrong)}. {AGAIN}")
    entry: Entry = found
    return entry


def _is_row(row: Any) -> bool:
    names = ("eps", "episodes", "mean", "sem", "iqm")
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("attack"), str)
        or not all(_number(row.get(name)) for name in names)
    ):
        return False
    interval = row.get("iqm_interval")
    return isinstance(interval, list) and len(interval) == 2 and all(map(_number, interval))


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def refused(entry: Entry, protocols: Mapping[str, Protocol] = PROTOCOLS) -> str | None:
    """Why an entry is not ranked: it was measured by another protocol than the one that has this name; None if it is."""
    name, mark = entry["protocol"]["name"], entry["protocol"]["mark"]
    protocol = protocols.get(name)
    if protocol is None:
        return f"its protocol {name} is none of {', '.join(protocols)}"
    if protocol.mark != mark:
        return f"its protocol {name} is of another version ({mark} there, {protocol.mark} now)"
    if entry["task"] not in {task.env_id for task in protocol.tasks}:
        return f"{name} has no task {entry['task']}"
    return None


@dataclass(frozen=True)
class Board:
    """The entries of a folder: those that are ranked, and those that are not, with the reason."""

    entries: tuple[Entry, ...]
    refused: tuple[tuple[Entry, str], ...] = ()

    def chosen(self, task: str | None = None, protocol: str | None = None, certified: bool = False) -> Board:
        """Only one task, or one protocol; only agents with certificates."""
        known = {"task": [entry["task"] for entry in self.entries], "protocol": list(PROTOCOLS)}
        for wanted, what in ((task, "task"), (protocol, "protocol")):
            if wanted is not None and wanted not in known[what]:
                raise SortRLError(
                    f"leaderboard: no {what} {wanted!r}; there is {', '.join(dict.fromkeys(known[what])) or 'no entry at all'}."
                )
        kept = [
            entry
            for entry in self.entries
            if task in (None, entry["task"])
            and protocol in (None, entry["protocol"]["name"])
            and (not certified or entry["certified"] is not None)
        ]
        return Board(tuple(kept), self.refused)


def read_board(folder: Path, protocols: Mapping[str, Protocol] = PROTOCOLS) -> Board:
    """All entries of a folder: task by task in the order of the protocols, and of a task the best under its worst attack first."""
    if not folder.is_dir():
        raise SortRLError(
            f"There is no leaderboard in {folder}. Name its --folder, or make an entry: "
            "sortrl evaluate zoo:cartpole --protocol classic-1."
        )
    ranked: list[Entry] = []
    others: list[tuple[Entry, str]] = []
    for path in sorted(folder.glob("*.json")):
        entry = read_entry(path)
        why = refused(entry, protocols)
        if why is None:
            ranked.append(entry)
        else:
            others.append((entry, why))
    tasks = [(protocol.name, task.env_id) for protocol in protocols.values() for task in protocol.tasks]
    ranked.sort(key=lambda entry: (tasks.index((entry["protocol"]["name"], entry["task"])), _rank(entry)))
    return Board(tuple(ranked), tuple(others))


def _rank(entry: Entry) -> tuple[bool, float, float, str]:
    """Who has not met every attack yet stands below those who have."""
    return bool(entry["missing"]), -entry["worst"]["mean"], -entry["clean"]["mean"], entry["agent"]


def certified_at(entry: Entry, protocols: Mapping[str, Protocol] = PROTOCOLS) -> float | None:
    """The share that is certified at the eps of the attacks."""
    task = protocols[entry["protocol"]["name"]].task(entry["task"])
    return None if entry["certified"] is None else entry["certified"].get(f"{task.eps:g}")

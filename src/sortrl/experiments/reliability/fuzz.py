"""Damaged and hostile files for every reader: each must load or give one clear :class:`SortRLError`, cheaply."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypedDict, cast

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object, write_json
from sortrl.evaluate import provenance
from sortrl.experiments.reliability.hostile import Trap
from sortrl.experiments.reliability.loaders import Loader, loaders
from sortrl.experiments.reliability.mutations import known

Main = Callable[[list[str]], None]
LONGEST_MESSAGE = 3000
COMMAND_SHARE = 0.005  # of the refused files are also read by the command line, which costs a hundred times as much
SPECIAL = "not a regular file"


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a file per case: a disk would be what is measured
BLOCK = 1000  # cases after which the tally is written down


class LoaderFound(TypedDict):
    """What became of the damaged files of one loader."""

    by_mutation: dict[str, dict[str, int]]
    through_the_command_line: int
    slowest_cpu_seconds: float
    largest_growth_of_peak_memory_mb: float
    escaped: list[str]


class LoaderTotal(LoaderFound):
    cases: int
    outcomes: dict[str, int]


class FuzzBlock(TypedDict):
    """A block of cases."""

    cases: int
    revision: str
    code_executed: bool
    cpu_seconds: float
    peak_memory_mb: list[float]
    """Before and after."""
    loaders: dict[str, LoaderFound]


class FuzzFound(TypedDict):
    """What a campaign has found so far."""

    cases: int
    wanted: int
    seed: int
    outcomes: dict[str, int]
    through_the_command_line: int
    code_executed: bool
    cpu_seconds: float
    peak_memory_mb: dict[str, float]
    slowest_cpu_seconds: float
    revisions: list[str]
    loaders: dict[str, LoaderTotal]


@dataclass
class Tally:
    """What became of the cases of one loader."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    commands: int = 0
    slowest_seconds: float = 0.0
    largest_growth_mb: float = 0.0
    escaped: list[str] = field(default_factory=list)

    def to_json(self) -> LoaderFound:
        return {
            "by_mutation": {name: dict(sorted(found.items())) for name, found in sorted(self.outcomes.items())},
            "through_the_command_line": self.commands,
            "slowest_cpu_seconds": round(self.slowest_seconds, 3),
            "largest_growth_of_peak_memory_mb": round(self.largest_growth_mb, 1),
            "escaped": self.escaped[:20],
        }


def fuzz(cases: int, seed: int, main: Main, work: Path | None = None) -> Iterator[FuzzFound]:
    """Damage ``cases`` files, turn by turn over the loaders; case i depends on the seed and i alone.

    ``main`` is the command line, to which some of the files are given as well. Yields what was found so far after every
    block of cases. Finished blocks are kept in ``work``, and the same call goes on after them.
    """
    blocks: list[FuzzBlock] = []
    revision = provenance.versions().get("revision", "unknown")  # asked now: what is committed later is not what runs
    with tempfile.TemporaryDirectory(prefix="sortrl-fuzz-", dir=MEMORY) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged numbers make numpy and torch warn; the outcome is what counts
        targets: list[Loader] = []
        for begin in range(0, cases, BLOCK):
            end = min(begin + BLOCK, cases)
            kept = None if work is None else work / f"fuzz-{seed}-{begin}-{end}.json"
            if kept is not None and kept.exists():
                blocks.append(cast(FuzzBlock, read_object(kept)))
                continue
            targets = targets or _intact(Path(scratch))
            blocks.append(_block(range(begin, end), seed, targets, main, revision))
            if kept is not None:
                write_json(kept, blocks[-1])
            yield _joined(blocks, end, cases, seed)
    yield _joined(blocks, cases, cases, seed)


def _intact(work: Path) -> list[Loader]:
    Trap.path = str(work / "executed")
    targets = loaders(work)
    for target in targets:
        assert target.intact
        target.read(target.file)  # an intact file must load, or the campaign proves nothing; also warms caches
    for kind in ("documents", "headers", "pickles", "states"):
        known(kind)  # now, or the memory that they take would be counted as that of a reader
    return targets


def _block(cases: range, seed: int, targets: list[Loader], main: Main, revision: str) -> FuzzBlock:
    intact = [target.intact for target in targets]
    tallies = {target.name: Tally() for target in targets}
    began, before = time.process_time(), _peak_mb()
    for case in cases:
        which = case % len(targets)
        _one(targets[which], intact[which], Random(f"{seed}/{case}"), tallies[targets[which].name], case, main)
    return {
        "cases": len(cases),
        "revision": revision,
        "code_executed": Path(Trap.path).exists(),
        "cpu_seconds": round(time.process_time() - began, 1),
        "peak_memory_mb": [round(before, 1), round(_peak_mb(), 1)],
        "loaders": {name: tally.to_json() for name, tally in tallies.items()},
    }


def _joined(blocks: list[FuzzBlock], cases: int, wanted: int, seed: int) -> FuzzFound:
    """The tallies of all blocks as one."""
    found: dict[str, LoaderTotal] = {}
    for name in blocks[0]["loaders"]:
        parts = [block["loaders"][name] for block in blocks]
        by_mutation: dict[str, Counter[str]] = {}
        for part in parts:
            for mutation, outcomes in part["by_mutation"].items():
                by_mutation.setdefault(mutation, Counter()).update(outcomes)
        total: Counter[str] = sum(by_mutation.values(), Counter())
        found[name] = {
            "cases": total.total(),
            "outcomes": dict(sorted(total.items())),
            "by_mutation": {mutation: dict(outcomes) for mutation, outcomes in sorted(by_mutation.items())},
            "through_the_command_line": sum(part["through_the_command_line"] for part in parts),
            "slowest_cpu_seconds": max(part["slowest_cpu_seconds"] for part in parts),
            "largest_growth_of_peak_memory_mb": max(part["largest_growth_of_peak_memory_mb"] for part in parts),
            "escaped": [line for part in parts for line in part["escaped"]][:20],
        }
    everything: Counter[str] = sum((Counter(one["outcomes"]) for one in found.values()), Counter())
    return {
        "cases": cases,
        "wanted": wanted,
        "seed": seed,
        "outcomes": dict(sorted(everything.items())),
        "through_the_command_line": sum(one["through_the_command_line"] for one in found.values()),
        "code_executed": any(block["code_executed"] for block in blocks),
        "cpu_seconds": round(sum(block["cpu_seconds"] for block in blocks), 1),
        "peak_memory_mb": {
            "before": min(block["peak_memory_mb"][0] for block in blocks),
            "after": max(block["peak_memory_mb"][1] for block in blocks),
        },
        "slowest_cpu_seconds": max(one["slowest_cpu_seconds"] for one in found.values()),
        "revisions": sorted({block["revision"] for block in blocks}),
        "loaders": found,
    }


def _one(target: Loader, intact: bytes, rng: Random, tally: Tally, case: int, main: Main) -> None:
    name = rng.choice([*target.mutations, SPECIAL] if rng.random() < 0.2 else list(target.mutations))
    place(target.file, None if name == SPECIAL else target.mutations[name](intact, rng), rng)
    memory, started = _peak_mb(), time.process_time()
    outcome, message = read(target)
    tally.slowest_seconds = max(tally.slowest_seconds, time.process_time() - started)
    tally.largest_growth_mb = max(tally.largest_growth_mb, _peak_mb() - memory)
    if outcome == "refused" and target.command and rng.random() < COMMAND_SHARE:
        tally.commands += 1
        outcome, message = command(target, main)
    tally.outcomes.setdefault(name, Counter())[outcome] += 1
    if outcome == "escaped":
        tally.escaped.append(f"case {case}, {name}: {message}")


def place(file: Path, content: bytes | None, rng: Random) -> None:
    """Put damaged bytes where the file was or, for None, something that is no file at all."""
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    elif file.is_symlink() or not file.is_file():
        file.unlink(missing_ok=True)
    if content is not None:
        file.write_bytes(content)
        return
    file.unlink(missing_ok=True)
    kind = rng.choice(("device", "pipe", "loop", "directory", "absent"))
    if kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "directory":
        file.mkdir()


def read(target: Loader) -> tuple[str, str]:
    """("loaded", ""), ("refused", message) or, for everything that must not happen, ("escaped", what)."""
    try:
        target.read(target.file)
    except SortRLError as error:
        return ("refused", str(error)) if 0 < len(str(error)) < LONGEST_MESSAGE else ("escaped", "message too long")
    # Whatever else comes out is what this campaign looks for.
    except Exception as error:
        return "escaped", f"{type(error).__name__}: {str(error)[:300]}"
    return "loaded", ""


def command(target: Loader, main: Main) -> tuple[str, str]:
    """The same file by the command line: exit code 1 and one message."""
    places = {"file": str(target.file), "folder": str(target.file.parent)}
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            main([argument.format(**places) for argument in target.command])
    except SystemExit as stop:
        clear = stop.code == 1 and error.getvalue().startswith("sortrl: ") and "Traceback" not in error.getvalue()
        return ("refused", "") if clear else ("escaped", f"exit {stop.code}: {error.getvalue()[:300]}")
    except Exception as escaped:
        return "escaped", f"command line: {type(escaped).__name__}: {escaped}"
    return "escaped", "the command line took what the reader refused"


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

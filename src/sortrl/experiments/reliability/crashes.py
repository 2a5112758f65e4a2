"""SIGKILL at random moments of a whole run: it must continue, show no half-written file, and end with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, TypedDict, cast

import torch

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_object, read_tensors, write_json
from sortrl.evaluate import provenance
from sortrl.experiments.reliability.tiny import tiny_run

# About how much processor time each stage takes. Kills are aimed at stages in turn, or the report, whose figures take half
# of the whole, would get most of them.
STAGES = {"teacher": 0.3, "collect": 0.15, "distill": 0.3, "evaluate": 0.15, "report": 1.2}


class Killed(TypedDict):
    """A run that was killed again and again, and then got through."""

    by_stage: dict[str, int]
    same_bits: bool
    problems: list[str]
    revision: str


class CrashesFound(TypedDict):
    """What the kills have found so far."""

    kills: int
    wanted: int
    seed: int
    by_stage: dict[str, int]
    runs_finished_by_the_same_command: int
    runs_that_ended_with_other_bits: int
    half_written_files: list[str]
    revisions: list[str]


def crashes(kills: int, seed: int, work: Path | None = None) -> Iterator[CrashesFound]:
    """Kill runs ``kills`` times in all, each run until it gets through, and compare them with an undisturbed one.

    Children are forked from this process, so that a start costs nothing; torch must not have used more than one thread
    before. Yields what was found so far after every run that got through. Those are kept in
    ``work``, and the same call goes on after them.
    """
    runs: list[Killed] = []
    revision = provenance.versions().get("revision", "unknown")  # asked now: what is committed later is not what runs
    with tempfile.TemporaryDirectory(prefix="sortrl-kill-") as scratch:
        undisturbed = Path(scratch) / "undisturbed"
        tiny_run(undisturbed)  # here, so that children find everything imported
        expected = fingerprint(undisturbed)
        found = _joined(runs, kills, seed)
        while found["kills"] < kills:
            kept = None if work is None else work / f"crashes-{seed}-{len(runs)}.json"
            if kept is not None and kept.exists():
                runs.append(cast(Killed, read_object(kept)))
            else:
                rng = Random(f"{seed}/{len(runs)}")
                runs.append(_one_run(Path(scratch) / "disturbed", rng, kills - found["kills"], expected, revision))
                if kept is not None:
                    write_json(kept, runs[-1])
            found = _joined(runs, kills, seed)
            yield found


def _joined(runs: list[Killed], kills: int, seed: int) -> CrashesFound:
    counts: Counter[str] = sum((Counter(run["by_stage"]) for run in runs), Counter())
    return {
        "kills": counts.total(),
        "wanted": kills,
        "seed": seed,
        "by_stage": {stage: counts[stage] for stage in STAGES},
        "runs_finished_by_the_same_command": len(runs),
        "runs_that_ended_with_other_bits": sum(not run["same_bits"] for run in runs),
        "half_written_files": [line for run in runs for line in run["problems"]],
        "revisions": sorted({run["revision"] for run in runs}),
    }


def _one_run(out: Path, rng: Random, most: int, expected: Any, revision: str) -> Killed:
    """Start a run again and again, killing it twice in every stage (``most`` times at most); then it must get through."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    aims = [(stage, rng.uniform(0.0, STAGES[stage])) for stage in STAGES for _ in range(2)]
    for aim in [*aims[:most], None]:
        code = _start(out, aim)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            raise SortRLError(f"crashes: a run that was killed before ended with code {code}, expected 0.")
        counts[stage_of(out)] += 1
        problems += half_written(out)
    problems += [f"left behind: {path.name}" for path in out.rglob("*.tmp")]
    same = fingerprint(out) == expected
    shutil.rmtree(out)
    return {"by_stage": dict(counts), "same_bits": same, "problems": problems, "revision": revision}


def _start(out: Path, aim: tuple[str, float] | None) -> int:
    """A run in a child, killed when it has spent so much processor time in a stage. Returns its exit code, negative for
    a signal.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            tiny_run(out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # not through the parent's exit handlers
    if aim is not None:
        stage, cpu_seconds = aim
        clock, reached = (~child << 3) | 2, None  # the processor-time clock of another process: clock_getcpuclockid(3)
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            used = time.clock_gettime(clock)
            if reached is None and list(STAGES).index(stage_of(out)) >= list(STAGES).index(stage):
                reached = used
            if reached is not None and used - reached >= cpu_seconds:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.001)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stage_of(out: Path) -> str:
    """What a killed run was at, told by the files that are there."""
    log = out / "teacher" / "training.json"
    if not log.exists() or not json.loads(log.read_text())["done"]:
        return "teacher"
    if not (out / "data.safetensors").exists():
        return "collect"
    if not (out / "policy.safetensors").exists():
        return "distill"
    return "report" if (out / "results.json").exists() else "evaluate"


def half_written(out: Path) -> list[str]:
    """Files that are there but not whole. TensorBoard's logs are left out: they grow, and readers expect that."""
    ends = {".html": b"</html>", ".png": b"IEND\xaeB`\x82", ".md": b"\n"}
    bad = []
    for path in out.rglob("*"):
        if not path.is_file() or path.suffix == ".tmp" or "tensorboard" in path.parts or path.name == ".lock":
            continue
        try:
            if path.suffix == ".json":
                read_json(path)
            elif path.suffix == ".safetensors":
                read_tensors(path)
            elif path.suffix not in ends:
                bad.append(f"{path.relative_to(out)}: of no known kind")
            elif not path.read_bytes().rstrip(b" \n" if path.suffix == ".html" else b"").endswith(ends[path.suffix]):
                bad.append(f"{path.name}: cut off")
        except SortRLError as error:
            bad.append(f"{path.name}: {error}")
    return bad


def fingerprint(out: Path) -> tuple[bytes, list[Any]]:
    """What must not depend on how often a run was killed: the weights, and every return."""
    rows = read_json(out / "evaluation.json") + read_json(out / "suite.json")["rows"]
    return (out / "policy.safetensors").read_bytes(), [(row["policy"], row["attack"], row["returns"]) for row in rows]

"""``predict_certified`` from many threads in many processes at once: same answers as alone, flat memory, no deadlock."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from sortrl.core.errors import SortRLError
from sortrl.nets import SortPolicy

Answers = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]
GRACE = 60.0  # seconds beyond the duration after which a worker counts as hung


class Asked(TypedDict):
    """What one process reports."""

    decisions: int
    different: int
    errors: list[str]
    memory_mb: list[float]


class SoakFound(TypedDict):
    """What a soak test has found."""

    seconds: float
    processes: int
    threads_per_process: int
    decisions: int
    different_answers: int
    errors: list[str]
    memory_mb: list[list[float]]
    largest_growth_mb: float


def soak(
    seconds: float, threads: int = 8, processes: int = 4, progress: Callable[[str], None] | None = None
) -> SoakFound:
    """Ask one policy from ``processes`` forked processes with ``threads`` threads each, for ``seconds``.

    The parent has used torch's threads before it forks: that is where deadlocks come from.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(2)
    policy = SortPolicy((8,), 4, width=64, depth=4).eval().requires_grad_(False)
    states = np.random.default_rng(0).normal(size=(1024, 8))  # enough for torch to share the work among its threads
    alone = _ask(policy, states)
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    workers = [
        context.Process(target=_work, args=(policy, states, alone, seconds, threads, answers)) for _ in range(processes)
    ]
    for worker in workers:
        worker.start()
    if progress is not None:
        progress(f"soak: {processes} processes with {threads} threads each for {seconds:g} s")
    reports: list[Asked] = []
    deadline = time.monotonic() + seconds + GRACE
    try:
        while len(reports) < processes:
            reports.append(answers.get(timeout=max(0.0, deadline - time.monotonic())))
    except queue.Empty:
        hung = processes - len(reports)
        raise SortRLError(f"soak: {hung} of {processes} processes gave no answer; expected none to hang.") from None
    finally:
        torch.set_num_threads(threads_before)
        for worker in workers:
            worker.join(1.0)
            worker.kill()
    return {
        "seconds": seconds,
        "processes": processes,
        "threads_per_process": threads,
        "decisions": sum(one["decisions"] for one in reports),
        "different_answers": sum(one["different"] for one in reports),
        "errors": [error for one in reports for error in one["errors"]],
        "memory_mb": [one["memory_mb"] for one in reports],
        "largest_growth_mb": round(max(one["memory_mb"][-1] - one["memory_mb"][0] for one in reports), 2),
    }


def _ask(policy: SortPolicy, states: npt.NDArray[Any]) -> Answers:
    """Every state by itself, and all of them as a batch (which uses torch's threads): both must agree."""
    single = [policy.predict_certified(state) for state in states[:32]]
    batch = policy.predict_certified(states)
    radii = np.concatenate([np.array([one.radius for one in single]), np.asarray(batch.radius)])
    actions = np.concatenate([np.array([one.action for one in single]), np.asarray(batch.action)])
    return actions, radii, np.asarray(batch.runner_up)


def _work(
    policy: SortPolicy, states: npt.NDArray[Any], alone: Answers, seconds: float, threads: int, answers: Any
) -> None:
    counts, different, errors = [0] * threads, [0] * threads, []
    warm = threading.Barrier(threads + 1)

    def ask(index: int) -> None:
        try:
            _ask(policy, states)
            warm.wait(GRACE)
            end = time.monotonic() + seconds
            while not counts[index] or time.monotonic() < end:
                found = _ask(policy, states)
                counts[index] += len(found[0])
                different[index] += not all(np.array_equal(a, b) for a, b in zip(found, alone, strict=True))
        except Exception as error:  # reported by the parent: a thread that dies must not look like one that agrees
            errors.append(f"{type(error).__name__}: {error}")
            warm.abort()

    running = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(threads)]
    for thread in running:
        thread.start()
    try:
        warm.wait(GRACE)
    except threading.BrokenBarrierError:
        errors.append("the threads did not all start")
    memory = [_memory_mb()]
    for _ in range(4):
        time.sleep(seconds / 4)
        memory.append(_memory_mb())
    for thread in running:
        thread.join(GRACE)
    errors += [f"a thread hangs (torch has {torch.get_num_threads()})" for t in running if t.is_alive()]
    answers.put({"decisions": sum(counts), "different": sum(different), "errors": errors, "memory_mb": memory})


def _memory_mb() -> float:
    """Memory that belongs to this process alone, so that pages shared with the parent do not hide growth."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    kilobytes = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
    return round(kilobytes / 1024, 1)

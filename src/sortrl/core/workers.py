"""Workers for pieces of work (:mod:`sortrl.core.pieces`): processes on this machine, or tasks on a Ray cluster.

Each worker has one thread, whatever the engine, so that a piece gives the same bits wherever it is computed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import multiprocessing
import os
import platform
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any
from uuid import uuid4

import cloudpickle
import torch

from sortrl.core.errors import MissingDependency, SortRLError
from sortrl.core.modules import imported
from sortrl.core.pieces import Ended, Session

MOST_WORKERS = 1024
QUEUED = 2  # pieces per core of a cluster: one to compute, one at hand
_SECONDS_TO_END = 5.0


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Processes:
    """Processes on this machine."""

    workers: int
    imports: str | None = None
    """A module that workers import first: the one that registers an environment."""
    shown = True

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise SortRLError(f"--workers is {self.workers}, expected 1..{MOST_WORKERS}.")

    @contextmanager
    def open(self, work: Callable[[Any], Any], most: int) -> Iterator[Session]:
        session = _ProcessSession(_packed(work, self.imports), min(self.workers, most))
        try:
            yield session
        finally:
            session.close()


class _Worker:
    """A process, and the piece that it computes."""

    def __init__(self, work: bytes) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child would inherit locks of torch's threads
        self.pipe, theirs = context.Pipe()
        self.piece: int | None = None
        self.process = context.Process(target=_serve, args=(theirs, work))
        self.process.start()
        theirs.close()  # so that the pipe ends with the worker

    def end(self) -> None:
        self.process.terminate()
        self.process.join(_SECONDS_TO_END)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _ProcessSession:
    def __init__(self, work: bytes, workers: int) -> None:
        self._work, self._most = work, workers
        self._workers: list[_Worker] = []

    def room(self) -> int:
        return self._most - sum(worker.piece is not None for worker in self._workers)

    def submit(self, number: int, what: Any) -> None:
        worker = next((one for one in self._workers if one.piece is None), None)
        if worker is None:
            worker = _Worker(self._work)
            self._workers.append(worker)
        worker.piece = number
        try:
            worker.pipe.send_bytes(cloudpickle.dumps(what))
        except OSError:  # it died idle: wait() will find its pipe closed, and the piece is tried again
            return

    def wait(self) -> Ended:
        while True:
            busy = {worker.pipe: worker for worker in self._workers if worker.piece is not None}
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                assert worker.piece is not None
                try:
                    answer = cloudpickle.loads(worker.pipe.recv_bytes())
                except (EOFError, OSError):
                    self._workers.remove(worker)
                    worker.process.join(_SECONDS_TO_END)
                    worker.end()
                    return Ended(worker.piece, lost=_how(worker.process.exitcode))
                if isinstance(answer, str):
                    print(answer, file=sys.stderr, flush=True)
                    continue
                number, worker.piece = worker.piece, None
                return _ended(number, answer)

    def close(self) -> None:
        while self._workers:
            self._workers.pop().end()


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _packed(work: Callable[[Any], Any], module: str | None) -> bytes:
    return cloudpickle.dumps((module, cloudpickle.dumps(work)))  # type: ignore[no-any-return]


def _unpacked(packed: bytes) -> Callable[[Any], Any]:
    module, work = cloudpickle.loads(packed)
    if module is not None:
        imported(module, "--import")
    return cloudpickle.loads(work)  # type: ignore[no-any-return]


def _serve(pipe: Connection, work_bytes: bytes) -> None:
    """The life of a worker process: arguments in, answers out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process is interrupted too, and ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr = _Lines(pipe)
    torch.set_num_threads(1)
    work = functools.cache(lambda: _unpacked(work_bytes))  # if that fails, it is the error of the first piece
    try:
        while True:
            pipe.send_bytes(_answer(work, pipe.recv_bytes()))
    except (EOFError, OSError):
        return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # however the first process ended, nothing stays behind


class _Lines:
    """What a worker prints, line by line to the first process: several processes at one terminal would spoil its bar."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._rest = pipe, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._pipe.send_bytes(cloudpickle.dumps(line))
        return len(text)

    def flush(self) -> None:
        return

    def isatty(self) -> bool:
        return False


def _answer(work: Callable[[], Callable[[Any], Any]], what: bytes) -> bytes:
    """The result of a piece, or its error with the traceback as text, which errors lose on their way."""
    try:
        return cloudpickle.dumps((work()(cloudpickle.loads(what)), None, ""))  # type: ignore[no-any-return]
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        try:
            sent: bytes = cloudpickle.dumps((None, error, text))
            cloudpickle.loads(sent)
        except Exception:  # an error that cannot be pickled, or not be read back
            sent = cloudpickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))
        return sent


def _ended(number: int, answer: tuple[Any, Exception | None, str]) -> Ended:
    result, error, text = answer
    if error is not None:
        error.__cause__ = RemoteTraceback(text)
    return Ended(number, result, error)


@dataclass(frozen=True)
class Ray:
    """Tasks on a Ray cluster: the one at ``address``; or the one running here; or else a local one, which ends with the work."""

    address: str | None = None
    imports: str | None = None
    """As of :class:`Processes`."""
    shown = True

    @contextmanager
    def open(self, work: Callable[[Any], Any], most: int) -> Iterator[Session]:
        ray = _ray()
        ours = not ray.is_initialized()
        if ours:
            try:
                ray.init(address=self.address, include_dashboard=False, logging_level="warning")
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = self.address or "here"
                raise SortRLError(
                    f"--ray: no cluster answers ({where}): {error}. Start one (ray start --head), or leave the address out for a local one."
                ) from error
        try:
            yield _RaySession(ray, _packed(work, self.imports))
        finally:
            if ours:
                ray.shutdown()


def _ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports its use to its makers unless told otherwise
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a local cluster: its workers are no less than --workers
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "--ray needs Ray: pip install 'sortrl[ray]', on every machine of the cluster."
        ) from error
    return ray


class _RaySession:
    def __init__(self, ray: ModuleType, work: bytes) -> None:
        self._ray = ray
        self._token = uuid4().hex
        self._work = ray.put(work)  # goes to each machine once
        self._task = ray.remote(num_cpus=1, max_retries=0)(_compute)
        self._running: dict[Any, int] = {}
        self._ended: deque[Any] = deque()

    def room(self) -> int:
        cpus = int(self._ray.cluster_resources().get("CPU", 0))  # machines come and go
        return QUEUED * max(1, cpus) - len(self._running)

    def submit(self, number: int, what: Any) -> None:
        # The list keeps Ray from fetching what a worker may have already.
        reference = self._task.remote(self._token, [self._work], cloudpickle.dumps(what), _versions())
        self._running[reference] = number

    def wait(self) -> Ended:
        (reference,), _ = self._ray.wait(list(self._running), num_returns=1)
        number = self._running.pop(reference)
        try:
            return _ended(number, cloudpickle.loads(self._ray.get(reference)))
        except self._ray.exceptions.RayTaskError as error:
            return Ended(number, error=error.cause if isinstance(error.cause, Exception) else error)
        except self._ray.exceptions.RayError as error:  # the worker or its machine is gone, or out of memory
            return Ended(number, lost=str(error).strip().partition("\n")[0])


_kept: dict[str, Callable[[Any], Any]] = {}  # of a Ray worker: the work of its present job


def _compute(token: str, work: list[Any], what: bytes, versions: dict[str, str]) -> bytes:
    """One piece, in a Ray worker."""
    if versions != _versions():
        differ = ", ".join(
            f"{name} {_versions()[name]} (here {versions[name]})"
            for name in versions
            if versions[name] != _versions()[name]
        )
        raise SortRLError(
            f"--ray: {platform.node()} has {differ}. The same bits need the same versions on every machine."
        )
    torch.set_num_threads(1)
    return _answer(lambda: _of_job(token, work), what)


def _of_job(token: str, work: list[Any]) -> Callable[[Any], Any]:
    if token not in _kept:
        _kept.clear()
        _kept[token] = _unpacked(_ray().get(work[0]))
    return _kept[token]


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {
        name: importlib.metadata.version(name) for name in ("sortrl", "torch", "numpy", "gymnasium")
    }

"""Many independent pieces of work: the same pieces, the same results and files, whoever computes them and in whatever order.

A piece is a name and an argument; ``work`` is what all pieces have in common, and is handed to each worker once. Results come
back to the caller, who writes them: a worker that is lost takes nothing with it but the piece that it was computing, and that
piece is tried again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from sortrl.core.errors import SortRLError
from sortrl.core.progress import stage

ATTEMPTS = 3

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Piece(Generic[P]):
    """One piece of work, for ``work(what)``; it starts when the pieces named in ``after`` are done (or are none of the pieces)."""

    name: str
    what: P
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How the piece of this number ended: with a result or an error of its own, or it was ``lost`` with its worker."""

    number: int
    result: Any = None
    error: Exception | None = None
    lost: str | None = None


class Session(Protocol):
    """Workers that are ready."""

    def room(self) -> int:
        """How many more pieces may be submitted now."""
        ...

    def submit(self, number: int, what: Any) -> None: ...

    def wait(self) -> Ended:
        """The next piece to end, of those that were submitted."""
        ...


class Engine(Protocol):
    """Where pieces are computed."""

    shown: bool
    """Whether one bar shows the progress of all workers. Pieces in this process show their own."""

    def open(self, work: Callable[[Any], Any], most: int) -> AbstractContextManager[Session]:
        """Start workers for at most so many pieces at a time; they end with the block."""
        ...


@dataclass(frozen=True)
class Here:
    """This process, one piece after the other. Workers elsewhere have one thread each; with ``threads=1`` so has this one."""

    threads: int | None = None
    shown = False

    @contextmanager
    def open(self, work: Callable[[Any], Any], most: int) -> Iterator[Session]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads or before)
        try:
            yield _HereSession(work)
        finally:
            torch.set_num_threads(before)


class _HereSession:
    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._next: tuple[int, Any] | None = None

    def room(self) -> int:
        return 1 if self._next is None else 0

    def submit(self, number: int, what: Any) -> None:
        self._next = (number, what)

    def wait(self) -> Ended:
        assert self._next is not None
        (number, what), self._next = self._next, None
        return Ended(number, self._work(what))


def run_pieces(
    work: Callable[[P], R],
    pieces: Sequence[Piece[P]],
    done: Callable[[Piece[P], R], None],
    engine: Engine | None = None,
    title: str = "Pieces",
) -> None:
    """Compute all pieces; ``done`` receives each with its result, in this process, as they are finished.

    A piece whose worker is lost is computed again, up to ``ATTEMPTS`` times in all. After the first error no further piece is
    begun; those under way are finished and handed to ``done``, and then the error is raised.

        >>> found = {}
        >>> run_pieces(lambda n: n * n, [Piece("two", 2), Piece("three", 3)], lambda piece, n: found.update({piece.name: n}))
        >>> found
        {'two': 4, 'three': 9}
    """
    if not pieces:
        return
    engine = engine or Here()
    left = _Order(pieces)
    lost: Counter[int] = Counter()
    failed: Exception | None = None
    finished = 0
    with stage(title, quiet=not engine.shown) as report, engine.open(work, len(pieces)) as session:
        running: set[int] = set()
        while left.ready or running:
            while failed is None and left.ready and session.room() > 0:
                number = heapq.heappop(left.ready)
                running.add(number)
                session.submit(number, pieces[number].what)
            report({"step": finished, "total": len(pieces), "running": len(running), "lost": lost.total()})
            if not running:
                break
            ended = session.wait()
            running.remove(ended.number)
            piece = pieces[ended.number]
            if ended.lost is not None:
                lost[ended.number] += 1
                if lost[ended.number] < ATTEMPTS:
                    heapq.heappush(left.ready, ended.number)
                elif failed is None:
                    failed = SortRLError(
                        f"{piece.name}: its worker was lost {ATTEMPTS} times, the last time: {ended.lost}. If memory is short, use "
                        "fewer workers. What is finished is kept; the same command goes on from there."
                    )
            elif ended.error is not None:
                failed = failed or ended.error
            else:
                done(piece, ended.result)
                left.finish(piece.name)
                finished += 1
        report({"step": finished, "total": len(pieces)})
    if failed is not None:
        raise failed
    if finished < len(pieces):
        raise SortRLError(
            f"{title}: {len(pieces) - finished} pieces wait for each other, and none of them can be first."
        )


class _Order:
    """Which pieces may start: in the order given, but none before those that it comes after."""

    def __init__(self, pieces: Sequence[Piece[Any]]) -> None:
        names = {piece.name for piece in pieces}
        if len(names) < len(pieces):
            twice = next(name for name, times in Counter(piece.name for piece in pieces).items() if times > 1)
            raise SortRLError(f"Two pieces of work have the name {twice!r}; results are kept by name.")
        self._blocked = {number: {*piece.after} & names for number, piece in enumerate(pieces)}
        self._followers: dict[str, list[int]] = {}
        for number, names_before in self._blocked.items():
            for name in names_before:
                self._followers.setdefault(name, []).append(number)
        self.ready = [
            number for number, names_before in self._blocked.items() if not names_before
        ]  # a heap: it is sorted

    def finish(self, name: str) -> None:
        for number in self._followers.get(name, ()):
            self._blocked[number].remove(name)
            if not self._blocked[number]:
                heapq.heappush(self.ready, number)

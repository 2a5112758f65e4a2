"""Tables made cell by cell: every cell is kept in a file of its own, and the table is written anew after each of them.

A stopped reproduction therefore continues where it was, and what is there so far can be read at any time. Cells that stand in
the table already are not computed again either, even if another machine computed them. Each cell has the fingerprints of
its agents' weights, so that a table never mixes two students of one game.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, cast, final

from torch import nn

from sortrl.certify import certified_shares, proven_mean
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_object, write_json
from sortrl.core.identity import fingerprint
from sortrl.core.pieces import Engine, Piece, run_pieces
from sortrl.core.records import EvalResult, EvalRow
from sortrl.evaluate import provenance


class CellFields(TypedDict, total=False):
    """The fields of a cell; which of them there are depends on the table."""

    game: str
    agent: str
    attack: str
    level: int
    levels: str
    share: float
    eps: float
    seed: int


class _Measured(EvalRow):
    cell: CellFields


@final
class Found(_Measured, total=False):
    """A cell as its file has it: the cell, what was measured, by which agents (name and fingerprint) and where."""

    certified: dict[str, float]
    proven: dict[str, float]
    agents: Mapping[str, str]
    computed: dict[str, str]
    states: int
    tries: int
    memories: int
    worst_attack: str
    acr: dict[str, float]
    decision_seconds: float
    start: str
    decisions: int
    minutes: float
    method: str
    config: dict[str, Any]


@final
class WorstFound(TypedDict):
    """Of one game, agent and level the attack under which the mean return is lowest."""

    game: str
    agent: str
    level: int
    attack: str
    mean: float
    sem: float
    episodes: int
    attacks_tried: int


class Quoted(TypedDict, total=False):
    """A row that a paper prints: (mean, SEM) per level, None where it has no figure."""

    game: str
    agent: str
    levels: Any
    figures: list[list[Any] | None]
    acr_percent: float | None


class Facts(TypedDict, total=False):
    """Facts that hold for all cells of a table; which keys there are depends on the table."""

    protocol: str
    attack: str
    attacks: list[str]
    levels: list[int]
    episodes: int
    starts: int | None
    eps: dict[str, float]
    experts: str
    quoted: list[Quoted]
    worst: list[WorstFound]


class TableDocument(Facts):
    """A table as its file has it."""

    schema: int
    table: str
    scale: str
    missing: list[str]
    versions: dict[str, str]
    machine: dict[str, Any]
    cells: list[Found]


class Cell(Protocol):
    """One agent under one condition."""

    @property
    def game(self) -> str: ...
    @property
    def agent(self) -> str: ...
    @property
    def name(self) -> str:
        """Unique in the table; also the name of its file."""


C = TypeVar("C", bound=Cell)
A = TypeVar("A")


@dataclass(frozen=True)
class CellTable(Generic[C]):
    """A table under way: ``out/<name>.json``, from the cells kept in ``folder``."""

    name: str
    scale: str
    cells: Collection[C]
    folder: Path
    out: Path
    facts: Facts
    """Facts of all cells: protocol, attacks, figures quoted."""
    derived: Callable[[list[Found]], Facts] | None = None
    """Computed from the cells so far, for example the worst attack."""

    @property
    def path(self) -> Path:
        return self.out / f"{self.name}.json"

    def check_wanted(self, game: str | None, agent: str | None) -> None:
        """Refuse a game or an agent that the table does not have."""
        for wanted, kind in ((game, "game"), (agent, "agent")):
            known = list(dict.fromkeys(getattr(cell, kind) for cell in self.cells))
            if wanted is not None and wanted not in known:
                raise SortRLError(f"{self.name} has no {kind} {wanted!r}; choose one of {', '.join(known)}.")

    def kept_in(self, cell: C) -> Path:
        return self.folder / f"{cell.name}.json"

    def found(self) -> list[Found]:
        """The cells that are there: the wanted ones in their order, then those of other games or agents."""
        earlier = self._earlier()
        wanted = []
        for cell in self.cells:
            fields = asdict(cell)  # type: ignore[call-overload]
            same = [entry for entry in earlier if entry["cell"] == fields]
            if self.kept_in(cell).exists():
                wanted.append(read_json(self.kept_in(cell)))
            elif same:
                wanted.append(same[0])
            earlier = [entry for entry in earlier if entry["cell"] != fields]
        return wanted + earlier

    def _earlier(self) -> list[Found]:
        """The cells of the table as it was last written."""
        if not self.path.exists():
            return []
        table = read_object(self.path)
        if table.get("scale") != self.scale:
            raise SortRLError(
                f"{self.path} is a table of scale {table.get('scale')}; one of scale {self.scale} needs another --out."
            )
        cells = table.get("cells")
        if not isinstance(cells, list) or not all(
            isinstance(c, dict) and isinstance(c.get("cell"), dict) for c in cells
        ):
            raise SortRLError(f"{self.path} is not a table of cells. Delete it, or name another --out.")
        return cells

    def write(self) -> TableDocument:
        """The table as far as it is computed. Before the first cell there is none to write."""
        found = self.found()
        there = [entry["cell"] for entry in found]
        derived: Facts = self.derived(found) if self.derived else {}
        results: TableDocument = {
            "schema": 1,
            "table": self.name,
            "scale": self.scale,
            **self.facts,
            "missing": [cell.name for cell in self.cells if asdict(cell) not in there],  # type: ignore[call-overload]
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            **derived,
            "cells": found,
        }
        if found:
            write_json(self.path, results)
        return results

    def fill(
        self,
        agent_of: Callable[[C], A],
        compute: Callable[[C, A], Found],
        made_of: Callable[[C, A], dict[str, nn.Module]],
        progress: Callable[[str], None],
        game: str | None = None,
        agent: str | None = None,
        *,
        start_of: Callable[[C], object] | None = None,
        engine: Engine | None = None,
    ) -> TableDocument:
        """Compute the cells that are missing, of one game or agent or of all, and write the table after each.

        ``made_of`` gives the networks that a cell goes back to, by the names of their agents; ``start_of`` makes what all agents
        of a game start from. Each agent is made, or found, before its cells, and its fingerprints are compared with those of
        the table; so no engine computes a cell that the table would refuse.
        """
        self.check_wanted(game, agent)
        results = self.write()
        wanted = [cell for cell in self.cells if game in (None, cell.game) and agent in (None, cell.agent)]
        missing = [cell for cell in wanted if cell.name in results["missing"]]
        made: dict[str, dict[str, str]] = {}

        def done(piece: Piece[tuple[Step, C]], answer: Any) -> None:
            step, cell = piece.what
            if step == "start":
                return
            agents = answer if step == "agent" else answer["agents"]
            if made.setdefault(_agent_name(cell), agents) != agents:
                raise SortRLError(
                    f"{self.name}: two workers made different agents ({_agent_name(cell)}). Workers must see the same --work and "
                    "--teachers, on a file system that they share."
                )
            if step == "agent":
                self._check_same(cell.game, agents)
                return
            write_json(self.kept_in(cell), answer)
            written = self.write()
            counted = f"{len(written['cells'])} cells, {len(written['missing'])} missing"
            progress(f"{self.name}: {cell.name}: {figure(answer['mean'])}, {counted}")

        work = _CellWork(agent_of, compute, made_of, start_of)
        run_pieces(work, list(_pieces(missing, start_of is not None)), done, engine, self.name)
        return self.write()

    def _check_same(self, game: str, agents: Mapping[str, str]) -> None:
        """Refuse another agent than the one of the same name that cells of this game go back to."""
        for entry in self.found():
            known = entry.get("agents", {entry["cell"]["agent"]: "unknown"})
            for name in agents.keys() & known.keys():
                if entry["cell"]["game"] == game and agents[name] != known[name]:
                    raise SortRLError(
                        f"{self.path} or {self.folder} holds cells of another {name} of {game}, and a table must not mix them. "
                        "Give that agent, name another --out and --work, or delete those cells."
                    )


Step = Literal["start", "agent", "cell"]


def _agent_name(cell: Cell) -> str:
    seed = getattr(cell, "seed", None)
    return f"{cell.agent} of {cell.game}" + ("" if seed is None else f", seed {seed}")


def _pieces(missing: Sequence[C], starts: bool) -> Iterator[Piece[tuple[Step, C]]]:
    """Of every game what its agents start from, then agent by agent: the agent, and then its cells."""
    begun: set[str] = set()
    for cell in missing:
        start, agent = f"start of {cell.game}", _agent_name(cell)
        if starts and start not in begun:
            yield Piece(start, ("start", cell))
        if agent not in begun:
            yield Piece(agent, ("agent", cell), after=(start,))
        begun |= {start, agent}
        yield Piece(cell.name, ("cell", cell), after=(agent,))


class _CellWork(Generic[C, A]):
    """What a worker does. It keeps the agent that it had last: one in memory at a time."""

    def __init__(
        self,
        agent_of: Callable[[C], A],
        compute: Callable[[C, A], Found],
        made_of: Callable[[C, A], dict[str, nn.Module]],
        start_of: Callable[[C], object] | None,
    ) -> None:
        self._agent_of, self._compute, self._made_of, self._start_of = agent_of, compute, made_of, start_of
        self._held: tuple[str, A, dict[str, str]] | None = None

    def __call__(self, what: tuple[Step, C]) -> Found | dict[str, str] | None:
        step, cell = what
        if step == "start":
            assert self._start_of is not None
            self._start_of(cell)
            return None
        name = _agent_name(cell)
        if self._held is None or self._held[0] != name:
            self._held = None  # before the next one is made
            player = self._agent_of(cell)
            agents = {known: str(fingerprint(network)) for known, network in self._made_of(cell, player).items()}
            self._held = (name, player, agents)
        _, player, agents = self._held
        return agents if step == "agent" else {**self._compute(cell, player), "agents": agents, "computed": _where()}


def _where() -> dict[str, str]:
    versions = provenance.versions()
    return {"cpu": provenance.machine()["cpu"], "torch": versions["torch"], "revision": versions.get("revision", "")}


def measured(cell: Any, result: EvalResult, certified_at: Sequence[int], least_return: float | None = None) -> Found:
    """A cell (a dataclass) with its result and, of clean play with certificates, the shares certified at some 255ths.

    With the least return that an episode can have, also what the mean is proven to be at least.
    """
    found = cast(Found, {"cell": asdict(cell), **result.to_json()})
    if result.radii is not None and result.eps_unit == 0:
        sizes = [k / 255 for k in certified_at]
        found["certified"] = dict(zip(map(str, certified_at), certified_shares(result, sizes), strict=True))
        if least_return is not None:
            proven = [proven_mean(result, size, least_return) for size in sizes]
            found["proven"] = dict(zip(map(str, certified_at), proven, strict=True))
    return found


def file_name(*parts: object) -> str:
    """Parts joined to a name that every file system takes.

    >>> file_name("Jumper", "PPO, sampled", "none", 0)
    'Jumper-PPO--sampled-none-0'
    """
    return "-".join("".join(letter if letter.isalnum() else "-" for letter in str(part)) for part in parts)


def figure(mean: float, sem: float | None = None) -> str:
    """A mean and its standard error as a table prints them: about four figures of the mean.

    >>> figure(7.5, 0.301), figure(1325.5, 5.7), figure(43390.0, 973.0), figure(32.93)
    ('7.50 ± 0.30', '1325.5 ± 5.7', '43390 ± 973', '32.93')
    """
    digits = 2 if abs(mean) < 100 else 1 if abs(mean) < 10_000 else 0
    return f"{mean:.{digits}f}" + ("" if sem is None else f" ± {sem:.{digits}f}")


def cell_text(found: Found | WorstFound | None, usual_episodes: int) -> str:
    """A cell in Markdown; empty if it is not computed yet, and with its episodes where they are fewer than usual."""
    if found is None:
        return ""
    episodes = "" if found["episodes"] >= usual_episodes else f" ({found['episodes']} episodes)"
    return figure(found["mean"], found["sem"]) + episodes

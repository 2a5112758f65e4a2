"""Tables made cell by cell: every cell is kept in a file of its own, and the table is written anew after each of them.

A stopped reproduction therefore continues where it was, and what is there so far can be read at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from sortrl import provenance
from sortrl.certify import certified_shares, proven_mean
from sortrl.files import read_json, write_json
from sortrl.records import EvalResult

Found = dict[str, Any]
"""A cell as its file has it: the fields of the cell under "cell", then what was measured."""


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
    facts: Mapping[str, Any]
    """What is to be said of all cells: protocol, attacks, figures quoted."""
    derived: Callable[[list[Found]], Mapping[str, Any]] | None = None
    """What follows from the cells that are there."""

    def path(self, cell: C) -> Path:
        return self.folder / f"{cell.name}.json"

    def write(self) -> dict[str, Any]:
        """The table as far as it is computed. Before the first cell there is none to write."""
        found = [read_json(self.path(cell)) for cell in self.cells if self.path(cell).exists()]
        results = {
            "schema": 1,
            "table": self.name,
            "scale": self.scale,
            **self.facts,
            "missing": [cell.name for cell in self.cells if not self.path(cell).exists()],
            "versions": provenance.versions(),
            "machine": provenance.machine(),
            **(self.derived(found) if self.derived else {}),
            "cells": found,
        }
        if found:
            write_json(self.out / f"{self.name}.json", results)
        return results

    def fill(
        self,
        agent_of: Callable[[C], A],
        compute: Callable[[C, A], Found],
        progress: Callable[[str], None],
        only: Callable[[C], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Compute the cells that are missing (``only`` says which are wanted now), and write the table after each."""
        results = self.write()
        key, agent = None, None
        for cell in filter(only, self.cells):
            if self.path(cell).exists():
                continue
            if agent is None or key != (cell.game, cell.agent):
                key, agent = (cell.game, cell.agent), agent_of(cell)  # one in memory at a time
            found = compute(cell, agent)
            write_json(self.path(cell), found)
            results = self.write()
            done = f"{len(results['cells'])} of {len(self.cells)} cells"
            progress(f"{self.name}: {cell.name}: {figure(found['mean'])}, {done}")
        return results


def measured(cell: Any, result: EvalResult, certified_at: Sequence[int], least_return: float | None = None) -> Found:
    """A cell (a dataclass) with its result and, of clean play with certificates, the shares certified at some 255ths.

    With the least return that an episode can have, also what the mean is proven to be at least.
    """
    found: Found = {"cell": asdict(cell), **result.to_json()}
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


def cell_text(found: Found | None, usual_episodes: int) -> str:
    """A cell in Markdown; empty if it is not computed yet, and with its episodes where they are fewer than usual."""
    if found is None:
        return ""
    episodes = "" if found["episodes"] >= usual_episodes else f" ({found['episodes']} episodes)"
    return figure(found["mean"], found["sem"]) + episodes

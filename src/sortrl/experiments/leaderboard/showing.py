"""The leaderboard for people: in the terminal, and as a table of the site that can be sorted and filtered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import groupby

from sortrl.experiments.cells import figure
from sortrl.experiments.leaderboard.entries import FOLDER, Board, Entry, Row, certified_at, path_of
from sortrl.experiments.leaderboard.protocols import CLEAN, PROTOCOLS, Task

BY = "worst by"
HEADINGS = (
    "agent",
    "kind",
    "clean, IQM [95 %]",
    "worst attack, IQM [95 %]",
    BY,
    "certified",
    "ms per decision",
    "training minutes",
)


def text(board: Board) -> str:
    """Task by task, the best under its worst attack first."""
    lines: list[str] = []
    for (protocol, task), entries in groupby(board.entries, lambda entry: (entry["protocol"]["name"], entry["task"])):
        rows = [_cells(entry) for entry in entries]
        shown = [HEADINGS, *rows]
        widths = [max(len(row[column]) for row in shown) for column in range(len(HEADINGS))]
        lines += [""] if lines else []
        lines += [f"{task}, {protocol}: attacked and certified at eps {_eps(PROTOCOLS[protocol].task(task).eps)}"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
        ]
    if not board.entries:
        lines.append("No entry fits.")
    lines += [f"not ranked: {entry['agent']} on {entry['task']}, for {why}" for entry, why in board.refused]
    return "\n".join(lines)


def _eps(eps: float) -> str:
    """Of pixels in 255ths.

    >>> _eps(0.1), _eps(5 / 255)
    ('0.1', '5/255')
    """
    return f"{255 * eps:.0f}/255" if eps < 0.15 and math.isclose(255 * eps, round(255 * eps)) else f"{eps:g}"


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        entry["agent"],
        entry["kind"],
        _interval(entry["clean"]),
        _interval(entry["worst"]),
        _worst(entry),
        _share(entry),
        f"{1000 * entry['seconds_per_decision']:.3g}",
        "" if entry["training_minutes"] is None else f"{entry['training_minutes']:.3g}",
    )


def _interval(row: Row) -> str:
    low, high = row["iqm_interval"]
    return f"{figure(row['iqm'])} [{figure(low)}, {figure(high)}]"


def _worst(entry: Entry) -> str:
    """The attack; and, where some are missing or could not be run, of how many."""
    name = "no attack" if entry["worst"]["attack"] == "none" else entry["worst"]["attack"]
    tried, wanted = len(entry["attacks"]), len(entry["attacks"]) + len(entry["missing"]) + len(entry["spared"])
    return name if tried == wanted else f"{name} ({tried} of {wanted})"


def _share(entry: Entry) -> str:
    """Never rounded up."""
    share = certified_at(entry)
    return "no" if share is None else f"{math.floor(1000 * share) / 10:g} %"


def page(board: Board) -> str:
    """HTML: the filters, which work where scripts do, and the table, which is whole without them."""
    tasks = list(dict.fromkeys((entry["protocol"]["name"], entry["task"]) for entry in board.entries))
    options = "".join(
        f'<option value="{escape(task)}">{escape(_short(task))} ({protocol})</option>' for protocol, task in tasks
    )
    head = "".join(
        f'<th scope="col"><button type="button">{escape(name)}</button></th>'
        for name in ("task", *HEADINGS)
        if name != BY  # which stands below the returns
    )
    lines = [
        '<div class="board" id="board">',
        '<p class="board-filters" hidden>',
        f'<label>task <select name="task"><option value="">all</option>{options}</select></label>',
        '<label><input type="checkbox" name="certified"> certified only</label>',
        '<label>agent <input type="search" name="agent" size="12"></label>',
        '<output name="count"></output>',
        "</p>",
        '<div class="board-scroll">',
        '<table class="board-table">',
        f"<thead><tr>{head}</tr></thead>",
        "<tbody>",
        *map(_line, board.entries),
        "</tbody>",
        "</table>",
        "</div>",
        "</div>",
    ]
    if board.refused:
        told = "; ".join(
            f"{escape(entry['agent'])} on {escape(entry['task'])}, for {escape(why)}" for entry, why in board.refused
        )
        lines += ["", f"Not ranked: {told}."]
    return "\n".join(lines)


def _line(entry: Entry) -> str:
    """A row. What it is sorted by stands beside what is shown."""
    clean, worst, share, minutes = entry["clean"], entry["worst"], certified_at(entry), entry["training_minutes"]
    agent, kind, clean_text, worst_text, by, shown, milliseconds, trained = map(escape, _cells(entry))
    where = escape(f"{entry['protocol']['name']}, eps {_eps(_task(entry).eps)}")
    file = path_of(FOLDER, entry["protocol"]["name"], entry["task"], entry["agent"]).as_posix()
    mark = "answers only" if entry["weights"] is None else escape(entry["weights"][:8])
    cells: Sequence[tuple[str, object]] = (
        (f"{escape(_short(entry['task']))}<small>{where}</small>", _order(entry)),
        (f'{agent}<small><a href="../{file}">{mark}</a></small>', entry["agent"].lower()),
        (kind, kind),
        (f"{clean_text}{_mean(clean)}", clean["iqm"]),
        (f"{worst_text}{_mean(worst)}<small>by {by}</small>", worst["iqm"]),
        (shown, -1 if share is None else share),
        (milliseconds, entry["seconds_per_decision"]),
        (trained, -1 if minutes is None else minutes),
    )
    row = "".join(f'<td data-value="{escape(str(value))}">{content}</td>' for content, value in cells)
    certified = "no" if share is None else "yes"
    return f'<tr data-task="{escape(entry["task"])}" data-certified="{certified}">{row}</tr>'


def _task(entry: Entry) -> Task:
    return PROTOCOLS[entry["protocol"]["name"]].task(entry["task"])


def _order(entry: Entry) -> int:
    """The place of a task in the protocols."""
    tasks = [(protocol.name, task.env_id) for protocol in PROTOCOLS.values() for task in protocol.tasks]
    return tasks.index((entry["protocol"]["name"], entry["task"]))


def _mean(row: Row) -> str:
    return f"<small>mean {figure(row['mean'], row['sem'])}, {row['episodes']} episodes</small>"


def _short(task: str) -> str:
    """
    >>> _short("sortrl/Pong84-v0"), _short("CartPole-v1")
    ('Pong84', 'CartPole')
    """
    return task.rpartition("/")[2].rpartition("-v")[0]


def protocol_lines() -> list[str]:
    """What the protocols fix, in Markdown."""
    lines = [
        "| protocol | hash | tasks (ε of the attacks) | conditions (episodes) | first seed |",
        "|---|---|---|---|---|",
    ]
    for protocol in PROTOCOLS.values():
        tasks = ", ".join(f"{_short(task.env_id)} ({_eps(task.eps)})" for task in protocol.tasks)
        trials = ", ".join(
            f"{'clean' if one.attack == CLEAN else one.attack} ({one.episodes})" for one in protocol.trials
        )
        lines.append(f"| `{protocol.name}` | `{protocol.mark}` | {tasks} | {trials} | {protocol.seed} |")
    return lines

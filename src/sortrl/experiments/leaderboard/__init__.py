"""The leaderboard: agents of any kind, each measured by one frozen protocol, one file per agent and task."""

from __future__ import annotations

from sortrl.experiments.leaderboard.entries import FOLDER, KINDS, Board, Entry, Kind, read_board
from sortrl.experiments.leaderboard.measuring import Entrant, Player, enter
from sortrl.experiments.leaderboard.protocols import PROTOCOLS, Protocol, Task, Trial, protocol_of
from sortrl.experiments.leaderboard.showing import page, protocol_lines, text
from sortrl.experiments.leaderboard.sources import of_loader, of_run, same_agent

__all__ = [
    "FOLDER",
    "KINDS",
    "PROTOCOLS",
    "Board",
    "Entrant",
    "Entry",
    "Kind",
    "Player",
    "Protocol",
    "Task",
    "Trial",
    "enter",
    "of_loader",
    "of_run",
    "page",
    "protocol_lines",
    "protocol_of",
    "read_board",
    "same_agent",
    "text",
]

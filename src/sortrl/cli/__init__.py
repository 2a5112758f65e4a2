"""The command line: each command is a thin function over the package; its docstring is its help."""

from __future__ import annotations

import importlib.metadata
import os
import select
import sys

# Before torch is imported: waiting threads that spin slow each other down on few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import tyro

from sortrl.cli.common import led
from sortrl.cli.interrupts import insistent_interrupts
from sortrl.cli.judging import attack, certify, evaluate, verify
from sortrl.cli.making import baseline, reproduce, robustify, teach, zoo
from sortrl.cli.showing import bench, export, info, leaderboard, report, tasks, watch
from sortrl.core.errors import SortRLError

HELP = "Turn a trained RL agent into one whose every decision carries a robustness certificate. (--version prints the version.)"
CUT_OFF = 141  # as the shell says of a program that its reader ended
COMMANDS = {
    f.__name__: f
    for f in (
        robustify,
        evaluate,
        attack,
        certify,
        verify,
        watch,
        export,
        report,
        reproduce,
        teach,
        baseline,
        leaderboard,
        tasks,
        zoo,
        bench,
        info,
    )
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``sortrl``. Exit codes: 0 done, 1 a mistake that the message explains, 2 usage, 3 the student lost the
    teacher's skill, 130 stopped, 141 nobody reads the output any more."""
    try:
        try:
            with insistent_interrupts(), led() as leading:
                if leading:
                    _run(arguments)
        finally:
            print(end="", flush=True)  # what is still to be written fails here, where it is answered
    except BrokenPipeError:
        if not _output_is_cut_off():
            raise
        sys.exit(CUT_OFF)
    except SortRLError as error:
        print(f"sortrl: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("sortrl: stopped. Start the same command again to continue.", file=sys.stderr)
        sys.exit(130)
    except MemoryError:
        print("sortrl: out of memory. Lower states, batch, width or depth, or free some memory.", file=sys.stderr)
        sys.exit(1)


def _run(arguments: list[str] | None) -> None:
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        print(f"sortrl {importlib.metadata.version('sortrl')}")
        return
    tyro.extras.subcommand_cli_from_dict(COMMANDS, args=arguments, prog="sortrl", description=HELP)


def _output_is_cut_off() -> bool:
    """Whether the pipe that broke is the output's (``sortrl ... | head``), not one to a worker. If so, Python's own flush at the end
    must not fail too."""
    ends = select.poll()
    for number in (1, 2):
        ends.register(number, 0)  # 0: only to hear of errors
    cut = [number for number, _ in ends.poll(0)]
    for number in cut:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return bool(cut)

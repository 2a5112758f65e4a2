"""What reading one file costs, measured in a child of its own: a file that hangs or takes all memory must fail its test alone."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from sortrl.core.errors import SortRLError

LONGEST, SECONDS, MEGABYTES = 20, 1.0, 500.0


def cost(read: Callable[[Path], object], file: Path) -> tuple[str, float, float]:
    """("loaded" | "refused: ..." | what went wrong, seconds of the processor, growth of peak memory in MB)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(LONGEST)
            before, started = _peak(), time.process_time()
            outcome = "loaded"
            try:
                read(file)
            except SortRLError as error:
                outcome = f"refused: {error}"
            except BaseException:
                outcome = traceback.format_exc()
            found = (outcome, time.process_time() - started, _peak() - before)
            os.write(writing, json.dumps(found).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        found = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return tuple(json.loads(found)) if found else (f"ended with code {code}, no answer in {LONGEST} s", LONGEST, 0.0)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

"""Reliable Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPT_AGAIN = 3.0  # seconds, in which most commands have long cleaned up and ended


@contextmanager
def insistent_interrupts() -> Iterator[None]:
    """Repeat an interrupt until the command has ended.

    Python forgets one that arrives while an object is being finalised, and so may code between C and Python; the command
    would continue.
    """

    def interrupt(number: int, frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, INTERRUPT_AGAIN)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield  # another handler is installed, or timers are not available
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)

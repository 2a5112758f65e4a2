"""Work that leaves no trace in its caller, and does not depend on the number of cores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the caller's global generators as they were."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(torch_state)


@contextmanager
def one_thread() -> Iterator[None]:
    """Networks this small train fastest on one thread, and then the result does not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

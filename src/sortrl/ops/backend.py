"""Which implementation serves which tensors. The choice is explicit: it can be asked for and overridden, never silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.ops import cpu

BACKENDS = ("auto", "cpu", "triton", "reference")

_chosen: ContextVar[str] = ContextVar("sortrl_backend", default="auto")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend within a ``with`` block (per thread and task).

    >>> import torch
    >>> with use_backend("reference"):
    ...     backend_for(torch.zeros(1))[0]
    'reference'
    """
    if name not in BACKENDS:
        raise SortRLError(f"Unknown backend {name!r}; choose one of {', '.join(BACKENDS)}.")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def backend_for(tensor: Tensor) -> tuple[str, str]:
    """The backend that serves this tensor's dtype and device, and the reason."""
    name, reason = _backend(str(tensor.dtype)[6:], tensor.device.type)
    return name, reason


def _backend(dtype: str, device: str) -> tuple[str, str]:
    chosen = _chosen.get()
    if chosen != "auto":
        return chosen, "chosen with use_backend"
    if dtype != "float32":
        return "reference", f"the kernels take float32, not {dtype}"
    if device == "cuda":
        return "triton", "float32 on a GPU"
    if device != "cpu":
        return "reference", f"no kernels for device {device}"
    selection = cpu.select()
    if selection.module is None:
        return "reference", selection.reason
    return "cpu", f"{selection.isa}: {selection.reason}"


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes a second: a traced
# program keeps the backend it was traced with.
_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]

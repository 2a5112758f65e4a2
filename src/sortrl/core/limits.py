"""How much memory there is, asked before it is spent: a clear error now is better than a killed run later."""

from __future__ import annotations

from pathlib import Path

from sortrl.core.errors import SortRLError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """What can still be allocated, here or within the limit of a container; None where the system does not tell."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    try:
        limit, used = (
            (_CGROUP / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current")
        )
    except OSError:  # no limit, or one of another kind
        limit = used = "max"
    if limit != "max":
        found.append(int(limit) - int(used))
    return max(0, min(found)) if found else None


def require(what: str, needed: int, remedy: str) -> None:
    """Refuse what does not fit: names the size, what there is, and what to lower.

    >>> require("A list of 3 numbers", 24, "write fewer")
    """
    available = available_bytes()
    if available is not None and needed > available:
        raise SortRLError(
            f"{what} would take about {_readable(needed)} of memory, and {_readable(available)} are free: {remedy}."
        )


def _readable(size: int) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size} {unit}"
        size //= 1000
    return f"{size} TB"

"""Reading and writing: atomic, and never a pickle. A reader sees either the old file or the new one, whole.

Files may come from anywhere, so readers bound what they spend: regular files only, no more than a stated size, tensors of
plain types; whatever is wrong becomes one :class:`SortRLError`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LARGEST_JSON = 16 * 2**20  # the largest document of a run has a few megabytes
# A value takes up to a hundred times the memory of its text: without a bound, 64 MB of "[" and "," became gigabytes.
_MOST_VALUES, _MOST_HEADER_VALUES, _DEEPEST = 300_000, 100_000, 100
# What numpy knows too. Other types (bfloat16, 8-bit floats) are valid safetensors, but nothing here writes them.
_MOST_DIMENSIONS, _LARGEST_SIZE = 16, 2**40
_FLOATS = (torch.float64, torch.float32, torch.float16)
_LONGEST_INTEGER = 300  # digits; a float64 ends at 308
_SECONDS_BETWEEN_TRIES = 0.2  # of a lock that another process has, on Windows
# What :func:`atomic_path` calls a file that is not whole yet: nobody else would choose such a name.
_TEMPORARY = ".sortrl.tmp"
_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(_TEMPORARY))
_TYPES = frozenset((*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool))


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory; rename it over ``path`` only if the block succeeds."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=_TEMPORARY)
    except OSError as error:
        raise SortRLError(
            f"Cannot write {target}: {error.strerror or error}. Choose a directory you can write to."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("r+b") as written:  # Windows flushes only what may be written to
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise SortRLError(
            f"Cannot write {target}: {error.strerror or error}. The previous file, if any, is intact."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_directory(directory: Path) -> None:
    """Make a rename last: after a power failure the directory itself may otherwise be the old one."""
    if sys.platform == "win32":  # which opens no directories
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(directory: Path, wait: bool = False) -> Iterator[None]:
    """One writer per directory at a time; the lock goes with the process, however it ends.

    Another writer is waited for, or (by default) refused. What a killed writer left unfinished is removed.
    """
    handles: list[int] = []
    try:
        while not handles:
            handles = _lock_both(directory, wait)
        remove_leftovers(directory)
        yield
    finally:
        _close(handles)  # which unlocks


def _lock_both(directory: Path, wait: bool) -> list[int]:
    """Locks on the directory and on the file ``.lock`` in it; nothing if either was replaced in the meantime.

    The file can be deleted while it is held, and the next one to come would lock a new one; the directory cannot. But some
    network file systems lock files only, and there the file alone is the lock.
    """
    if sys.platform == "win32":
        return _lock_file(directory, wait)
    flags = 0 if wait else fcntl.LOCK_NB
    handles: list[int] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handles.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        try:
            fcntl.flock(handles[0], fcntl.LOCK_EX | flags)
        except OSError as error:
            if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        # Neither following a link nor truncating: a directory from elsewhere must not choose which file is emptied.
        path = directory / ".lock"
        handles.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
        fcntl.flock(handles[1], fcntl.LOCK_EX | flags)
        if all(_is_still(handle, place) for handle, place in zip(handles, (directory, path), strict=True)):
            return handles
    except OSError as error:
        _close(handles)
        raise _not_locked(directory, error, taken=isinstance(error, BlockingIOError)) from error
    _close(handles)
    return []


if sys.platform == "win32":

    def _lock_file(directory: Path, wait: bool) -> list[int]:
        """On Windows, where an open file can be neither deleted nor replaced: the file alone is the lock."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise _not_locked(directory, error, taken=False) from error
        while True:
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
                return [handle]
            except OSError as error:
                if not wait:
                    os.close(handle)
                    raise _not_locked(directory, error, taken=True) from error
            time.sleep(_SECONDS_BETWEEN_TRIES)


def _not_locked(directory: Path, error: OSError, taken: bool) -> SortRLError:
    if taken:
        return SortRLError(f"Another run is writing to {directory}. Wait for it, or choose another --out.")
    return SortRLError(f"Cannot write to {directory}: {error.strerror or error}. Choose another --out.")


def _is_still(handle: int, path: Path) -> bool:
    """Whether ``path`` still leads to what was opened: a lock on what was deleted or replaced keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def remove_leftovers(directory: Path) -> None:
    """Delete what writers of ours that were killed left in this very directory. Only for who alone writes to it."""
    for temporary in directory.iterdir():
        if _UNFINISHED.fullmatch(temporary.name) and stat.S_ISREG(temporary.lstat().st_mode):
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write strict JSON (no NaN): what we publish must be readable by every parser."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def regular_file(path: str | Path, largest: int | None = None) -> Path:
    """``path`` if it is a file that can be read to its end: a pipe or a device, perhaps behind a link, may have none."""
    file = Path(path)
    try:
        found = file.stat()
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise SortRLError(f"Cannot read {path}: {reason}.") from error
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise SortRLError(f"Cannot read {path}: it is {kind}, expected a regular file.")
    if largest is not None and found.st_size > largest:
        raise SortRLError(f"{path} has {found.st_size} bytes, expected at most {largest}. Not opened.")
    return file


def parse_json(content: str | bytes, where: str | Path) -> Any:
    """``json.loads`` with one kind of error, for text whose size, depth and number of values are bounded before it is parsed."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        if len(text) > LARGEST_JSON:
            raise ValueError(f"{len(text)} characters, expected at most {LARGEST_JSON}")
        check_json(text)
        return json.loads(text, parse_int=_bounded_integer)
    except (ValueError, RecursionError) as error:
        raise SortRLError(f"{where} is not valid JSON ({error}). It may be damaged: write it again.") from error


def _bounded_integer(text: str) -> int:
    """JSON has no largest integer, and Python reads them all; then one is compared with a float, or made one, and overflows."""
    if len(text) > _LONGEST_INTEGER:
        raise ValueError(f"an integer of {len(text)} digits, expected at most {_LONGEST_INTEGER}")
    return int(text)


def check_json(text: str, most: int = _MOST_VALUES) -> None:
    """Raise ValueError for JSON with more values, or nested more deeply, than anything that sortrl reads."""
    plain = text.replace("\\\\", "").replace('\\"', "")  # no quote is left but those around strings
    codes = np.frombuffer(plain.encode("utf-8", "replace"), np.uint8)
    bare = codes[np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) == 0]
    opening, closing = (bare == ord("[")) | (bare == ord("{")), (bare == ord("]")) | (bare == ord("}"))
    values = int((bare == ord(",")).sum() + opening.sum())
    if values > most or closing.sum() > most:
        raise ValueError(f"{values} values, expected at most {most}")
    steps = opening[opening | closing].astype(np.int32) * 2 - 1
    depth = int(steps.cumsum().max(initial=0))
    if depth > _DEEPEST:
        raise ValueError(f"nested {depth} deep, expected at most {_DEEPEST}")


def read_json(path: str | Path) -> Any:
    file = regular_file(path, LARGEST_JSON)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SortRLError(f"Cannot read {path}: {error.strerror or error}.") from error
    return parse_json(content, path)


def read_object(path: str | Path) -> dict[str, Any]:
    """A JSON document that must be an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise SortRLError(f"{path} holds {type(value).__name__}, expected a JSON object. It may be damaged.")
    return value


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whose metadata is one JSON document."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        try:
            safetensors.torch.save_file(
                contiguous, str(temporary), {"sortrl": json.dumps(metadata or {}, allow_nan=False)}
            )
        except safetensors.SafetensorError as error:  # a full disk, among others
            raise OSError(str(error)) from error


def _check_header(file: Path) -> None:
    """Before the library parses it: it reads 100 MB of header, which can declare a million empty tensors."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > LARGEST_JSON:
            raise ValueError(f"a header of {size} bytes, expected at most {LARGEST_JSON}")
        check_json(opened.read(size).decode("utf-8"), _MOST_HEADER_VALUES)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote: tensors and metadata."""
    file = regular_file(path)
    try:
        _check_header(file)
        with safetensors.safe_open(str(file), framework="pt") as opened:
            text = (opened.metadata() or {}).get("sortrl", "{}")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    # The library's own errors, and torch's where a declared shape is beyond what it can index.
    except (OSError, safetensors.SafetensorError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise SortRLError(
            f"{path} is not a readable safetensors file ({error}). It may be damaged: write it again."
        ) from error
    metadata = parse_json(text, f"The metadata of {path}")
    if not isinstance(metadata, dict):
        raise SortRLError(f"{path}: its metadata is not a JSON object. The file was not written by sortrl.")
    for name, tensor in tensors.items():
        # An empty tensor may declare any other size, for free.
        if tensor.dtype not in _TYPES or tensor.ndim > _MOST_DIMENSIONS or max(tensor.shape, default=0) > _LARGEST_SIZE:
            raise SortRLError(
                f"{path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, which sortrl does not write."
            )
    return tensors, metadata

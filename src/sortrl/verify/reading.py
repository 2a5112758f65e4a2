"""Safetensors files and their hashes, read from the definition of the format."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from sortrl.core.errors import SortRLError

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
_LARGEST_HEADER = 2**20  # a policy's has a few kilobytes; parsed, JSON takes up to a hundred times its size
_LARGEST_FILE = 8 * 2**30


def weights_hash(tensors: dict[str, Array]) -> str:
    """Of the weights as they are computed with: those in half precision are widened, which is exact."""
    return _with_weights(hashlib.sha256(), tensors)


def policy_hash(description: dict[str, Any], tensors: dict[str, Array]) -> str:
    """Of a policy's metadata, as JSON with sorted keys behind its length, and of its weights."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":")).encode()
    return _with_weights(hashlib.sha256(f"{len(text)}:".encode() + text), tensors)


def _with_weights(digest: Any, tensors: dict[str, Array]) -> str:
    for name in sorted(tensors):
        array = tensors[name].astype("<f4") if tensors[name].dtype == np.float16 else tensors[name]
        digest.update(f"{name}:{array.dtype.str}:{list(array.shape)};".encode())
        digest.update(array.tobytes())
    return str(digest.hexdigest())


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors and metadata of a safetensors file: the length of a JSON header, the header, the bytes."""
    try:
        # Certificates name the policy's file: that may be a device or a pipe, which has no end.
        if not os.path.isfile(path) or path.stat().st_size > _LARGEST_FILE:
            found = "a file beyond every policy's size" if os.path.isfile(path) else "no such file"
            raise SortRLError(f"Cannot read {path}: {found}.")
        content = path.read_bytes()
    except OSError as error:
        raise SortRLError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        size = int.from_bytes(content[:8], "little")
        if not 0 < size <= min(len(content) - 8, _LARGEST_HEADER):
            raise ValueError("its header is cut off")
        header = _parsed(content[8 : 8 + size])
        data = memoryview(content)[8 + size :]
        metadata = _parsed(header.pop("__metadata__", {}).get("sortrl", "{}"))
        tensors = {name: _tensor(entry, data) for name, entry in header.items()}
        _check_layout([entry["data_offsets"] for entry in header.values()], len(data))
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SortRLError(f"{path} is not a readable safetensors file ({error}). It may be damaged.") from error
    return tensors, metadata


def _parsed(text: str | bytes) -> Any:
    """JSON that every parser reads alike: of two equal names one takes the first and another the last."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice in an object")
        return dict(pairs)

    def refused(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, object_pairs_hook=once, parse_constant=refused)


def _tensor(entry: dict[str, Any], data: memoryview) -> Array:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor lies outside the file")
    if not all(type(size) is int and size >= 0 for size in entry["shape"]):  # numpy would fill in a size of -1
        raise ValueError("a tensor has a size that is no whole number")
    return np.frombuffer(data[begin:end], dtype=_TYPES[entry["dtype"]]).reshape(entry["shape"])


def _check_layout(places: list[tuple[int, int]], size: int) -> None:
    """The format wants tensors one behind the other, without gaps in which something could hide and without overlap."""
    reached = 0
    for begin, end in sorted(map(tuple, places)):
        if begin != reached:
            raise ValueError("its tensors overlap or leave gaps")
        reached = end
    if reached != size:
        raise ValueError("it has bytes behind its last tensor")

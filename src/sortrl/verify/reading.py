"""Safetensors files and their hashes, read from the definition of the format."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sortrl.errors import SortRLError

Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
_LARGEST_HEADER = 2**20  # a policy's has a few kilobytes; parsed, JSON takes up to a hundred times its size
_LARGEST_FILE = 8 * 2**30


def weights_hash(tensors: dict[str, Array]) -> str:
    """Of the weights as they are computed with: those in half precision are widened, which is exact."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].astype("<f4") if tensors[name].dtype == np.float16 else tensors[name]
        digest.update(f"{name}:{array.dtype.str}:{list(array.shape)};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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
        header = json.loads(content[8 : 8 + size])
        data = memoryview(content)[8 + size :]
        metadata = json.loads(header.pop("__metadata__", {}).get("sortrl", "{}"))
        tensors = {name: _tensor(entry, data) for name, entry in header.items()}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SortRLError(f"{path} is not a readable safetensors file ({error}). It may be damaged.") from error
    return tensors, metadata


def _tensor(entry: dict[str, Any], data: memoryview) -> Array:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor lies outside the file")
    return np.frombuffer(data[begin:end], dtype=_TYPES[entry["dtype"]]).reshape(entry["shape"])

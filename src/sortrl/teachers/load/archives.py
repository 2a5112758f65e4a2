"""Zip files and what ``torch.save`` wrote, read without torch's own loader: one parser, whose memory the file's size bounds.

``torch.load`` finds members regardless of case, prefers another end of the file than ``zipfile`` does and takes sizes at their
word: what one parser has checked, the other does not read. So the file is parsed once, here. Its pickle, read opcode by opcode
first, can name tensors, types and dictionaries and nothing else; tensors are views of the bytes in the file.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.teachers.load.pickles import RestrictedUnpickler, scan

MOST_BYTES = 2**30
"""A 1 GiB network is far beyond any agent: a larger declared size is a damaged file or a zip bomb."""
_LARGEST_DIRECTORY = 2**20  # about ten thousand members; an agent has a hundred
_LARGEST_PACKED = 2**24  # what may unpack to far more than its size
_MOST_PACKED = 20
_MOST_SHARED = 8  # names of one tensor: torch writes its bytes once
_MOST_DIMENSIONS, _LARGEST_SIZE = 16, 2**40
_ZIP, _MAGIC, _PROTOCOL = b"PK\x03\x04", 0x1950A86A20F9469CFC6C, 1001
_TYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}


class _Guarded(io.BufferedReader):
    """While a zip's directory is read, no more than a stated size at a time: ``zipfile`` would take any."""

    guarded = True

    def read(self, size: int | None = -1, /) -> bytes:
        if self.guarded and size is not None and size > _LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {size} bytes, expected at most {_LARGEST_DIRECTORY}")
        return super().read(size)


class Archive:
    """A zip file from elsewhere: it begins with its first member, and no two members share a name, whatever the case."""

    def __init__(self, stream: io.RawIOBase | BinaryIO, where: str) -> None:
        self.where = where
        guarded = _Guarded(cast("io.RawIOBase", stream))
        if guarded.read(4) != _ZIP:
            raise zipfile.BadZipFile("it does not begin as one")
        self._zip = zipfile.ZipFile(guarded)
        guarded.guarded = False
        self.names = self._zip.namelist()
        repeated = [name for name, count in Counter(map(str.lower, self.names)).items() if count > 1]
        if repeated:
            raise SortRLError(f"{where} holds {repeated[0][:100]} more than once. Not opened.")

    def size(self, name: str) -> int:
        return self._zip.getinfo(name).file_size

    def read(self, name: str, largest: int) -> bytes:
        """One member, if it is no larger than ``largest`` and not packed beyond what packing does to numbers."""
        found = self._zip.getinfo(name)
        size = found.file_size
        if size > largest:
            raise SortRLError(
                f"{self.where}: {name[:100]} declares {size} bytes, more than the {largest} any agent needs. Not opened."
            )
        if found.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # the others unpack all at once
            raise SortRLError(f"{self.where}: {name[:100]} is packed in an unusual way. Save the agent again.")
        if size > max(_LARGEST_PACKED, _MOST_PACKED * found.compress_size):
            raise SortRLError(
                f"{self.where}: {name[:100]} unpacks to more than {_MOST_PACKED} times its size. Not opened."
            )
        with self._zip.open(found) as opened:
            content = opened.read(size)  # with a number, or the declared size would not bound what is unpacked
        if len(content) != size:
            raise zipfile.BadZipFile(f"{name[:100]} is cut off")
        return content


@dataclass(frozen=True)
class _Storage:
    """Numbers in the file; tensors are views of them."""

    key: str
    kind: torch.dtype
    count: int

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a storage")


class _Dictionary(dict[Any, Any]):
    """``OrderedDict``, empty to begin with; attributes (torch notes versions there) are passed over."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


class _View:
    """Arguments of torch's ``_rebuild_tensor_v2``, looked at only when the pickle has been read."""

    def __init__(self, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> None:
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a tensor")

    def check(self, name: str) -> None:
        """It lies within its storage, and no number is used twice: repeated numbers make any size from a few bytes."""
        sizes = (self.offset, *self.size, *self.stride) if _is_tuple(self.size) and _is_tuple(self.stride) else ()
        if not sizes or not all(type(number) is int and 0 <= number < _LARGEST_SIZE for number in sizes):
            raise SortRLError(f"{name} has a shape that is not made of whole numbers")
        if not isinstance(self.storage, _Storage) or not len(self.size) == len(self.stride) <= _MOST_DIMENSIONS:
            raise SortRLError(f"{name} is not a tensor")

    def fits(self) -> bool:
        last = self.offset + sum((size - 1) * step for size, step in zip(self.size, self.stride, strict=True))
        return self.numbers == 0 or (self.numbers <= self.storage.count and last < self.storage.count)

    @property
    def numbers(self) -> int:
        return math.prod(self.size)


class _Parameter:
    """``_rebuild_parameter``: a tensor with a flag."""

    def __new__(cls, data: Any, *_: Any) -> Any:
        return data if isinstance(data, _View) else super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a parameter")


class _Kind:
    """The type of a storage."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a state for a type")


# What torch.save writes for a dictionary of tensors. Classes all, each with a __setstate__: a pickle can set attributes of
# functions, and of classes without one.
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Dictionary,
    ("torch._utils", "_rebuild_tensor_v2"): _View,
    ("torch._utils", "_rebuild_parameter"): _Parameter,
    **{("torch", f"{name}Storage"): _Kind(dtype) for name, dtype in _TYPES.items()},
}
_NAMES = frozenset(" ".join(name) for name in _KNOWN)


class _Unpickler(RestrictedUnpickler):
    known = _KNOWN

    def persistent_load(self, pid: Any) -> _Storage:
        """("storage", type, key, device, numbers), and before torch 1.6 a sixth, None unless it is a view of another."""
        if not _is_tuple(pid) or len(pid) not in (5, 6) or pid[0] != "storage" or pid[5:] not in ((), (None,)):
            raise ValueError("something else than a storage")
        _, kind, key, _, count = pid[:5]
        if (
            not isinstance(kind, _Kind)
            or type(key) is not str
            or type(count) is not int
            or not 0 <= count < _LARGEST_SIZE
        ):
            raise ValueError("a storage without type, name or size")
        return _Storage(key, kind.dtype, count)


def read_state(content: bytes, path: Path, what: str = "policy.pth") -> dict[str, Tensor]:
    """The tensors that ``torch.save`` wrote, and nothing else; ``what`` names them in errors."""
    where = f"{path}: {what}"
    try:
        state = (_zipped if content[:4] == _ZIP else _legacy)(content, where)
    except SortRLError:
        raise
    # zipfile and pickle raise BadZipFile, UnpicklingError, KeyError, ... according to where the damage is.
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise SortRLError(f"{where} holds something else than tensors, or is damaged ({reason}).") from error
    if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
        raise SortRLError(f"{path}: its weights contain NaN or infinity; the training diverged.")
    return state


def _zipped(content: bytes, where: str) -> dict[str, Tensor]:
    """Since torch 1.6: a zip with one ``data.pkl``, and beside it a member for each storage."""
    archive = Archive(io.BytesIO(content), where)
    total = sum(map(archive.size, archive.names))
    if total > min(MOST_BYTES, len(content)):  # torch packs nothing
        raise SortRLError(f"{where} unpacks to more than {min(MOST_BYTES, len(content))} bytes. Not opened.")
    pickles = [name for name in archive.names if f"/{name.lower()}".endswith("/data.pkl")]
    if len(pickles) != 1 or not pickles[0].endswith("data.pkl"):
        raise SortRLError(f"{where} holds {len(pickles)} members named data.pkl, expected one. Save the agent again.")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in archive.names and archive.read(f"{folder}byteorder", 100) != b"little":
        raise SortRLError(f"{where} was written on a big-endian machine, which is not supported.")
    pickled = archive.read(pickles[0], MOST_BYTES)
    scan(io.BytesIO(pickled), where, _NAMES)
    return _tensors(_Unpickler(pickled).load(), lambda key, size: archive.read(f"{folder}data/{key}", size), where)


def _legacy(content: bytes, where: str) -> dict[str, Tensor]:
    """Before torch 1.6: magic number, protocol, system, tensors and the names of storages as pickles; then those, in order."""
    stream = io.BytesIO(content)
    parts, begin = [], 0
    for _ in range(5):
        scan(stream, where, _NAMES)
        parts.append(_Unpickler(content[begin : stream.tell()]).load())
        begin = stream.tell()
    magic, protocol, system, state, keys = parts
    little = isinstance(system, dict) and system.get("little_endian") is True
    if (type(magic), type(protocol)) != (int, int) or (magic, protocol) != (_MAGIC, _PROTOCOL) or not little:
        raise SortRLError(f"{where} holds something else than tensors, or is damaged (not written by torch.save).")
    wanted = {view.storage.key: view.storage for view in _views(state, where).values()}
    if not isinstance(keys, list) or not all(type(key) is str for key in keys) or sorted(keys) != sorted(wanted):
        raise SortRLError(f"{where}: its list of storages is damaged. Save the agent again.")
    places = {}
    for key in keys:
        count = int.from_bytes(content[begin : begin + 8], "little")
        if count != wanted[key].count:
            raise SortRLError(f"{where}: a storage has {count} numbers, expected {wanted[key].count}. It is damaged.")
        places[key] = begin + 8
        begin += 8 + count * wanted[key].kind.itemsize
    return _tensors(state, lambda key, size: content[places[key] : places[key] + size], where)


def _views(state: Any, where: str) -> dict[str, _View]:
    """What the pickle said, if it is a dictionary of tensors that lie within their storages."""
    named = isinstance(state, dict) and all(type(name) is str for name in state)
    if not named or not all(isinstance(view, _View) for view in state.values()):
        raise SortRLError(f"{where} is not a dictionary of tensors. Save the agent with model.save().")
    views: dict[str, _View] = state
    try:
        for name, view in views.items():
            view.check(name[:100])
    except SortRLError as error:
        raise SortRLError(f"{where}: {error}. It is damaged: save the agent again.") from error
    if sum(view.numbers for view in views.values()) * 4 > MOST_BYTES:
        raise SortRLError(f"{where} claims tensors of more than {MOST_BYTES} bytes. Not loaded.")
    unfit = [name[:100] for name, view in views.items() if not view.fits()]
    if unfit:
        raise SortRLError(f"{where}: {unfit[0]} does not lie within the numbers stored for it. Save the agent again.")
    storages = {view.storage.key: view.storage for view in views.values()}
    if any(storages[view.storage.key] != view.storage for view in views.values()):
        raise SortRLError(f"{where}: one storage is said to have two types or sizes. It is damaged.")
    if sum(view.numbers for view in views.values()) > _MOST_SHARED * sum(one.count for one in storages.values()):
        raise SortRLError(f"{where}: more than {_MOST_SHARED} tensors share the same numbers. Not loaded.")
    return views


def _tensors(state: Any, read: Callable[[str, int], bytes], where: str) -> dict[str, Tensor]:
    views = _views(state, where)
    storages = {view.storage.key: view.storage for view in views.values()}
    numbers = {key: _numbers(one, read(key, one.count * one.kind.itemsize), where) for key, one in storages.items()}
    return {
        name: numbers[view.storage.key].as_strided(view.size, view.stride, view.offset) for name, view in views.items()
    }


def _numbers(storage: _Storage, content: bytes, where: str) -> Tensor:
    if len(content) != storage.count * storage.kind.itemsize:
        raise SortRLError(
            f"{where}: {len(content)} bytes for {storage.count} numbers of {storage.kind}. It is damaged."
        )
    if not storage.count:
        return torch.empty(0, dtype=storage.kind)
    if storage.kind == torch.bool:  # bytes other than 0 and 1 are no truth values
        return torch.frombuffer(bytearray(content), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(content), dtype=storage.kind)


def _is_tuple(value: Any) -> bool:
    return type(value) is tuple


def listed(state: Mapping[str, Tensor], most: int) -> str:
    """Names and shapes of some tensors, for messages."""
    return ", ".join(f"{name[:100]} {tuple(tensor.shape)}" for name, tensor in list(state.items())[:most])

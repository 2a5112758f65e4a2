"""Pickles that others wrote, opened without trusting them: first read opcode by opcode, then arrays alone are taken.

A pickle is a program. :func:`scan` reads it without running it and refuses what could exhaust memory or time; afterwards
:func:`read_arrays` runs it with a vocabulary in which every class is an inert record of what it was given. Nothing is copied,
converted or written as text while it runs: a few opcodes can name one large value thousands of times. The arrays that somebody
asks for are made afterwards, from their bytes. Old files that name packages which are gone load all the same.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Container, Mapping
from typing import Any, ClassVar, cast

import numpy as np

from sortrl.core.errors import SortRLError

_MOST_OPCODES = 100_000  # statistics and agents have a few thousand
_MOST_SHARED_TUPLES = 16
_MOST_TUPLES = 20_000  # nested in each other they are hashed recursively, and deeper than this the stack overflows
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET")
# Copies of what is on the stack, functions by number, and calls with a dictionary, which is copied for each.
_REFUSED = ("DUP", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX")
_PLAIN_TYPE = re.compile(r"[<>=|]?(f[248]|[iu][1248]|b1)")
_MOST_DIMENSIONS, _LARGEST_SIZE = 16, 2**40


def scan(stream: io.BytesIO, where: str, names: Container[str] | None = None) -> None:
    """Read one pickle from ``stream`` without running it; refuse what no file of numbers contains.

    ``names`` are the globals, as "module name", that may occur; None for any. Refused are also declared lengths beyond the
    file, memo numbers beyond its size (the unpickler would make room for all below), and tuples that are used again and
    again: nested in each other they make a file of 200 bytes that takes years to hash.
    """
    size, count, shared, nested, memo, previous = len(stream.getbuffer()), 0, 0, 0, 0, ""
    tuples: set[int] = set()
    try:
        for opcode, found, _ in pickletools.genops(stream):
            count, argument = count + 1, cast("Any", found)
            if count > _MOST_OPCODES:
                raise ValueError(f"more than {_MOST_OPCODES} opcodes")
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                number = memo if opcode.name == "MEMOIZE" else int(argument)
                if number > size:
                    raise ValueError(f"memo number {number} in {size} bytes")
                memo += 1
                (tuples.add if previous in _TUPLES else tuples.discard)(number)
            elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
                shared += int(argument) in tuples
            elif opcode.name in _REFUSED:
                raise ValueError(f"opcode {opcode.name}")
            elif names is not None and opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL") and argument not in names:
                raise ValueError(f"it names {argument or 'something computed'}")
            nested += opcode.name in _TUPLES
            if shared > _MOST_SHARED_TUPLES or nested > _MOST_TUPLES:
                raise ValueError("tuples nested in many others")
            previous = opcode.name
    # pickletools raises these three for whatever does not read as an opcode.
    except (ValueError, IndexError, OverflowError) as error:
        raise SortRLError(
            f"{where} holds something else than tensors or arrays, or is damaged ({str(error)[:200]})."
        ) from error


class RestrictedUnpickler(pickle.Unpickler):
    """Every global is one of ``known``: nothing is ever imported, and no foreign function called."""

    known: ClassVar[Mapping[tuple[str, str], Any]] = {}

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"it names {module[:60]} {name[:60]}")
        return self.known[module, name]


def read_arrays(content: bytes, where: str) -> Any:
    """The object in a pickle, as far as it consists of plain values, numpy arrays and (placeholders for) objects."""
    scan(io.BytesIO(content), where)
    try:
        return _ArrayUnpickler(content).load()
    # A malformed pickle can raise nearly anything; whatever it is, the file is not what it should be.
    except Exception as error:
        raise SortRLError(
            f"{where} is not a readable VecNormalize pickle ({type(error).__name__}: {str(error)[:200]})."
        ) from error


class Placeholder:
    """Stands for an object of a class we do not load: holds what it was given, does nothing."""

    _arguments: tuple[Any, ...] = ()
    _state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def __call__(self, *_: Any) -> Placeholder:
        return Placeholder()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the object that it stands for; arrays and numbers are made now."""
        if not name.startswith("_"):
            for part in self._parts():
                if name in part:
                    value = part[name]
                    return value.made() if isinstance(value, _Array) else value
        raise AttributeError(name)

    def names(self) -> list[str]:
        """Of its first few attributes."""
        found = [name[:60] for part in self._parts() for name in list(part)[:20] if type(name) is str]
        return sorted(found)[:20]

    def _parts(self) -> list[dict[Any, Any]]:
        """Its state is a dictionary, or a pair of two (one for slots)."""
        parts = self._state[:2] if type(self._state) is tuple else (self._state,)
        return [part for part in parts if type(part) is dict]


class _Type(Placeholder):
    """A numpy type; its state tells the byte order."""

    def made(self) -> np.dtype[Any]:
        name = _text(self._arguments[0] if self._arguments else None, 3)
        if not _PLAIN_TYPE.fullmatch(name):
            raise SortRLError(f"an array of type {name!r}, expected plain numbers")
        kind: np.dtype[Any] = np.dtype(name)
        state = self._state
        order = _text(state[1], 1) if type(state) is tuple and len(state) > 1 else ""
        return kind.newbyteorder("<" if order == "<" else ">") if order in ("<", ">") else kind


class _Bytes(Placeholder):
    """``_codecs.encode(text, "latin1")``: how protocols before 3 write bytes."""


class _Array(Placeholder):
    """An array or a number; numpy's own constructors would take any size, or an object's address, for granted."""

    def made(self) -> Any:
        content, kind, shape, fortran = self._described()
        if not isinstance(kind, _Type):
            raise SortRLError("an array without a type")
        known = type(shape) is tuple and len(shape) <= _MOST_DIMENSIONS
        if not known or not all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in shape):
            raise SortRLError("an array whose shape is not made of whole numbers")
        dtype, data = kind.made(), _content(content)
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise SortRLError(f"an array of shape {shape} in {len(data)} bytes")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C").copy()

    def _described(self) -> tuple[Any, Any, Any, bool]:
        """Its bytes, type, shape and order: the state that ``_reconstruct`` is given."""
        if type(self._state) is not tuple or len(self._state) != 5:
            raise SortRLError("an array without contents")
        _, shape, kind, fortran, content = self._state
        return content, kind, shape, fortran is True or fortran == 1


class _Buffer(_Array):
    """``_frombuffer(bytes, type, shape, order)``: how protocol 5 writes arrays."""

    def _described(self) -> tuple[Any, Any, Any, bool]:
        content, kind, shape, order = (*self._arguments, "C")[:4] if len(self._arguments) >= 3 else (None,) * 4
        return content, kind, shape, type(order) is str and order == "F"


class _Number(_Array):
    """``scalar(type, bytes)``."""

    def _described(self) -> tuple[Any, Any, Any, bool]:
        kind, content = self._arguments if len(self._arguments) == 2 else (None, None)
        return content, kind, (1,), False

    def made(self) -> Any:
        return super().made()[0]


def _text(value: Any, longest: int) -> str:
    """A short text, written as such or (by Python 2) as bytes."""
    if type(value) is bytes and len(value) <= longest:
        return value.decode("latin1")
    return value if type(value) is str and len(value) <= longest else "unknown"


def _content(value: Any) -> bytes:
    if isinstance(value, _Bytes):
        value = value._arguments[0] if value._arguments else None
    if type(value) is str:  # written by Python 2, or by an old protocol
        return value.encode("latin1")
    if type(value) in (bytes, bytearray):
        return bytes(value)
    raise SortRLError("an array of something else than bytes")


# What numpy writes for arrays and numbers, under its old name and its new one.
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Bytes,
}
for _core in ("numpy.core", "numpy._core"):
    _KNOWN |= {
        (f"{_core}.multiarray", "_reconstruct"): _Array,
        (f"{_core}.multiarray", "scalar"): _Number,
        (f"{_core}.numeric", "_frombuffer"): _Buffer,
    }


class _ArrayUnpickler(RestrictedUnpickler):
    """Every other class is a placeholder: one for all, since making a class of each name takes a kilobyte."""

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), Placeholder)

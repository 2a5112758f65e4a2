"""Pickles that others wrote, opened without trusting them: first read opcode by opcode, then arrays alone are taken.

A pickle is a program. :func:`scan` reads it without running it and refuses what could exhaust memory or time; afterwards
:func:`read_arrays` runs it with a vocabulary of numpy arrays, rebuilt here from their bytes, in which every other class
is an inert placeholder. Old files that name packages which are gone load all the same.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from collections.abc import Container
from typing import Any, cast

import numpy as np

from sortrl.errors import SortRLError

_MOST_OPCODES = 1_000_000
_MOST_SHARED_TUPLES = 16
_TUPLES = ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_PLAIN_TYPE = re.compile(r"[<>=|]?(f[248]|[iu][1248]|b1)")


def scan(stream: io.BytesIO, where: str, names: Container[str] | None = None) -> None:
    """Read one pickle from ``stream`` without running it; refuse what no file of numbers contains.

    ``names`` are the globals, as "module name", that may occur; None for any. Refused are also declared lengths beyond the
    file, memo numbers beyond its size (the unpickler would make room for all below), and tuples that are used again and
    again: nested in each other they make a file of 200 bytes that takes years to hash.
    """
    size, count, shared, memo, previous = len(stream.getbuffer()), 0, 0, 0, ""
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
            elif opcode.name in ("DUP", "EXT1", "EXT2", "EXT4"):
                raise ValueError(f"opcode {opcode.name}")
            elif names is not None and opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL") and argument not in names:
                raise ValueError(f"it names {argument or 'something computed'}")
            if shared > _MOST_SHARED_TUPLES:
                raise ValueError("tuples nested in many others")
            previous = opcode.name
    # pickletools raises these three for whatever does not read as an opcode.
    except (ValueError, IndexError, OverflowError) as error:
        raise SortRLError(
            f"{where} holds something else than tensors or arrays, or is damaged ({str(error)[:200]})."
        ) from error


def read_arrays(content: bytes, where: str) -> Any:
    """The object in a pickle, as far as it consists of plain values, numpy arrays and (placeholders for) objects."""
    scan(io.BytesIO(content), where)
    try:
        return _ArrayUnpickler(io.BytesIO(content)).load()
    # A malformed pickle can raise nearly anything; whatever it is, the file is not what it should be.
    except Exception as error:
        raise SortRLError(
            f"{where} is not a readable VecNormalize pickle ({type(error).__name__}: {str(error)[:200]})."
        ) from error


class Placeholder:
    """Stands for an object of a class we do not load: keeps its plain attributes, does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update({str(name): _finished(value) for name, value in part.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Placeholder:
        return Placeholder()


class _Type:
    """A numpy type of plain numbers; its state tells the byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        text = name.decode("ascii") if isinstance(name, bytes) else str(name)
        if not _PLAIN_TYPE.fullmatch(text):
            raise SortRLError(f"an array of type {text[:20]!r}, expected plain numbers")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array under way; numpy's own constructor would take any size, or an object's address, for granted."""

    def __init__(self, *_: Any) -> None:
        self.value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        self.value = _array(content, kind, shape, "F" if fortran else "C")


def _array(content: Any, kind: Any, shape: Any, order: Any = "C") -> Any:
    if not isinstance(kind, _Type) or not isinstance(content, (bytes, bytearray, str)):
        raise SortRLError(f"an array of {type(content).__name__}, expected bytes")
    data = content.encode("latin1") if isinstance(content, str) else bytes(content)  # text: written by Python 2
    if len(data) != math.prod(shape) * kind.dtype.itemsize:
        raise SortRLError(f"an array of shape {shape} in {len(data)} bytes")
    return np.frombuffer(data, kind.dtype).reshape(shape, order="F" if order == "F" else "C").copy()


def _scalar(kind: Any, content: Any = b"") -> Any:
    return _array(content, kind, (1,))[0]


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocols before 3 write bytes."""
    return str(text).encode("latin1")


def _finished(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


# What numpy writes for arrays and numbers, under its old name and its new one.
_KNOWN: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type}
_KNOWN[("_codecs", "encode")] = _encode
for _core in ("numpy.core", "numpy._core"):
    _KNOWN |= {
        (f"{_core}.multiarray", "_reconstruct"): _Array,
        (f"{_core}.multiarray", "scalar"): _scalar,
        (f"{_core}.numeric", "_frombuffer"): _array,
    }


class _ArrayUnpickler(pickle.Unpickler):
    """Every global is one of ours: nothing is ever imported, and no foreign function called."""

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        return type(name, (Placeholder,), {}) if known is None else known

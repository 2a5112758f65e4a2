"""Reading untrusted JSON: every value is checked where it is taken, and an error names its full key."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from sortrl.core.errors import SortRLError

_MISSING = object()
LARGEST = 1e15  # no quantity of a run comes near; what is larger is damage
_DEEPEST = 6  # levels of nested settings that are shown


def clean(value: object) -> str:
    """Text without control characters or lone surrogates, so that it can neither steer a terminal nor break a file.

    >>> clean("Cart\\x1b[31mPole")
    'Cart\ufffd[31mPole'
    """
    return "".join(
        "\ufffd" if unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Zl", "Zp") else mark for mark in str(value)
    )


@dataclass(frozen=True)
class Reader:
    """One JSON object and the key under which it was found.

    >>> Reader({"eps": 0.1}).number("eps")
    0.1
    >>> Reader({"env": {}}).object("env").text("id")
    Traceback (most recent call last):
    ...
    sortrl.errors.SortRLError: results: env.id is missing, expected text. Write them again with `sortrl robustify`.
    """

    values: Mapping[str, Any]
    path: str = ""

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, expected: str) -> SortRLError:
        value = self.values.get(key, _MISSING)
        received = "is missing" if value is _MISSING else f"is {clean(repr(value))[:60]}"
        return SortRLError(
            f"results: {clean(self.name(key))} {received}, expected {expected}. "
            "Write them again with `sortrl robustify`."
        )

    def has(self, key: str) -> bool:
        """Whether the key is there with a value; null is how an absent optional value is written."""
        return self.values.get(key) is not None

    def object(self, key: str) -> Reader:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return Reader(value, self.name(key))

    def objects(self, key: str) -> list[Reader]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise self.fail(key, "a list of objects")
        return [Reader(item, f"{self.name(key)}[{index}]") for index, item in enumerate(value)]

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "text")
        return clean(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of texts")
        return tuple(clean(item) for item in value)

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float:
        value = self.values.get(key)
        if not _is_number(value) or not low <= value <= high:
            raise self.fail(key, f"a number{_bounds(low, high)}")
        return float(value)

    def integer(self, key: str, low: int = 0) -> int:
        value = self.number(key, low)
        if value != int(value):
            raise self.fail(key, "a whole number")
        return int(value)

    def numbers(self, key: str, low: float = -math.inf, high: float = math.inf) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(_is_number(item) and low <= item <= high for item in value):
            raise self.fail(key, f"a list of numbers{_bounds(low, high)}")
        return tuple(map(float, value))

    def share(self, key: str) -> float:
        return self.number(key, 0.0, 1.0)

    def optional_share(self, key: str) -> float | None:
        return self.share(key) if self.has(key) else None

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def flat(self) -> tuple[tuple[str, str], ...]:
        """Every setting as (dotted name, text): {"collect": {"episodes": 3}} -> (("collect.episodes", "3"),)."""
        return tuple(_flatten(self.values, "", 0))


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= LARGEST  # false for NaN, infinity and integers that no float can hold


def _bounds(low: float, high: float) -> str:
    if high < math.inf:
        return f" in [{low:g}, {high:g}]"
    return f" >= {low:g}" if low > -math.inf else f" of at most {LARGEST:g}"


def _flatten(value: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth < _DEEPEST and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{clean(key)}" if name else clean(key), depth + 1)
    elif isinstance(value, (Mapping, list, tuple)):
        shallow = isinstance(value, Mapping) or any(isinstance(item, (Mapping, list, tuple)) for item in value)
        yield name, f"({len(value)} entries)" if shallow else ", ".join(map(clean, value)) or "none"
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    else:
        yield name, "not set" if value is None else clean(value)

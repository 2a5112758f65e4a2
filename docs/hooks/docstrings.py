"""Docstrings as Markdown: roles such as :class:`X` become code, and doctests become code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`")


class PlainDocstrings(griffe.Extension):
    """What Python's help() shows as it is, Markdown would garble: ``>>>`` would open a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _fenced(_ROLE.sub(r"`\1`", obj.docstring.value))


def _fenced(text: str) -> str:
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not inside:
            lines += ["", "```pycon"]
        elif inside and not line.strip():
            lines.append("```")
        inside = starts or (inside and bool(line.strip()))
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)

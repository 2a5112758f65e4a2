"""The one exception type of the package (and its one warning), so that callers (and the command line) can tell a user's mistake from a bug."""

from __future__ import annotations

import re

_LONGEST = 2000
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class SortRLError(ValueError):
    """Something the caller can mend: the message names what was received, what was expected and what to do.

    Messages quote what was received, and that may come from a file: control characters, which could steer a terminal, are
    replaced, and the middle of what nobody would read is left out.
    """

    def __init__(self, message: str = "") -> None:
        text = _CONTROL.sub("\ufffd", message)
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}")


class MissingDependency(SortRLError):
    """An optional package is needed; the message names the extra that installs it."""


class SortRLWarning(UserWarning):
    """A result that should not be relied on as it is; the message says why and what to try."""

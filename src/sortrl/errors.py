"""The one exception type of the package, so that callers (and the command line) can tell a user's mistake from a bug."""

from __future__ import annotations


class SortRLError(ValueError):
    """Something the caller can mend: the message names what was received, what was expected and what to do."""


class MissingDependency(SortRLError):
    """An optional package is needed; the message names the extra that installs it."""

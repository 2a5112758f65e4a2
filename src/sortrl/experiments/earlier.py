"""Units of Figure 1 that were computed before, on whatever machine: kept as long as they are of today's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_object
from sortrl.core.identity import differences
from sortrl.runs.config import RobustifyConfig


def earlier_units(path: Path, scale: str) -> list[dict[str, Any]]:
    """The units of a figure as it was last written; none if there is no such file."""
    if not path.exists():
        return []
    figure = read_object(path)
    if figure.get("scale") != scale:
        raise SortRLError(
            f"{path} is a figure of scale {figure.get('scale')}; one of scale {scale} needs another --out."
        )
    found = figure.get("units")
    if not isinstance(found, list) or not all(isinstance(u, dict) and isinstance(u.get("unit"), dict) for u in found):
        raise SortRLError(f"{path} is not a figure made of units. Delete it, or name another --out.")
    return found


def is_current(stored: dict[str, Any] | None, config: RobustifyConfig | None) -> bool:
    """Whether settings as a unit has them in its file are those of today.

    >>> from sortrl.runs.config import robustify_config
    >>> from sortrl.core.identity import plain
    >>> config = robustify_config("CartPole-v1", 0.2, train_teacher=False)
    >>> stored = plain(config)
    >>> del stored["start_radius"]
    >>> is_current(stored, config), is_current(stored, robustify_config("CartPole-v1", 0.1, train_teacher=False))
    (True, False)
    """
    return not differences(stored, config)

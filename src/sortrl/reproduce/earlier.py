"""Units of Figure 1 that were computed before, on whatever machine: kept as long as they are of today's settings."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sortrl.config import RobustifyConfig, robustify_config
from sortrl.errors import SortRLError
from sortrl.files import read_object


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

    A file that is older than a setting does not mention it, and was made without it.

    >>> config = robustify_config("CartPole-v1", 0.2, train_teacher=False)
    >>> stored = asdict(config)
    >>> del stored["start_radius"]
    >>> is_current(stored, config), is_current(stored, robustify_config("CartPole-v1", 0.1, train_teacher=False))
    (True, False)
    """
    if stored is None or config is None:
        return stored is None and config is None
    off = robustify_config("", config.eps, config.preset, train_teacher=False)
    return _completed(_as_json(off), _as_json(stored)) == _as_json(config)


def _completed(base: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """What is stored, and for what is not mentioned what ``base`` says; without settings that were given up and were off."""
    result = {**base, **{name: value for name, value in stored.items() if name in base or value}}
    for name, value in base.items():
        if isinstance(value, dict) and isinstance(result[name], dict):
            result[name] = _completed(value, result[name])
    return result


def _as_json(config: RobustifyConfig | dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(asdict(config) if isinstance(config, RobustifyConfig) else config))
    return document

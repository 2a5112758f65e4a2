"""Observation statistics: our own files (safetensors or JSON), and VecNormalize, live or pickled.

A pickle is opened only on request, and even then arrays alone are taken from it: see :mod:`sortrl.teachers.load.pickles`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_json, read_tensors, regular_file, write_json, write_tensors
from sortrl.core.normalizer import Normalizer, stored_normalizer
from sortrl.teachers.load.pickles import Placeholder, read_arrays

FORMAT = "sortrl-normalizer-1"
_LARGEST_PICKLE = 64 * 2**20  # statistics of the largest images have a few megabytes


def save_normalizer(path: str | Path, normalizer: Normalizer) -> None:
    """Write a normaliser: readable JSON if the name ends in ``.json``, else safetensors."""
    clip = normalizer.clip if math.isfinite(normalizer.clip) else None
    if Path(path).suffix == ".json":
        mean, scale = normalizer.mean.tolist(), normalizer.scale.tolist()
        write_json(path, {"format": FORMAT, "mean": mean, "scale": scale, "clip": clip})
    else:
        write_tensors(path, {"mean": normalizer.mean, "scale": normalizer.scale}, {"format": FORMAT, "clip": clip})


def load_normalizer(path: str | Path, allow_pickle: bool = False) -> Normalizer:
    """Read what :func:`save_normalizer` wrote; a VecNormalize ``.pkl`` only with ``allow_pickle``."""
    path = Path(path)
    if path.suffix == ".json":
        fields: Any = read_json(path)
        tensors: Any = fields
    elif path.suffix == ".safetensors":
        tensors, fields = read_tensors(path)
    elif allow_pickle:
        content = regular_file(path, _LARGEST_PICKLE).read_bytes()
        return from_vecnormalize(read_arrays(content, str(path)), str(path))
    else:
        regular_file(path)
        raise SortRLError(
            f"{path} is a pickle. Opening one can run code hidden in it, so it is done only on request: if you trust "
            "where the file comes from, pass --allow-pickle (allow_pickle=True in Python). sortrl then reads arrays "
            "from it and nothing else; save them with save_normalizer to need the flag no more."
        )
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise SortRLError(f"{path} is not a saved normaliser (expected format {FORMAT!r}).")
    return stored_normalizer(tensors, fields, "", path)


def from_vecnormalize(stats: Any, where: str = "VecNormalize") -> Normalizer:
    """The normaliser inside a ``VecNormalize`` (or an object with its attributes): scale = sqrt(var + epsilon)."""
    if getattr(stats, "norm_obs", True) is False:
        raise SortRLError(f"{where} does not normalise observations (norm_obs is False). Leave it out.")
    rms = getattr(stats, "obs_rms", None)
    try:
        mean, var = getattr(rms, "mean", None), getattr(rms, "var", None)
        clip, epsilon = _number(getattr(stats, "clip_obs", 10.0)), _number(getattr(stats, "epsilon", 1e-8))
    except ValueError as error:  # an array or number of a pickle that cannot be made
        raise SortRLError(f"{where} is not a readable VecNormalize pickle ({str(error)[:200]}).") from error
    if not isinstance(mean, np.ndarray) or not isinstance(var, np.ndarray):
        attributes = stats.names() if isinstance(stats, Placeholder) else sorted(getattr(stats, "__dict__", {}))[:20]
        raise SortRLError(
            f"{where}: expected VecNormalize statistics with obs_rms.mean and obs_rms.var, found "
            f"{attributes or type(stats).__name__}."
        )
    if not epsilon >= 0 or math.isnan(clip) or not (var >= 0).all():
        raise SortRLError(
            f"{where}: clip_obs is {clip}, epsilon {epsilon} (nan: no number), and obs_rms.var must be 0 or more. "
            "It is damaged."
        )
    return Normalizer(mean, np.sqrt(var + epsilon), clip)


def _number(value: Any) -> float:
    """NaN for what is none, or beyond every float."""
    plain = isinstance(value, (float, np.number)) or (isinstance(value, int) and abs(value) < 2**63)
    return float(value) if plain else math.nan

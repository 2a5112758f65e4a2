"""Observation statistics: our own files (safetensors or JSON), and VecNormalize, live or pickled.

A pickle can run any code when it is opened. Ours are opened only on request, and even then by an unpickler that knows
numpy arrays and replaces every other class by an inert placeholder: old files that name ``gym`` load without it.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from sortrl.errors import SortRLError
from sortrl.files import read_json, read_tensors, write_json, write_tensors
from sortrl.normalizer import Normalizer

FORMAT = "sortrl-normalizer-1"
_MAX_PICKLE_BYTES = 256 * 2**20

# The only names looked up in a pickle: what numpy itself writes for arrays and numbers. numpy 2 renamed numpy.core,
# and files name either.
_CORE = "numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core"
_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("collections", "OrderedDict"),
    (f"{_CORE}.multiarray", "_reconstruct"),
    (f"{_CORE}.multiarray", "scalar"),
    (f"{_CORE}.numeric", "_frombuffer"),
}


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
    elif not path.is_file():
        raise SortRLError(f"Cannot read {path}: no such file.")
    elif allow_pickle:
        return from_vecnormalize(_unpickle(path), str(path))
    else:
        raise SortRLError(
            f"{path} is a pickle. Opening one can run code hidden in it, so it is done only on request: if you trust "
            "where the file comes from, pass --allow-pickle (allow_pickle=True in Python). sortrl then reads arrays "
            "from it and nothing else; save them with save_normalizer to need the flag no more."
        )
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise SortRLError(f"{path} is not a saved normaliser (expected format {FORMAT!r}).")
    try:
        return Normalizer(tensors["mean"], tensors["scale"], math.inf if fields["clip"] is None else fields["clip"])
    except (KeyError, TypeError) as error:
        raise SortRLError(f"{path} lacks or garbles a field of a normaliser ({error}).") from error


def from_vecnormalize(stats: Any, where: str = "VecNormalize") -> Normalizer:
    """The normaliser inside a ``VecNormalize`` (or an object with its attributes): scale = sqrt(var + epsilon)."""
    if getattr(stats, "norm_obs", True) is False:
        raise SortRLError(f"{where} does not normalise observations (norm_obs is False). Leave it out.")
    rms = getattr(stats, "obs_rms", None)
    mean, var = getattr(rms, "mean", None), getattr(rms, "var", None)
    if not isinstance(mean, np.ndarray) or not isinstance(var, np.ndarray):
        found = sorted(getattr(stats, "__dict__", {})) or type(stats).__name__
        raise SortRLError(
            f"{where}: expected VecNormalize statistics with obs_rms.mean and obs_rms.var, found {found}."
        )
    clip, epsilon = getattr(stats, "clip_obs", 10.0), getattr(stats, "epsilon", 1e-8)
    if (var < 0).any():
        raise SortRLError(f"{where}: obs_rms.var is negative in places; the file is damaged.")
    return Normalizer(mean, np.sqrt(var + float(epsilon)), float(clip))


class _Placeholder:
    """Stands for an object of a class we do not load: keeps its plain attributes, does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update({str(name): value for name, value in part.items()})

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        return _Placeholder()


class _ArrayUnpickler(pickle.Unpickler):
    """Knows numpy arrays; every other global becomes a placeholder, so nothing else is ever imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        module = re.sub(r"^numpy\._?core\b", _CORE, module)
        return super().find_class(module, name) if (module, name) in _ALLOWED else type(name, (_Placeholder,), {})


def _unpickle(path: Path) -> Any:
    if path.stat().st_size > _MAX_PICKLE_BYTES:
        raise SortRLError(
            f"{path} has {path.stat().st_size} bytes; statistics of observations are far smaller. Not opened."
        )
    try:
        return _ArrayUnpickler(io.BytesIO(path.read_bytes())).load()
    # A malformed pickle can raise nearly anything; whatever it is, the file is not what it should be.
    except Exception as error:
        raise SortRLError(f"{path} is not a readable VecNormalize pickle ({type(error).__name__}: {error}).") from error

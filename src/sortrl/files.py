"""Reading and writing: atomic, and never a pickle. A reader sees either the old file or the new one, whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from sortrl.errors import SortRLError


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same directory; rename it over ``path`` only if the block succeeds."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    except OSError as error:
        raise SortRLError(
            f"Cannot write {target}: {error.strerror or error}. Choose a directory you can write to."
        ) from error
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise SortRLError(
            f"Cannot write {target}: {error.strerror or error}. The previous file, if any, is intact."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what writers that were killed left behind. Only for who alone writes to ``directory``."""
    for temporary in directory.rglob(".*.tmp"):
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write strict JSON (no NaN): what we publish must be readable by every parser."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SortRLError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise SortRLError(f"{path} is not valid JSON ({error}). It may be damaged: write it again.") from error


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file whose metadata is one JSON document."""
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        safetensors.torch.save_file(contiguous, str(temporary), {"sortrl": json.dumps(metadata or {}, allow_nan=False)})


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote: tensors and metadata."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get("sortrl", "{}"))
            if not isinstance(metadata, dict):
                raise SortRLError(f"{path}: its metadata is not a JSON object. The file was not written by sortrl.")
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise SortRLError(f"Cannot read {path}: no such file.") from error
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        if isinstance(error, SortRLError):
            raise
        raise SortRLError(
            f"{path} is not a readable safetensors file ({error}). It may be damaged: write it again."
        ) from error

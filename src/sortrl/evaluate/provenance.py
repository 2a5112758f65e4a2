"""Where a result comes from: versions, machine, code revision. Every published figure carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from sortrl.ops import cpu

PACKAGES = ("torch", "numpy", "gymnasium", "stable-baselines3", "safetensors", "box2d", "triton")


def sortrl_version() -> str:
    return importlib.metadata.version("sortrl")


def versions() -> dict[str, str]:
    """Versions of Python, sortrl and what it stands on; absent packages are left out."""
    found = {"python": platform.python_version(), "sortrl": sortrl_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    revision = _revision()
    return found | ({"revision": revision} if revision else {})


def machine() -> dict[str, Any]:
    """Processor, cores, instruction set of the kernels, threads."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "isa": cpu.select().isa or "none",
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The git revision of a checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    run = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return run.stdout.strip() or None

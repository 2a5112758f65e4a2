"""What several commands share."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from sortrl.core.errors import SortRLError

if TYPE_CHECKING:
    from sortrl.core.pieces import Engine

MOST_THREADS = 1024


Import = Annotated[str | None, tyro.conf.arg(name="import")]
"""Option of commands that open a run: the module that registers its environment."""


def use_module(name: str | None) -> None:
    """Import what ``--import`` names. Nothing that a file says is imported."""
    from sortrl.core.modules import imported

    if name is not None:
        imported(name, "--import")


def led() -> AbstractContextManager[bool]:
    """:func:`sortrl.core.parallel.joined`, for which torch is imported only where ``torchrun`` started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return nullcontext(True)
    from sortrl.core.parallel import joined

    return joined()


def use_threads(threads: int | None) -> None:
    import torch

    from sortrl.core.parallel import processes_here

    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise SortRLError(f"--threads is {threads}, expected 1..{MOST_THREADS}.")
    torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // processes_here()))


def engine_of(workers: int | None, ray: tuple[str, ...] | None, usual: int, imports: str | None = None) -> Engine:
    """The engine that --workers and --ray name; every worker, this process included, has one thread."""
    from sortrl.core.pieces import Here
    from sortrl.core.workers import Processes, Ray

    if ray is not None:
        if workers is not None:
            raise SortRLError("--workers is for processes on this machine and --ray for a cluster; choose one.")
        if len(ray) > 1:
            raise SortRLError(f"--ray takes one address, or none: {' '.join(ray)}.")
        return Ray(ray[0] if ray else None, imports)
    count = usual if workers is None else workers
    return Here(threads=1) if count == 1 else Processes(count, imports)


def check_each_eps(policy: Any, env_id: str, eps: tuple[float, ...]) -> None:
    from sortrl.attacks.valid import check_eps
    from sortrl.envs import describe

    for size in eps:
        check_eps(policy, describe(env_id), size)


def output_folder(run: Path) -> Path:
    """Default folder for the files of a command: the run's folder, or runs/zoo-NAME for an entry of the zoo (or of the hub)."""
    from sortrl.nets import hub
    from sortrl.nets import zoo as entries

    elsewhere = entries.is_entry(run) or hub.is_repository(run)
    return Path("runs") / str(run).replace(":", "-").replace("/", "-") if elsewhere else run


def draw_off_screen() -> None:
    """Pictures are drawn into memory; a machine without a display must not be asked for one."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

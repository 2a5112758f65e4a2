"""Data-parallel training under ``torchrun``: each process computes its share of every batch, and all take the same steps.

One process, the leader, runs the command: it alone plays, measures, writes and reports. The others wait in :func:`joined` until
the leader calls them to a training (:func:`together`), and get from it all that they need, so they open no file. A training asks for
its rows of a batch (:func:`own`), for means over all of it (:func:`averaged`), and averages gradients before each step
(:func:`average_gradients`). With one process each of these gives back what it is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch import distributed as dist

from sortrl.core.errors import SortRLError
from sortrl.core.identity import fingerprint
from sortrl.core.progress import Progress

LONGEST_WAIT = timedelta(days=30)  # for the leader's next training: it may train a teacher first

J = TypeVar("J")
R = TypeVar("R")


@dataclass
class _Team:
    rank: int
    size: int
    device: torch.device
    orders: Any
    """The group for what the leader says: through CPU memory, and as slow as the leader is."""
    numbers: Any
    """The group for gradients and means."""
    broken: bool = False
    """Whether the leader stopped in the middle of a training, where nobody listens for orders."""


_joined: ContextVar[_Team | None] = ContextVar("joined", default=None)
_training: ContextVar[_Team | None] = ContextVar("training", default=None)


@contextmanager
def joined() -> Iterator[bool]:
    """Join the processes that ``torchrun`` started. The leader's block is run with True, while the others serve it; theirs with
    False, when it is done. Without ``torchrun`` there is only a leader."""
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        yield True
        return
    team = _formed()
    token = _joined.set(team)
    try:
        if team.rank == 0:
            yield True
        else:
            _serve(team)
            yield False
    finally:
        _joined.reset(token)
        if not team.broken:  # else the others notice that the connection ends
            if team.rank == 0:
                _say(team, None)
            dist.destroy_process_group()


def processes_here() -> int:
    """How many processes ``torchrun`` started on this machine: they share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1


def together(train: Callable[[J, Progress | None], R], job: J, progress: Progress | None = None) -> R:
    """``train(job, progress)`` here, and ``train(job, None)`` in every other process at the same time.

    ``train`` is a function of a module; the job, which is pickled for the others, has all that the training depends on.
    """
    team = _joined.get()
    if team is None or _training.get() is not None:
        return train(job, progress)
    _say(team, (train, job, torch.get_num_threads()))
    try:
        return _trained(team, train, job, progress)
    except BaseException:
        team.broken = True
        raise


def device() -> torch.device | None:
    """Where this process trains: its GPU, or the CPU where there is none; None leaves everything where it is."""
    team = _training.get()
    return None if team is None else team.device


def whole(rows: int) -> int:
    """Rows of the whole batch, of which this process has so many."""
    team = _training.get()
    return rows if team is None else rows * team.size


def own(batch: Tensor, groups: int = 1) -> Tensor:
    """This process's rows of a batch: equally many of each of ``groups`` equal parts of it."""
    team = _training.get()
    if team is None:
        return batch
    if len(batch) % (groups * team.size):
        raise SortRLError(
            f"A batch of {len(batch)} cannot be shared equally by {team.size} processes (it has {groups} groups of equal masks). "
            f"Choose a batch that is a multiple of {groups * team.size}, or another --nproc-per-node."
        )
    return batch.reshape(groups, team.size, -1, *batch.shape[1:])[:, team.rank].flatten(0, 1)


def drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Uniform numbers for this process's rows: those that one process would draw for them."""
    return own(torch.rand((whole(shape[0]), *shape[1:]), generator=generator))


def averaged(mean: Tensor) -> Tensor:
    """The mean over the whole batch, of the means over each process's rows; differentiable, on behalf of all processes."""
    team = _training.get()
    return mean if team is None else _Averaged.apply(mean, team)  # type: ignore[no-untyped-call]


def softmax(rows: Tensor) -> Tensor:
    """Softmax (rows,) over the whole batch, times the number of processes: so sums of shares are averaged to the sum of all."""
    team = _training.get()
    if team is None:
        return rows.softmax(0)
    parts = [torch.empty_like(rows) for _ in range(team.size)]
    dist.all_gather(parts, rows.contiguous(), group=team.numbers)
    return torch.cat(parts).softmax(0).chunk(team.size)[team.rank] * team.size


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Each process's gradient of the mean over its rows becomes that of the mean over all rows."""
    team = _training.get()
    if team is None:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    joint = _mean(torch.cat([gradient.flatten() for gradient in gradients]), team)
    for gradient, part in zip(gradients, torch.split(joint, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def check_same(model: nn.Module) -> None:
    """Refuse to go on if the processes' weights differ in a bit: they would average gradients of different networks."""
    team = _training.get()
    if team is None:
        return
    marks: list[Any] = [None] * team.size
    dist.all_gather_object(marks, str(fingerprint(model)), group=team.orders)
    if len(set(marks)) > 1:
        raise SortRLError(
            "The processes' networks are no longer the same: they do not compute alike. Use machines of one kind, with the same "
            "versions, and delete the training's checkpoint if it has one."
        )


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mean: Tensor, team: _Team) -> Tensor:
        ctx.team = team
        return _mean(mean, team)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every process's loss depends on every process's rows through this mean.
        return _mean(gradients[0], ctx.team), None


def _mean(numbers: Tensor, team: _Team) -> Tensor:
    total = numbers.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=team.numbers)
    return total / team.size


def _formed() -> _Team:
    rank, size, place = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    chosen = torch.device("cpu")
    if torch.cuda.is_available():
        if place >= torch.cuda.device_count():
            raise SortRLError(
                f"torchrun started {processes_here()} processes here, and there are {torch.cuda.device_count()} GPUs. Start at most "
                "one process per GPU, or hide them: CUDA_VISIBLE_DEVICES= torchrun ..."
            )
        chosen = torch.device("cuda", place)
        torch.cuda.set_device(chosen)
    dist.init_process_group("gloo", timeout=LONGEST_WAIT)
    numbers = dist.new_group(backend="nccl" if chosen.type == "cuda" else "gloo")
    return _Team(rank, size, chosen, dist.group.WORLD, numbers)


def _say(team: _Team, order: Any) -> None:
    dist.broadcast_object_list([None if order is None else cloudpickle.dumps(order)], src=0, group=team.orders)


def _serve(team: _Team) -> None:
    """The life of a process that is not the leader."""
    while True:
        said: list[Any] = [None]
        dist.broadcast_object_list(said, src=0, group=team.orders)
        if said[0] is None:
            return
        train, job, threads = cloudpickle.loads(said.pop())
        torch.set_num_threads(threads)
        team.broken = True  # if it fails, nobody is to be waited for
        try:
            _trained(team, train, job, None)
        except SortRLError:  # of the leader's too, who says it
            sys.exit(1)
        team.broken = False


def _trained(team: _Team, train: Callable[[J, Progress | None], R], job: J, progress: Progress | None) -> R:
    token = _training.set(team)
    try:
        return train(job, progress)
    finally:
        _training.reset(token)

"""The case about many pieces (:mod:`sortrl.core.pieces`): episodes under attack, one piece each, on as many workers as cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sortrl.attacks import PGD
from sortrl.core.pieces import Engine, Here, Piece, run_pieces
from sortrl.core.workers import Processes
from sortrl.evaluate.returns import evaluate
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import load_discrete
from sortrl.runs.measure import SLOTS

TASK, POLICY = "CartPole-v1", "zoo:cartpole"
EPISODES = 2  # of a piece: some seconds for all, so that starting a worker (torch is imported there) shows


def play(seed: int) -> list[float]:
    """One piece: the returns of some episodes under PGD-10."""
    result = evaluate(load_discrete(POLICY), TASK, PGD(10), 0.2, EPISODES, seed, slots=SLOTS)
    return [float(one) for one in result.returns]


def shared_out(pieces: int, workers: int, repeats: int) -> dict[str, Any]:
    """Seconds for all pieces on one worker per core and in this process (one thread each), the start of workers included."""

    def on(engine: Engine) -> Tensor:
        found: dict[int, list[float]] = {}
        todo = [Piece(f"episodes from {1000 * n}", 1000 * n) for n in range(pieces)]
        run_pieces(play, todo, lambda piece, returns: found.update({piece.what: returns}), engine)
        return torch.tensor([found[piece.what] for piece in todo])

    alone = Contender(lambda: on(Here(threads=1)))
    timing = take_turns(Contender(lambda: on(Processes(workers))), {"one process": alone}, repeats)
    best = timing.best_s
    return {
        "op": "pieces",
        "shape": [pieces, EPISODES, workers],
        "p": None,
        "ours_s": best["ours"],
        "median_s": timing.median_s["ours"],
        "rivals": {"one process": best["one process"]},
        "limit_s": None if best["one process"] is None else best["one process"] / workers,
        "wrong": sorted(disagreements(timing.first)),
        "notes": [f"{pieces} pieces of {EPISODES} episodes of {TASK} under PGD-10, {workers} processes", *timing.notes],
    }

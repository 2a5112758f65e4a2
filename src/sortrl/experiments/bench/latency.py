"""How long single decisions take: percentiles over many calls, alone and while other programs keep every core busy."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sortrl import ops
from sortrl.core.workers import cores
from sortrl.experiments.bench.images import ImageSize, student
from sortrl.experiments.bench.images import screens as drawn
from sortrl.experiments.bench.policies import ACTIONS, INPUTS, Size, make_policy
from sortrl.experiments.bench.timing import Contender, disagreements, take_turns
from sortrl.nets import SortPolicy

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
SPIN = "print(flush=True)\nwhile True: pass"  # a busy program


def percentiles(policy: SortPolicy, observations: npt.NDArray[Any], calls: int) -> dict[str, float]:
    """Seconds of single decisions, each about another observation."""
    seconds = np.empty(calls)
    for call in range(calls):
        obs = observations[call % len(observations)]
        start = time.perf_counter()
        policy.predict(obs)
        seconds[call] = time.perf_counter() - start
    found = {f"p{q:g}": float(np.percentile(seconds, q)) for q in PERCENTILES}
    return {"best": float(seconds.min()), **found, "worst": float(seconds.max())}


def under_load(policy: SortPolicy, observations: npt.NDArray[Any], calls: int) -> dict[str, float]:
    """The same while as many busy programs as there are cores compete."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) for _ in range(cores())]
    try:
        for one in busy:
            assert one.stdout is not None
            one.stdout.readline()
        return percentiles(policy, observations, calls)
    finally:
        for one in busy:
            one.kill()
            one.communicate()


def decision(name: str, policy: SortPolicy, observations: npt.NDArray[Any], calls: int, repeats: int) -> dict[str, Any]:
    """One decision, from raw observation to action: best of many, the definition beside it, and percentiles."""
    policy = policy.eval().requires_grad_(False)  # as every trained or loaded policy is

    def ours() -> torch.Tensor:
        return torch.tensor(policy.predict(observations[0])[0])

    def reference() -> torch.Tensor:
        with ops.use_backend("reference"):
            return ours()

    timing = take_turns(Contender(ours), {"reference": Contender(reference)}, repeats)
    best = timing.best_s
    return {
        "op": name,
        "shape": [1, int(np.prod(policy.obs_shape)), policy.n_actions],
        "p": None,
        "ours_s": best["ours"],
        "median_s": timing.median_s["ours"],
        "rivals": {"reference": best["reference"]},
        "limit_s": None,
        "wrong": sorted(disagreements(timing.first)),
        "notes": [
            f"{policy.config.depth} layers of {policy.config.width}; percentiles over {calls} calls",
            *timing.notes,
        ],
        "latency_s": percentiles(policy, observations, calls),
        "latency_under_load_s": under_load(policy, observations, calls),
    }


def decisions(size: Size, images: ImageSize, calls: int, repeats: int) -> list[dict[str, Any]]:
    """Of the policy of vectors, and of a student of images."""
    vectors = np.random.default_rng(0).normal(size=(64, INPUTS))
    return [
        decision("policy_infer", make_policy(size, inputs=INPUTS, actions=ACTIONS), vectors, calls, repeats),
        decision("policy_infer_images", student(images), drawn(64, images.side), calls, repeats),
    ]

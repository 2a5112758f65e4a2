"""The cases about students of images: screens of 84 x 84, three sort layers of 256 behind ramps, as distillation makes them.

The screens are drawn: a few colours, some of them moving, which is what ramps and kernels meet in a game; weights are random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.attacks import PGD, RIFGSMMulti
from sortrl.attacks.base import Attack
from sortrl.core.normalizer import Normalizer
from sortrl.distill import DistillConfig, fit, imitation_loss, margins, robust_loss
from sortrl.distill.config import EXPONENTS
from sortrl.experiments.bench import rivals
from sortrl.experiments.bench.operators import LIMIT_POWER8_TRAIN, Limits
from sortrl.experiments.bench.timing import Contender, Timing, disagreements, take_turns
from sortrl.nets import Centre, HybridPolicy, SortPolicy
from sortrl.ops import cpu

COLOURS = (0, 64, 142, 200)
EPS = 5 / 255
RAMP_WIDTH = 42 / 255
EXPONENTS_MEASURED = (EXPONENTS[0], 64.0, float("inf"))
KERNELS = ("max_forward", "max_backward", "lp_forward", "lp_backward", "sort_forward", "sort_backward", "all_finite")


@dataclass(frozen=True)
class ImageSize:
    """Of screens and of the students that see them."""

    side: int = 84
    width: int = 256
    depth: int = 3
    actions: int = 3
    batch: int = 512
    printed_width: int = 1280  # the paper's network for video games: that many units, in
    printed_depth: int = 6  # so many layers, and
    printed_head: tuple[int, ...] = (256, 256)  # linear ones behind them
    games: int = 64
    starts: int = 1000
    fit_steps: int = 30

    @property
    def inputs(self) -> int:
        return self.side**2


def screens(count: int, side: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pictures (count, 1, side, side) of a striped background over which squares move.

    >>> pictures = screens(3, 20)
    >>> pictures.shape, set(np.unique(pictures)) <= set(COLOURS)
    ((3, 1, 20, 20), True)
    """
    rng = np.random.default_rng(seed)
    background = np.repeat(np.array(COLOURS[:2], np.uint8)[np.arange(side) // 6 % 2, None], side, 1)
    pictures = np.broadcast_to(background, (count, 1, side, side)).copy()
    square = max(1, side // 10)
    for picture in pictures[:, 0]:
        for colour in (*COLOURS, *COLOURS):
            top, left = rng.integers(side - square, size=2)
            picture[top : top + square, left : left + square] = colour
    return pictures


def student(size: ImageSize, kind: type[SortPolicy] = SortPolicy) -> SortPolicy:
    """A student with random weights, a ramp for every pixel."""
    normalizer = Normalizer.from_pixels((1, size.side, size.side))
    policy = kind(
        (1, size.side, size.side),
        size.actions,
        size.width,
        size.depth,
        0.0,
        pixels=tuple(range(size.inputs)),
        ramp_width=RAMP_WIDTH,
        normalizer=normalizer,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in policy.layers:
            layer.weight.normal_(generator=generator)
        for part in policy.front:
            if isinstance(part, Centre):
                part.centres.copy_(torch.tensor(COLOURS[1:3]).float().mean() / 255)
    return policy


def printed(size: ImageSize) -> HybridPolicy:
    """The paper's network for video games, with random weights."""
    shape = (1, size.side, size.side)
    torch.manual_seed(0)
    normalizer = Normalizer.from_pixels(shape)
    return HybridPolicy(
        shape, size.actions, size.printed_width, size.printed_depth, hidden=size.printed_head, normalizer=normalizer
    )


class ImageStep:
    """Forward, backward and AdamW on one batch of screens, from bytes to weights, as a training does it."""

    def __init__(self, policy: SortPolicy | HybridPolicy, p: float, batch: int, cdist: bool = False) -> None:
        self.policy = policy.train().requires_grad_(True)
        self.trunk = policy.trunk
        self.trunk.p.fill_(p)
        self.scores = rivals.CdistPolicy(self.trunk).training_scores if cdist else self.trunk.training_scores
        self.obs = torch.from_numpy(screens(batch, policy.obs_shape[-1]))
        self.labels = torch.randint(policy.n_actions, (batch,), generator=torch.Generator().manual_seed(0))
        self.start = {name: value.clone() for name, value in policy.state_dict().items()}
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02, betas=(0.9, 0.99), eps=1e-10, fused=True)
        self.masks = torch.Generator()

    def restore(self) -> None:
        """Set the weights and the masks back, so that every step computes the same."""
        self.policy.load_state_dict(self.start)
        self.masks.manual_seed(0)

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        scores = self.scores(self.policy.normalize(self.obs), self.masks)
        outputs = scores
        if isinstance(self.policy, HybridPolicy):
            scores = self.policy.head(scores)
        imitation = imitation_loss(self.trunk.mu * scores, self.labels, scores.detach(), 0.0)
        (imitation + robust_loss(margins(scores, self.labels), 1.0)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return outputs.detach()


def elements(policy: SortPolicy | HybridPolicy, batch: int) -> float:
    """Distances of one coordinate that a step has to look at, on average over the masks."""
    total = 0.0
    layers = policy.trunk.layers
    for index, layer in enumerate(layers):
        kept_out = 1.0 - layers[index + 1].rho if index + 1 < len(layers) else 1.0
        total += batch * layer.weight.numel() * (1.0 - layer.rho) * kept_out
    return total


def train_step(name: str, size: ImageSize, repeats: int, limits: Limits, with_rival: bool) -> dict[str, Any]:
    """Seconds of a step at each of some exponents; what counts as ours is their mean. The limit is that of p = 8 for all."""
    make: Callable[[], SortPolicy | HybridPolicy] = (
        (lambda: student(size)) if name == "train_step_images" else (lambda: printed(size))
    )
    by_p, notes, wrong = {}, [], set[str]()
    for p in EXPONENTS_MEASURED:
        ours = ImageStep(make(), p, size.batch)
        others = {}
        if with_rival and p == EXPONENTS_MEASURED[0]:
            rival = ImageStep(make(), p, size.batch, cdist=True)
            others["cdist"] = Contender(rival, rival.restore)
        timing = take_turns(
            Contender(ours, ours.restore), others, repeats, each_turn=lambda: limits.sample(LIMIT_POWER8_TRAIN)
        )
        different = disagreements(timing.first)
        wrong |= set(different)
        notes += [f"p = {p:g}: {note}" for note in timing.notes + [f"{a}: {b}" for a, b in different.items()]]
        by_p[f"{p:g}"] = {
            "ours_s": timing.best_s["ours"],
            "median_s": timing.median_s["ours"],
            "rivals": {"cdist": timing.best_s.get("cdist")},
        }
    policy = make()
    rate = limits.rate.get(LIMIT_POWER8_TRAIN)
    first = by_p[f"{EXPONENTS_MEASURED[0]:g}"]
    notes.append(f"ours, rivals and the limit are those of p = {EXPONENTS_MEASURED[0]:g}; by_p has the others")
    if not with_rival:
        notes.append("cdist: not run, a step would take minutes")
    return {
        "op": name,
        "shape": [size.batch, size.inputs, size.actions],
        "p": EXPONENTS_MEASURED[0],
        "ours_s": first["ours_s"],
        "median_s": first["median_s"],
        "rivals": first["rivals"],
        "limit_s": None if rate is None else elements(policy, size.batch) / rate,
        "wrong": sorted(wrong),
        "notes": notes,
        "by_p": by_p,
    }


class EveryPixel(SortPolicy):
    """A policy that does not say which of its inputs count."""

    def near(self, lo: Tensor, hi: Tensor) -> None:
        return None


class AttackedScreens:
    """A call attacks what a policy is shown of all games."""

    def __init__(self, policy: SortPolicy, attack: Attack, count: int, side: int) -> None:
        self.policy, self.attack = policy.eval().requires_grad_(False), attack
        self.unit = policy.normalize(screens(count, side))

    def __call__(self) -> Tensor:
        return self.attack(self.policy, self.unit, EPS, generator=torch.Generator().manual_seed(0)).perturbed


def attacked(name: str, size: ImageSize, repeats: int) -> dict[str, Any]:
    """PGD-10 on many screens, or RI-FGSM from many starts on one."""
    attack, count = (PGD(10), size.games) if name == "attacked_images" else (RIFGSMMulti(size.starts), 1)
    ours = AttackedScreens(student(size), attack, count, size.side)
    rival = AttackedScreens(student(size, EveryPixel), attack, count, size.side)
    timing = take_turns(Contender(ours), {"every pixel": Contender(rival)}, repeats)
    wrong = disagreements(timing.first)
    wrong.pop("every pixel", None)  # draws fall on other pixels where they do not count
    return {
        "op": name,
        "shape": [count, size.inputs, size.actions],
        "p": None,
        "ours_s": timing.best_s["ours"],
        "median_s": timing.median_s["ours"],
        "rivals": {"every pixel": timing.best_s["every pixel"]},
        "limit_s": None,
        "wrong": sorted(wrong),
        "notes": [f"{attack.name} at {EPS * 255:g}/255 against {size.depth} layers of {size.width}", *timing.notes],
    }


@contextmanager
def kernel_seconds() -> Iterator[dict[str, float]]:
    """How long the kernels ran within the block, by name."""
    spent: dict[str, float] = {}
    before = {name: getattr(cpu, name) for name in KERNELS}

    def timed(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return before[name](*arguments)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

        return call

    try:
        for name in KERNELS:
            setattr(cpu, name, timed(name))
        yield spent
    finally:
        for name, function in before.items():
            setattr(cpu, name, function)


def distillation(size: ImageSize, repeats: int) -> dict[str, Any]:
    """Seconds per step of a whole distillation, from bytes to calibrated means, and the share that kernels take."""
    states = 4 * size.batch
    obs = torch.from_numpy(screens(states, size.side))
    labels = torch.randint(size.actions, (states,), generator=torch.Generator().manual_seed(0))
    config = DistillConfig(
        eps=EPS, steps=size.fit_steps, batch=size.batch // 2, learning_rate=0.08, warm_share=0.5, p_end=64.0
    )
    config = replace(config, final_share=0.1, mu_start=2.0, lambda_end=1.0)
    shares: list[dict[str, float]] = []

    def run() -> Tensor:
        policy = student(size)
        start = time.perf_counter()
        with kernel_seconds() as spent:
            fit(policy, obs, labels, config)
        shares.append({**spent, "whole": time.perf_counter() - start})
        return policy.bias.detach()

    timing: Timing = take_turns(Contender(run), {}, min(repeats, 5))
    best = min(shares, key=lambda share: share["whole"])
    inside = sum(seconds for name, seconds in best.items() if name != "whole")
    return {
        "op": "distill",
        "shape": [size.batch // 2, size.inputs, size.actions],
        "p": None,
        "ours_s": best["whole"] / size.fit_steps,
        "median_s": timing.median_s["ours"] / size.fit_steps,
        "rivals": {},
        "limit_s": None,
        "wrong": [],
        "notes": [f"{size.fit_steps} steps of a whole training of {size.depth} layers of {size.width} on screens"],
        "kernel_share": inside / best["whole"],
        "parts_s": {name: seconds / size.fit_steps for name, seconds in best.items()},
    }

"""Attacks on certified decisions of every kind of policy, just within their radii: not one action may change.

Policies are random and small, so that a million decisions take minutes of one core, and new ones for every block. Radii that are
too large are attacked as well: if no action changed there either, the attacks would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn

from sortrl import attacks
from sortrl.baselines.memory.remember import remember
from sortrl.core.files import read_object, write_json
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.evaluate import provenance
from sortrl.nets import CertifiedPolicy, HybridPolicy, SortPolicy, ThresholdPolicy

STATES = 4000  # per block
CLOSE, TOO_FAR = 0.999, 3.0  # of the radius
CONTROL = 10  # every so many states are attacked at radii that are too large
PARTS = (
    attacks.SaltAndPepper(),
    attacks.PGD(10),
    attacks.PGD(10, loss="margin", random_start=True),
    attacks.PGD(10, surrogate_p=8.0),
    attacks.RIFGSMMulti(5),
    attacks.Targeted(5, step_share=0.25),
    attacks.APGD("dlr", steps=10),
    attacks.Square(30),
)
ATTACK = attacks.Ensemble(PARTS, "siege")
Besieged = tuple[CertifiedPolicy, Tensor]


def _sort(seed: int) -> Besieged:
    policy = SortPolicy((6,), 4, width=16, depth=3, scale=(1.0, 2.5)[seed % 2])
    for layer in policy.layers:
        nn.init.normal_(layer.get_parameter("weight"))
    states = torch.randn(STATES, 6)
    policy.calibrate(states)
    return policy, states


def _hybrid(seed: int) -> Besieged:
    policy = HybridPolicy((6,), 4, width=16, depth=2, hidden=((), (12,), (12, 8))[seed % 3])
    states = torch.randn(STATES, 6)
    policy.calibrate(states)
    policy.trunk.bias.add_(policy.trunk.scores(states).mean(0))
    policy.head.layers[-1].get_parameter("bias").sub_(
        policy.scores(states).mean(0)
    )  # no action is favoured, so that there are borders
    return policy, states


def _rounded(seed: int) -> Besieged:
    """Pixels of four brightnesses, a little unequal, and thresholds between them."""
    shape, colours = (1, 6, 6), torch.tensor([0.1, 0.35, 0.6, 0.9])
    policy = ThresholdPolicy(shape, 3, 2, ((4, 3, 1),), (8,), norm=bool(seed % 2))
    gaps = (colours[1:] + colours[:-1])[torch.randint(3, (2, *shape))] / 2
    policy.rounding.thresholds.copy_((gaps + 0.05 * torch.randn(2, *shape)).sort(0).values)
    states = colours[torch.randint(4, (STATES, *shape))] + 0.02 * torch.rand(STATES, *shape)
    policy.head.layers[-1].get_parameter("bias").sub_(policy.scores(states).mean(0))
    return policy, states


def _memory(seed: int) -> Besieged:
    shape = ((6,), (1, 5, 5))[seed % 2]
    seen = torch.rand(40, *shape).numpy()
    answers = np.arange(40) % 3
    demos = Demonstrations("Any-v0", seen, answers, np.zeros((40, 3), np.float32), np.zeros(40, np.int64))
    policy = remember(demos, Normalizer.identity(shape))
    return policy, torch.from_numpy(seen)[torch.randint(40, (STATES,))] + 0.2 * torch.randn(STATES, *shape)


KINDS: dict[str, Callable[[int], Besieged]] = {
    "sort": _sort,
    "hybrid": _hybrid,
    "rounded": _rounded,
    "memory": _memory,
}


class Counts(TypedDict):
    """Decisions attacked, within their radii and beyond, and how many actions changed."""

    attacked: int
    changed: int
    attacked_too_far: int
    changed_too_far: int


class Block(Counts):
    """One policy and its states."""

    kind: str
    actions: int
    """Different ones among the states."""
    revision: str


class OfKind(Counts):
    policies: int


class SiegeFound(TypedDict):
    """What a siege has found so far."""

    decisions: int
    wanted: int
    seed: int
    attacks: list[str]
    share_of_the_radius: float
    changed: int
    radii_too_large_by: float
    attacked_too_far: int
    changed_too_far: int
    by_kind: dict[str, OfKind]
    revisions: list[str]


def siege(decisions: int, seed: int, work: Path | None = None) -> Iterator[SiegeFound]:
    """Attack at least ``decisions`` certified decisions, block by block over the kinds; a block depends on the seed and its
    number alone. Yields what was found so far after every block. Finished blocks are kept in ``work``, and the same call goes
    on after them.
    """
    blocks: list[Block] = []
    revision = provenance.versions().get("revision", "unknown")  # asked now: what is committed later is not what runs
    while sum(block["attacked"] for block in blocks) < decisions or len(blocks) % len(KINDS):
        kept = None if work is None else work / f"siege-{seed}-{len(blocks)}.json"
        if kept is not None and kept.exists():
            blocks.append(cast(Block, read_object(kept)))
            continue
        blocks.append(block(seed, len(blocks), revision))
        if kept is not None:
            write_json(kept, blocks[-1])
        yield _joined(blocks, decisions, seed)
    yield _joined(blocks, decisions, seed)


def block(seed: int, number: int, revision: str = "unknown", factor: float = 1.0) -> Block:
    """One policy and its states, attacked by the code of a ``revision``. With another ``factor``,
    radii are claimed to be so many times what they are."""
    kind = list(KINDS)[number % len(KINDS)]
    generator = torch.Generator().manual_seed(number)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))
        policy, states = KINDS[kind](number // len(KINDS))
        policy.eval().requires_grad_(False)
    certificate = policy.certify_unit(states)
    radius = factor * torch.from_numpy(certificate.radius)
    certified = radius > 0
    states, radius = states[certified], radius[certified]
    some = slice(None, None, CONTROL)
    return {
        "kind": kind,
        "actions": len(np.unique(certificate.action)),
        "attacked": len(states),
        "changed": int(ATTACK(policy, states, CLOSE * radius, generator=generator).changed.sum()),
        "attacked_too_far": len(states[some]),
        "changed_too_far": int(ATTACK(policy, states[some], TOO_FAR * radius[some], generator=generator).changed.sum()),
        "revision": revision,
    }


def _summed(parts: Sequence[Counts]) -> Counts:
    return {
        "attacked": sum(part["attacked"] for part in parts),
        "changed": sum(part["changed"] for part in parts),
        "attacked_too_far": sum(part["attacked_too_far"] for part in parts),
        "changed_too_far": sum(part["changed_too_far"] for part in parts),
    }


def _joined(blocks: list[Block], decisions: int, seed: int) -> SiegeFound:
    by_kind: dict[str, OfKind] = {}
    for kind in KINDS:
        parts = [block for block in blocks if block["kind"] == kind]
        by_kind[kind] = {"policies": len(parts), **_summed(parts)}
    total = _summed(blocks)
    return {
        "decisions": total["attacked"],
        "wanted": decisions,
        "seed": seed,
        "attacks": [attack.name for attack in PARTS],
        "share_of_the_radius": CLOSE,
        "changed": total["changed"],
        "radii_too_large_by": TOO_FAR,
        "attacked_too_far": total["attacked_too_far"],
        "changed_too_far": total["changed_too_far"],
        "by_kind": by_kind,
        "revisions": sorted({block["revision"] for block in blocks}),
    }

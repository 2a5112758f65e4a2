"""Sets of attacks: by name, to be reported one by one (:func:`suite`), or as a single attack (:class:`Ensemble`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from sortrl.attacks.apgd import APGD
from sortrl.attacks.base import Attack, Target
from sortrl.attacks.gradient import FGSM, PGD, RIFGSM, RIFGSMMulti, RIFGSMMultiT, Targeted
from sortrl.attacks.noise import GaussianNoise, SaltAndPepper, SensorDropout, UniformNoise
from sortrl.attacks.square import Square
from sortrl.attacks.values import MinBest, MinQ, Transfer
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy

SuiteName = Literal["quick", "paper", "auto", "full"]
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)


@dataclass(frozen=True)
class Ensemble(Attack):
    """Runs ``members`` in order (cheap ones first), each on the states that no earlier member has broken.

    It breaks every state that some member breaks alone: member i draws from a generator of its own, the i-th of
    :meth:`generators`, and what it does to one state does not depend on the others. (Exact up to the last bit
    of the scores, which may depend on the batch size.)
    """

    members: tuple[Attack, ...]
    name: str = "ensemble"

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", tuple(self.members))
        wrong = [type(member).__name__ for member in self.members if not isinstance(member, Attack)]
        if wrong or not self.members:
            raise SortRLError(f"Ensemble: members are {wrong or 'missing'}, expected one or more attacks.")

    @property
    def needs_gradient(self) -> bool:
        return any(member.needs_gradient for member in self.members)

    def generators(self, generator: torch.Generator | None) -> list[torch.Generator]:
        """One per member, from one draw of ``generator`` and the member's place."""
        seed = int(torch.randint(1 << 62, (), generator=generator))
        return [torch.Generator().manual_seed(seed + place) for place in range(len(self.members))]

    def search(self, target: Target) -> Tensor:
        found, left = target.unit.clone(), torch.arange(len(target))
        for member, generator in zip(self.members, self.generators(target.generator), strict=True):
            part = replace(target.subset(left), generator=generator)
            found[left] = part.project(member.search(part))
            left = left[~part.changed(found[left])]
            if len(left) == 0:
                break
        return found


def auto(steps: int = 30, queries: int = 300) -> Ensemble:
    """The suite to quote: PGD, PGD along smooth surrogates, targeted PGD, Auto-PGD on two losses, and Square.

    >>> [member.name for member in auto().members]
    ['PGD-30', 'PGD-30-p8', 'PGD-30-p32', 'PGD-30-p128', 'Targeted-30', 'APGD-CE-30', 'APGD-DLR-30', 'Square-300']
    """
    surrogates = [PGD(steps, surrogate_p=p) for p in (8.0, 32.0, 128.0)]
    adaptive = [APGD(loss, steps) for loss in ("ce", "dlr")]
    return Ensemble((PGD(steps), *surrogates, Targeted(steps), *adaptive, Square(queries)), "auto")


def suite(name: str, teacher: Policy | None = None) -> dict[str, Attack]:
    """The attacks of a suite by their names. Without ``teacher``, those that need one are left out.

    ``quick`` takes seconds; ``paper`` are those that SortRL and BCL report; ``auto`` is the ensemble and each of its members;
    ``full`` is all of these, noise, and attacks on action values. (:func:`sortrl.evaluate.suite.evaluate_suite` adds timed attacks
    and a learned adversary to ``full``.)

    >>> list(suite("paper"))
    ['PGD-10', 'PGD-30', 'FGSM', 'RI-FGSM', 'RI-FGSM-Multi']
    """
    if name not in SUITES:
        raise SortRLError(f"Unknown suite {name!r}; choose one of {', '.join(SUITES)}.")
    if name == "full":
        noises = [UniformNoise(), GaussianNoise(), SensorDropout(), SaltAndPepper()]
        values = [] if teacher is None else [MinQ(teacher, surrogate_p=32.0)]
        parts = {key: attack for part in ("quick", "paper", "auto") for key, attack in suite(part, teacher).items()}
        return parts | _named([*noises, MinBest(), MinBest(surrogate_p=32.0), *values])
    if name == "paper":
        by_value: list[Attack] = [] if teacher is None else [RIFGSMMultiT(teacher)]
        return _named([PGD(10), PGD(30), FGSM(), RIFGSM(), RIFGSMMulti(), *by_value])
    if name == "auto":
        together = auto()
        return _named([*together.members, together])
    return _named(
        [
            UniformNoise(),
            PGD(10),
            PGD(10, surrogate_p=32.0),
            APGD("ce", 10),
            Square(50),
            *([] if teacher is None else [MinQ(teacher), *_transfer(teacher)]),
        ]
    )


def is_black_box(policy: object) -> bool:
    """Whether the policy gives only actions, no gradients."""
    return not isinstance(policy, Policy) or getattr(policy, "algorithm", None) == "callable"


def _transfer(teacher: Policy) -> list[Attack]:
    return [] if is_black_box(teacher) else [Transfer(teacher, PGD(10))]


def _named(attacks: list[Attack]) -> dict[str, Attack]:
    return {attack.name: attack for attack in attacks}

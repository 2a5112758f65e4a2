"""Named sets of attacks: what to run when the question is not "how good is this attack" but "does the policy hold"."""

from __future__ import annotations

from typing import Literal, get_args

from sortrl.attacks.apgd import APGD
from sortrl.attacks.base import Attack
from sortrl.attacks.ensemble import auto
from sortrl.attacks.gradient import FGSM, PGD, RIFGSM, RIFGSMMulti, RIFGSMMultiT
from sortrl.attacks.noise import GaussianNoise, SaltAndPepper, SensorDropout, UniformNoise
from sortrl.attacks.square import Square
from sortrl.attacks.values import MinBest, MinQ, Transfer
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy

SuiteName = Literal["quick", "paper", "auto", "full"]
SUITES: tuple[SuiteName, ...] = get_args(SuiteName)


def suite(name: str, teacher: Policy | None = None) -> dict[str, Attack]:
    """The attacks of a suite by their names. Without ``teacher``, those that need one are left out.

    ``quick`` takes seconds; ``paper`` are those that SortRL and BCL report; ``auto`` is the ensemble and each of its members;
    ``full`` is all of these, the noises and what aims at values. (:func:`sortrl.evaluate.suite.evaluate_suite` adds to ``full`` what
    depends on time or must be trained.)

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
    """Whether only answers of the policy are to be had, no gradients."""
    return not isinstance(policy, Policy) or getattr(policy, "algorithm", None) == "callable"


def _transfer(teacher: Policy) -> list[Attack]:
    return [] if is_black_box(teacher) else [Transfer(teacher, PGD(10))]


def _named(attacks: list[Attack]) -> dict[str, Attack]:
    return {attack.name: attack for attack in attacks}

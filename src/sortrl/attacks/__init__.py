"""Adversaries on observations. One verified boundary (:class:`Attack`); subclasses only search."""

from sortrl.attacks.base import Attack
from sortrl.attacks.gradient import FGSM, PGD, UniformNoise
from sortrl.errors import SortRLError

__all__ = ["FGSM", "PGD", "Attack", "UniformNoise", "by_name"]


def by_name(name: str) -> Attack:
    """The attack a user means: ``fgsm``, ``noise``, ``pgd-10`` or ``pgd-<steps>``.

    >>> by_name("pgd-30").name
    'PGD-30'
    """
    lowered = name.lower()
    if lowered == "fgsm":
        return FGSM()
    if lowered == "noise":
        return UniformNoise()
    if lowered.startswith("pgd-") and lowered[4:].isdigit() and int(lowered[4:]) > 0:
        return PGD(steps=int(lowered[4:]))
    raise SortRLError(f"Unknown attack {name!r}; choose fgsm, noise or pgd-<steps> (for example pgd-10).")

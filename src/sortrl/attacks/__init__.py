"""Attacks on observations. :class:`Attack` projects every result to the eps ball and checks it; subclasses only search."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from sortrl.attacks.apgd import APGD
from sortrl.attacks.base import Attack
from sortrl.attacks.gradient import FGSM, PGD, RIFGSM, RIFGSMMulti, RIFGSMMultiT, Targeted
from sortrl.attacks.learned import LearnedAdversary, train_adversary
from sortrl.attacks.noise import GaussianNoise, SaltAndPepper, SensorDropout, UniformNoise
from sortrl.attacks.square import Square
from sortrl.attacks.suites import SUITES, Ensemble, auto, suite
from sortrl.attacks.uncertified import WhereUncertified
from sortrl.attacks.values import Aimed, MinBest, MinQ, Transfer
from sortrl.core.errors import SortRLError
from sortrl.core.modules import imported

__all__ = [
    "APGD",
    "FGSM",
    "PGD",
    "RIFGSM",
    "SUITES",
    "Aimed",
    "Attack",
    "Ensemble",
    "GaussianNoise",
    "LearnedAdversary",
    "MinBest",
    "MinQ",
    "RIFGSMMulti",
    "RIFGSMMultiT",
    "SaltAndPepper",
    "SensorDropout",
    "Square",
    "Targeted",
    "Transfer",
    "UniformNoise",
    "WhereUncertified",
    "auto",
    "by_name",
    "names",
    "suite",
    "train_adversary",
]

_TAIL = r"(-p(?P<surrogate_p>\d+))?(-s(?P<step_share>\d*\.?\d+))?(-(?P<random_start>random))?(-r(?P<restarts>\d+))?"
_PGD = r"pgd-(?P<steps>\d+)(-(?P<loss>margin|dlr))?" + _TAIL
_APGD = r"apgd-(?P<loss>ce|margin|dlr)(-(?P<steps>\d+))?(-p(?P<surrogate_p>\d+))?(-r(?P<restarts>\d+))?"
_NUMBERS = ("steps", "restarts", "starts", "queries")

_BY_NAME: dict[str, tuple[str, Callable[..., Attack]]] = {
    "fgsm": ("fgsm", FGSM),
    "pgd-10": (_PGD, PGD),
    "pgd-10-margin": (_PGD, PGD),
    "pgd-10-dlr": (_PGD, PGD),
    "pgd-10-p32": (_PGD, PGD),
    "targeted": (r"targeted(-(?P<steps>\d+))?(-s(?P<step_share>\d*\.?\d+))?", Targeted),
    "ri-fgsm": ("ri-fgsm", RIFGSM),
    "ri-fgsm-multi": (r"ri-fgsm-multi(-(?P<starts>\d+))?", RIFGSMMulti),
    "apgd-ce": (_APGD, APGD),
    "apgd-dlr": (_APGD, APGD),
    "minbest-10": (r"minbest-(?P<steps>\d+)(-p(?P<surrogate_p>\d+))?", MinBest),
    "square": (r"square(-(?P<queries>\d+))?", Square),
    "auto": ("auto", auto),
    "noise": ("noise", UniformNoise),
    "gaussian": ("gaussian", GaussianNoise),
    "dropout": ("dropout", SensorDropout),
    "salt-and-pepper": ("salt-and-pepper", SaltAndPepper),
}
"""Registry: an example name, the pattern of the names it stands for, and the class or function that builds the attack."""


def names() -> tuple[str, ...]:
    """One example name per kind of attack that :func:`by_name` builds."""
    return tuple(_BY_NAME)


def by_name(name: str) -> Attack:
    """Build an attack from its name. Numbers may be changed: ``pgd-30``, ``pgd-30-margin-p8-r4``, ``square-500``.

    After the number of steps, PGD takes a loss (``margin``, ``dlr``), ``p8`` (a finite-p surrogate), ``s0.2`` (steps of
    0.2 eps), ``random`` (a random first start) and ``r4`` (restarts), in this order. ``module:Class`` is an attack of your own.

    >>> by_name("pgd-30").name
    'PGD-30'
    >>> by_name("pgd-20-dlr-r4")
    PGD(steps=20, step_share=0.1, restarts=4, random_start=False, loss='dlr', surrogate_p=None)
    """
    if ":" in name:
        return _own(name)
    lowered = name.lower()
    for pattern, build in _BY_NAME.values():
        match = re.fullmatch(pattern, lowered)
        if match:
            given = {part: text for part, text in match.groupdict().items() if text is not None}
            return build(**{part: _value(part, text) for part, text in given.items()})
    near = difflib.get_close_matches(lowered, _BY_NAME, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise SortRLError(
        f"Unknown attack {name!r}.{hint} Choose {', '.join(_BY_NAME)}; numbers may be changed. An attack of "
        "your own is module:Class."
    )


def _own(name: str) -> Attack:
    """An attack of the user's: a class, or something else that gives an :class:`Attack` when it is called."""
    module, _, part = name.partition(":")
    make = getattr(imported(module, f"the attack {part}"), part, None)
    try:
        attack = make() if callable(make) else make
    except TypeError as error:
        raise SortRLError(f"{name} cannot be made without arguments ({error}). Give them defaults.") from error
    if not isinstance(attack, Attack):
        raise SortRLError(
            f"{name} is {type(attack).__name__}, expected a subclass of sortrl.attacks.Attack in the module {module}."
        )
    return attack


def _value(part: str, text: str) -> str | int | float:
    if part == "loss":
        return text
    if part == "random_start":
        return True
    return int(text) if part in _NUMBERS else float(text)

"""Several attacks as one: a state counts as broken when any of them breaks it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sortrl.attacks.apgd import APGD
from sortrl.attacks.base import Attack, Target
from sortrl.attacks.gradient import PGD, Targeted
from sortrl.attacks.square import Square
from sortrl.core.errors import SortRLError


@dataclass(frozen=True)
class Ensemble(Attack):
    """Runs ``members`` in order, best from cheap to dear, each on the states that none before it has broken.

    It breaks every state that some member breaks alone: member i draws from a generator of its own, the i-th of
    :meth:`generators`, and what it does to one state does not depend on the others. (For a policy whose scores of a
    state change in the last bit with the size of the batch, as matrix products do, up to that.)
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

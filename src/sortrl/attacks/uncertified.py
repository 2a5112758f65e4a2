"""Wrapper that skips the states in which a certificate proves that no attack can succeed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sortrl.attacks.base import Attack, Target


@dataclass(frozen=True)
class WhereUncertified(Attack):
    """Runs ``attack`` on the states that the policy does not certify at eps, and leaves the others as they are.

    No perturbation within eps changes the action there, so the episode is the same as under the attack itself, at a fraction
    of the cost where most states are certified. It relies on the certificate; to test certificates, attack every state.
    A policy without certificates is attacked everywhere.

    >>> from sortrl.attacks import PGD
    >>> WhereUncertified(PGD(30)).name
    'PGD-30'
    """

    attack: Attack

    @property
    def name(self) -> str:
        return self.attack.name

    @property
    def needs_gradient(self) -> bool:
        return self.attack.needs_gradient

    def search(self, target: Target) -> Tensor:
        certify = getattr(target.counter.policy, "certify_unit", None)
        if certify is None:
            return self.attack.search(target)
        # eps in float32 may lie just below what was asked for.
        reached = torch.nextafter(target.eps.flatten(), torch.tensor(torch.inf)).double()
        open_states = torch.from_numpy(certify(target.unit, reached).radius) <= reached
        found = target.unit.clone()
        if bool(open_states.any()):
            found[open_states] = self.attack.search(target.subset(open_states))
        return found

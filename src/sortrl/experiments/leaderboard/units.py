"""An agent behind the units of a protocol, in which every agent meets the same adversary."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.attacks.values import action_values
from sortrl.certify.units import raw_radii
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Certificate, Policy
from sortrl.distill import in_units as teacher_in_units
from sortrl.nets import CertifiedPolicy
from sortrl.teachers import Teacher

ROUNDED = 1e-9  # relative; many times what float64 loses between the units of a protocol and raw ones


class InUnits:
    """A policy whose unit space is that of ``units``: attacks move raw observations by ``eps * units.scale``, whatever the
    policy's own normalisation, clip included, makes of them. It satisfies :class:`sortrl.core.records.Policy`.

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((2,), 2, width=8, depth=2, normalizer=Normalizer([1.0, 0.0], [2.0, 0.5]))
    >>> same = InUnits(policy, Normalizer([0.0, 0.0], [1.0, 10.0]))
    >>> bool((same.scores(same.normalize([[3.0, 4.0]])) == policy.scores(policy.normalize([[3.0, 4.0]]))).all())
    True
    """

    def __init__(self, policy: Policy, units: Normalizer) -> None:
        self.policy, self.normalizer = policy, units
        self.name = str(getattr(policy, "name", type(policy).__name__))
        self.algorithm = getattr(policy, "algorithm", None)

    @property
    def n_actions(self) -> int:
        return self.policy.n_actions

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return self.policy.obs_shape

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        unit: Tensor = self.normalizer(obs)
        return unit

    def scores(self, unit: Tensor) -> Tensor:
        return self.policy.scores(self._own(unit))

    def values(self, unit: Tensor) -> Tensor:
        return action_values(self.policy, self._own(unit))

    @property
    def surrogate_scores(self) -> Any:
        """Only of policies that have smooth surrogates."""
        smooth: Any = self.policy.surrogate_scores  # type: ignore[attr-defined]
        return lambda unit, p: smooth(self._own(unit), p)

    @property
    def certify_unit(self) -> Any:
        """Only of policies with certificates."""
        if not isinstance(self.policy, CertifiedPolicy):
            raise AttributeError("certify_unit")
        return self._certify

    def _own(self, unit: Tensor) -> Tensor:
        return self.policy.normalize(self.normalizer.to_raw(unit))

    @torch.no_grad()
    def _certify(self, unit: Tensor) -> Certificate:
        """From the margin alone: an eps here is a box in the policy's own unit space, and its longest side counts."""
        assert isinstance(self.policy, CertifiedPolicy)
        raw = self.normalizer.to_raw(unit)
        found = self.policy.certify(raw)
        scale = self.normalizer.scale.numpy()
        radius = (raw_radii(self.policy, raw) / scale).reshape(len(raw), -1).min(1) * (1.0 - ROUNDED)
        # Raw values are rounded too, by a share of their size.
        slack = (np.abs(raw.numpy()) / scale).reshape(len(raw), -1).max(1) * ROUNDED
        return Certificate(found.action, np.maximum(radius - slack, 0.0), found.runner_up)


def in_units(policy: Policy, units: Normalizer) -> Policy:
    """The policy itself if these are its units, with the speed and certificates that it has; else restated in them."""
    if isinstance(policy, Teacher):
        return teacher_in_units(policy, units)
    own = getattr(policy, "normalizer", None)
    same = isinstance(own, Normalizer) and torch.equal(own.mean, units.mean) and torch.equal(own.scale, units.scale)
    return policy if same else InUnits(policy, units)

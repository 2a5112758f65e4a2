"""Common sense about attacks: a policy that breaks none of these rules is robust or weak; one that does may only look robust.

Masked gradients (Athalye et al., 2018) make attacks fail without making the policy safe. Each check is a symptom of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.attacks import APGD, PGD, Attack, Ensemble, Square, Targeted, UniformNoise, losses
from sortrl.attacks.base import Counter
from sortrl.attacks.suites import is_black_box
from sortrl.attacks.valid import valid_range
from sortrl.core.errors import SortRLError
from sortrl.core.records import Policy
from sortrl.envs import EnvSlots, Episode, describe, play_episodes
from sortrl.nets import CertifiedPolicy

SLACK = 0.02  # share of the states that may go the other way: searches are heuristic, and some are random
NEARLY_ALL = 0.95
SQUARE_QUERIES = 200
Broken = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Check:
    """A rule, whether it held, and the figures that say so."""

    name: str
    passed: bool
    evidence: str


def check_attacks(
    policy: Policy,
    unit: Tensor,
    eps_unit: float,
    low: Tensor | None = None,
    high: Tensor | None = None,
    seed: int = 0,
) -> list[Check]:
    """Attack unit-space states in many ways and compare. ``eps_unit`` should be large enough to break some of them."""
    if is_black_box(policy):
        raise SortRLError("check_attacks: this policy gives no gradients, so there are none that could be masked.")
    if not 0 < eps_unit < float("inf") or len(unit) == 0:
        raise SortRLError(
            f"check_attacks: eps={eps_unit} and {len(unit)} states; expected a finite eps > 0 and at least one state."
        )

    def broken(attack: Attack, eps: float | Tensor = eps_unit) -> Broken:
        return attack(policy, unit, eps, low, high, torch.Generator().manual_seed(seed)).changed

    white_box = Ensemble((PGD(10), PGD(10, surrogate_p=32.0), APGD("ce", 20), Targeted(10)), "gradient attacks")
    checks = [
        _gradients_exist(policy, unit),
        _grows_with_eps(broken, eps_unit),
        _never_weaker("more steps", broken(PGD(10)), broken(PGD(30)), "PGD-10", "PGD-30"),
        _never_weaker("restarts", broken(PGD(10)), broken(PGD(10, restarts=4)), "PGD-10", "PGD-10-r4"),
        _never_weaker("more members", broken(PGD(10)), broken(white_box), "PGD-10", white_box.name),
        _stronger("gradients beat random search", broken(white_box), broken(Square(SQUARE_QUERIES)), "Square"),
        _stronger("an attack beats noise", broken(white_box), broken(UniformNoise()), "noise"),
        _breaks_when_unbounded(policy, unit, broken, white_box),
    ]
    if isinstance(policy, CertifiedPolicy):
        checks.append(_certificates_hold(policy, unit, broken, white_box))
    return checks


def visited_states(policy: Policy, env_id: str, states: int = 500, seed: int = 0, slots: int = 16) -> Tensor:
    """Unit-space states of greedy episodes, played side by side."""
    seen: list[npt.NDArray[np.generic]] = []

    def act(episodes: list[Episode]) -> npt.NDArray[np.int64] | None:
        if len(seen) >= states:
            return None
        now = [episode.obs for episode in episodes]
        seen.extend(now)
        with torch.no_grad():
            actions: npt.NDArray[np.int64] = policy.scores(policy.normalize(np.stack(now))).argmax(1).numpy()
        return actions

    with EnvSlots(env_id, slots) as envs:
        play_episodes(envs, count(seed * 1_000_000), act, Episode)
    return policy.normalize(np.stack(seen[:states]))


def check_run(policy: Policy, env_id: str, eps_unit: float, states: int = 500, seed: int = 0) -> list[Check]:
    """:func:`check_attacks` on states that the policy itself visits, within the valid range of observations."""
    low, high = valid_range(policy, describe(env_id))
    return check_attacks(policy, visited_states(policy, env_id, states, seed), eps_unit, low, high, seed)


def _gradients_exist(policy: Policy, unit: Tensor) -> Check:
    counter = Counter(policy)
    clean = counter.scores(unit).argmax(1)
    gradient = counter.gradient(unit, losses.cross_entropy(clean)).flatten(1)
    share = float(((gradient != 0).any(1) & torch.isfinite(gradient).all(1)).float().mean())
    return Check("gradients do not vanish", share >= NEARLY_ALL, f"{share:.1%} of the states have a gradient to follow")


def _grows_with_eps(broken: Callable[[Attack, float], Broken], eps_unit: float) -> Check:
    sizes = [eps_unit * factor for factor in (0.25, 0.5, 1.0, 2.0)]
    shares = [float(broken(PGD(10), eps).mean()) for eps in sizes]
    evidence = ", ".join(f"{share:.1%} at {eps:.3g}" for eps, share in zip(sizes, shares, strict=True))
    passed = all(after >= before - SLACK for before, after in pairwise(shares))
    return Check("success grows with eps", passed, f"PGD-10 changes {evidence}")


def _never_weaker(what: str, less: Broken, more: Broken, less_name: str, more_name: str) -> Check:
    lost = float((less & ~more).mean())
    figures = f"{less_name} changes {less.mean():.1%}, {more_name} {more.mean():.1%}"
    return Check(f"{what} never weaken an attack", lost == 0, f"{figures}; only the weaker changes {lost:.1%}")


def _stronger(name: str, strong: Broken, weak: Broken, weak_name: str) -> Check:
    passed = float(strong.mean()) >= float(weak.mean()) - SLACK
    return Check(name, passed, f"gradient attacks change {strong.mean():.1%}, {weak_name} {weak.mean():.1%}")


def _breaks_when_unbounded(
    policy: Policy, unit: Tensor, broken: Callable[[Attack, float], Broken], attack: Attack
) -> Check:
    """With eps as large as the distance between any two of the states, each can be turned into any other."""
    name = "an unbounded attack changes nearly all"
    with torch.no_grad():
        actions = policy.scores(unit).argmax(1)
    if bool((actions == actions[0]).all()):
        return Check(name, True, "does not apply: the policy plays one action in all of these states")
    reach = float((unit.amax(0) - unit.amin(0)).max())
    share = float(broken(attack, reach).mean())
    return Check(name, share >= NEARLY_ALL, f"{share:.1%} change at eps {reach:.3g}, which reaches every other state")


def _certificates_hold(
    policy: CertifiedPolicy, unit: Tensor, broken: Callable[[Attack, Tensor], Broken], attack: Attack
) -> Check:
    radius = torch.from_numpy(policy.certify_unit(unit).radius)
    flipped = int(broken(attack, 0.999 * radius).sum())
    evidence = f"{flipped} of {int((radius > 0).sum())} certified states change at 0.999 of their own radius"
    return Check("no certified action changes", flipped == 0, evidence)

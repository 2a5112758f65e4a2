"""Every attack does what its definition says, stays where it may, and more effort never breaks fewer states."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sortrl import attacks
from sortrl.attacks import base, losses
from sortrl.attacks.apgd import checkpoints
from sortrl.attacks.base import Attack, Counter, Target
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import Centre, SortPolicy
from sortrl.teachers import Teacher

DETERMINISTIC = ("fgsm", "pgd-10", "pgd-10-margin", "pgd-10-dlr", "pgd-10-p32", "targeted")
NOISES = ("noise", "gaussian", "dropout", "salt-and-pepper")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_policy(obs_shape=(6,), n_actions=3, width=24, depth=3, **options) -> SortPolicy:
    """Untrained, with reproducible weights: enough kinks and close decisions for an attack."""
    policy = SortPolicy(obs_shape, n_actions, width, depth, **options)
    generator = seeded(5)
    with torch.no_grad():
        for layer in policy.layers:
            layer.weight.normal_(generator=generator)
    policy.calibrate(torch.rand(500, *obs_shape, generator=generator))
    return policy.eval().requires_grad_(False)


def as_teacher(body: nn.Module, inputs: int, n_actions: int) -> Teacher:
    return Teacher(body, Normalizer.identity((inputs,)), n_actions)


@pytest.fixture(scope="module")
def policy():
    return random_policy()


@pytest.fixture(scope="module")
def states():
    return torch.rand(400, 6, generator=seeded(1))


@pytest.fixture(scope="module")
def linear():
    """Three actions, linear scores: here the truth is known."""
    body = nn.Linear(4, 3)
    with torch.no_grad():
        body.weight.copy_(torch.randn(3, 4, generator=seeded(2)))
        body.bias.copy_(torch.tensor([0.1, 0.0, -0.1]))
    return as_teacher(body, 4, 3)


def breakable(linear: Teacher, unit: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """For linear scores: which states can be broken at all within eps, and which decisions are clear of rounding."""
    weight, bias = linear.body.weight.double(), linear.body.bias.double()
    scores = unit.double() @ weight.T + bias
    own = scores.argmax(1)
    gaps = scores - scores.gather(1, own[:, None]) + eps * (weight[None] - weight[own][:, None]).abs().sum(2)
    gaps.scatter_(1, own[:, None], -math.inf)
    best = gaps.amax(1)
    return best > 0, best.abs() > 1e-5


# --- the boundary that all attacks share -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", attacks.names())
@pytest.mark.parametrize("kind", ["vector", "image"])
def test_every_attack_keeps_its_budget_and_the_valid_range(name, kind):
    shape = (6,) if kind == "vector" else (1, 8, 8)
    policy = random_policy() if kind == "vector" else random_policy(shape, pool=2, width=16)
    unit = torch.rand(12, *shape, generator=seeded(3))
    low, high = torch.zeros(shape), torch.ones(shape)
    eps = torch.linspace(0.0, 0.6, 12)  # one budget per state, one of them nothing
    attack = attacks.by_name(name)
    result = attack(policy, unit, eps, low, high, seeded(0))
    moved = (result.perturbed.double() - unit.double()).abs().flatten(1).amax(1)
    assert (moved <= eps.double()).all()
    assert float(moved[0]) == 0.0
    assert bool((moved[1:] > 0.5 * eps[1:].double()).any()), "it moved nothing: the test would prove nothing"
    assert bool(((result.perturbed >= 0) & (result.perturbed <= 1)).all())
    assert (policy.scores(result.perturbed).argmax(1).numpy() == result.action).all()
    assert (policy.scores(unit).argmax(1).numpy() == result.clean_action).all()
    again = attack(policy, unit, eps, low, high, seeded(0))
    assert torch.equal(again.perturbed, result.perturbed), "one generator seed, one result"


@pytest.mark.parametrize("name", attacks.names())
def test_no_attack_changes_the_policy_the_states_or_the_gradient_mode(name, policy, states):
    unit, before = states[:3].clone(), {key: value.clone() for key, value in policy.state_dict().items()}
    attacks.by_name(name)(policy, unit, 0.2, generator=seeded(0))
    assert torch.equal(unit, states[:3])
    assert all(torch.equal(before[key], value) for key, value in policy.state_dict().items())
    assert torch.is_grad_enabled()


def test_one_budget_per_state_is_the_same_as_one_state_at_a_time(policy, states):
    eps = torch.linspace(0.01, 0.5, 20)
    together = attacks.PGD(10)(policy, states[:20], eps)
    alone = [attacks.PGD(10)(policy, states[i : i + 1], float(eps[i])).perturbed for i in range(20)]
    assert torch.equal(together.perturbed, torch.cat(alone))
    assert 0 < together.changed.sum() < 20


def test_corners_are_within_eps_in_exact_arithmetic():
    unit = torch.tensor([[1e7, 0.1, -3.0, 1e-8]])
    for eps in (0.3, 1e-3, 1e-9):
        budget = base.Budget.around(unit, eps, None, None)
        assert bool(((budget.hi.double() - unit.double()) <= eps).all())
        assert bool(((unit.double() - budget.lo.double()) <= eps).all())
        assert bool((budget.lo <= unit).all())


def test_a_state_outside_the_declared_range_may_stay_where_it_is(policy):
    unit = torch.full((1, 6), 1.5)
    result = attacks.PGD(10)(policy, unit, 0.2, torch.zeros(6), torch.ones(6))
    assert float(result.perturbed.max()) <= 1.5
    assert float(result.perturbed.min()) >= 1.3 - 1e-6


COSTS = {  # scores and gradients per state, on a state that cannot be broken; two queries judge before and after
    "fgsm": (2, 1),
    "pgd-10": (3, 10),
    "pgd-10-p32": (13, 10),
    "pgd-10-r3": (2 + 4, 40),
    "targeted-5": (3 + 2, 10),
    "ri-fgsm": (2, 1),
    "ri-fgsm-multi-7": (2 + 7, 7),
    "apgd-ce-9": (2, 10),
    "square-11": (2 + 11, 0),
    "noise": (2, 0),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_counted_per_state(name, policy, states):
    safe = states[torch.from_numpy(policy.certify_unit(states).radius > 1e-3)][:5]
    result = attacks.by_name(name)(policy, safe, 1e-3, generator=seeded(0))
    assert not result.changed.any()
    assert (result.queries / 5, result.gradients / 5) == COSTS[name]


def test_an_empty_batch_and_eps_zero_are_fine(policy, states):
    assert len(attacks.PGD(3)(policy, states[:0], 0.1).action) == 0
    result = attacks.auto()(policy, states[:4], 0.0)
    assert torch.equal(result.perturbed, states[:4])
    assert result.gradients == 0


# --- exact definitions -----------------------------------------------------------------------------------------------


def test_losses_by_hand():
    scores, own = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), torch.tensor([0, 2])
    assert losses.margin(own)(scores).tolist() == [-1.0, 4.0]
    assert losses.dlr(own)(scores).tolist() == [-0.5, pytest.approx(4 / 5)]
    assert losses.cross_entropy(own)(scores).tolist() == pytest.approx(
        [math.log(1 + math.exp(-2) + math.exp(-1)), math.log(1 + math.exp(-1) + math.exp(4))]
    )
    assert losses.towards(own, torch.tensor([1, 1]))(scores).tolist() == [-2.0, 4.0]


def test_dlr_is_blind_to_scale_but_not_to_progress():
    scores, own = torch.tensor([[1.0, 0.25, -2.0]]), torch.tensor([0])
    torch.testing.assert_close(losses.dlr(own)(100 * scores), losses.dlr(own)(scores))
    two = torch.tensor([[1.0, 0.25]])
    assert losses.dlr(own)(two).tolist() == [-0.75], "of two actions, it is the margin: a ratio would be constant"
    assert torch.isfinite(losses.dlr(own)(torch.ones(1, 3))).all(), "a three-fold tie"


def gradient_of_cross_entropy(policy, x: Tensor, labels: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    nn.functional.cross_entropy(policy.scores(x), labels, reduction="sum").backward()
    return x.grad


def test_fgsm_and_pgd_take_the_published_steps(policy, states):
    eps, labels = 0.25, policy.scores(states).argmax(1)
    one = states + eps * gradient_of_cross_entropy(policy, states, labels).sign()
    torch.testing.assert_close(attacks.FGSM()(policy, states, eps).perturbed, one, atol=1e-6, rtol=0)
    x, ever = states, torch.zeros(len(states), dtype=torch.bool)
    for _ in range(10):
        x = (x + 0.1 * eps * gradient_of_cross_entropy(policy, x, labels).sign()).clamp(states - eps, states + eps)
        ever |= policy.scores(x).argmax(1) != labels
    last = policy.scores(x).argmax(1) != labels
    result = attacks.PGD(10)(policy, states, eps)
    assert 0.02 < last.double().mean() < 0.9
    # Where the last iterate works, or none does, it is the published one; else an earlier one is kept.
    same = last | ~ever
    torch.testing.assert_close(result.perturbed[same], x[same], atol=1e-5, rtol=0)
    assert (torch.from_numpy(result.changed) == ever).all()


@pytest.mark.parametrize(
    "eps", [0.1, 2.0]
)  # the step is absolute: 0.375 ends at the border of one ball, not of the other
def test_ri_fgsm_is_the_published_formula(policy, states, eps):
    labels, generator = policy.scores(states).argmax(1), seeded(7)
    d0 = eps * (2 * torch.rand(states.shape, generator=generator) - 1)
    gradient = gradient_of_cross_entropy(policy, states + d0, labels)
    expected = states + (d0 + 0.375 * gradient.sign()).clamp(-eps, eps)
    result = attacks.RIFGSM()(policy, states, eps, generator=seeded(7))
    torch.testing.assert_close(result.perturbed, expected, atol=1e-6, rtol=0)


def test_multi_returns_the_first_start_that_works(policy, states):
    eps, starts = 0.15, 12
    singles = []  # start k alone, by skipping the draws of those before it
    for k in range(starts):
        generator = seeded(4)
        for _ in range(k):
            torch.rand(states.shape, generator=generator)
        singles.append(attacks.RIFGSM()(policy, states, eps, generator=generator))
    result = attacks.RIFGSMMulti(starts)(policy, states, eps, generator=seeded(4))
    worked = np.stack([single.changed for single in singles])
    assert (result.changed == worked.any(0)).all()
    assert result.changed.sum() > worked[0].sum()
    first = worked.argmax(0)
    for state in np.flatnonzero(result.changed):
        assert torch.equal(result.perturbed[state], singles[first[state]].perturbed[state])


def test_how_many_starts_are_taken_at_once_changes_nothing(policy, states, monkeypatch):
    many = attacks.RIFGSMMulti(50)(policy, states[:8], 0.1, generator=seeded(0))
    monkeypatch.setattr("sortrl.attacks.gradient.CHUNK_STATES", 24)
    few = attacks.RIFGSMMulti(50)(policy, states[:8], 0.1, generator=seeded(0))
    assert torch.equal(many.perturbed, few.perturbed)
    assert few.gradients <= many.gradients


def test_multi_t_reaches_the_action_that_is_worth_least(states):
    policy, body = random_policy(n_actions=6), nn.Linear(6, 6)
    with torch.no_grad():
        body.weight.normal_(generator=seeded(8))
    values = as_teacher(body, 6, 6)
    eps, starts = 0.6, 40
    result = attacks.RIFGSMMultiT(values, starts)(policy, states, eps, generator=seeded(4))
    plain = attacks.RIFGSMMulti(starts)(policy, states, eps, generator=seeded(4))
    assert (result.changed == plain.changed).all(), "the same starts, chosen among differently"
    clean_values = values.scores(states).numpy()
    rows = np.flatnonzero(result.changed)
    assert (clean_values[rows, result.action[rows]] <= clean_values[rows, plain.action[rows]]).all()
    assert (clean_values[rows, result.action[rows]] < clean_values[rows, plain.action[rows]]).mean() > 0.1


def test_memory_of_a_thousand_starts_is_bounded():
    """64 images of 84 x 84 against the paper's network of 5 x 640: a fresh process tells its peak."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    program = """
import json, re, torch
from sortrl import attacks
from sortrl.nets import Centre, SortPolicy
def status(name): return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
policy, unit = SortPolicy((1, 84, 84), 4, width=640, depth=5, pool=4).eval().requires_grad_(False), torch.rand(64, 1, 84, 84)
attacks.FGSM()(policy, unit[:1], 0.01)
before = status("VmRSS")
attacks.RIFGSMMulti(20)(policy, unit, 1e-6)
print(json.dumps(status("VmHWM") - before))
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2e7 < json.loads(child.stdout) < 1e9


def test_linear_scores_are_broken_exactly_where_they_can_be(linear):
    unit = torch.randn(500, 4, generator=seeded(6))
    for eps in (0.05, 0.2, 0.5):
        possible, clear = breakable(linear, unit, eps)
        assert 0 < int(possible.sum()) < 500
        for name in ("targeted", "auto"):
            changed = torch.from_numpy(attacks.by_name(name)(linear, unit, eps, generator=seeded(0)).changed)
            assert (changed[clear] == possible[clear]).all(), name
        for name in ("fgsm", "pgd-10", "apgd-ce", "square", "ri-fgsm-multi-50"):
            changed = torch.from_numpy(attacks.by_name(name)(linear, unit, eps, generator=seeded(0)).changed)
            assert not changed[clear & ~possible].any(), name
            assert changed[possible].double().mean() > 0.8, name


def test_square_finds_the_corner_of_a_small_cube(linear):
    """With two actions no coordinate depends on another, so that the search cannot get stuck."""
    two = nn.Linear(4, 2)
    with torch.no_grad():
        two.weight.copy_(linear.body.weight[:2])
        two.bias.copy_(linear.body.bias[:2])
    unit, agent = torch.randn(500, 4, generator=seeded(6)), as_teacher(two, 4, 2)
    possible, clear = breakable(agent, unit, 0.2)
    changed = torch.from_numpy(attacks.Square(400)(agent, unit, 0.2, generator=seeded(0)).changed)
    assert 0 < int(possible.sum()) < 500
    assert (changed[clear] == possible[clear]).all()


class Hole(nn.Module):
    """Plays 0 but for a small hole around the origin: an attack must stop there, not at a corner."""

    def forward(self, unit: Tensor) -> Tensor:
        distance = unit.square().sum(1)
        return torch.stack([distance - 1e-3, torch.zeros_like(distance)], dim=1)


def test_auto_pgd_refines_its_step_where_pgd_oscillates():
    hole, unit = as_teacher(Hole(), 5, 2), 0.37 * torch.randn(50, 5, generator=seeded(0)).sign() + 0.01
    assert not attacks.PGD(100)(hole, unit, 1.0).changed.any()
    assert attacks.APGD("ce")(hole, unit, 1.0, generator=seeded(0)).changed.all()
    assert attacks.APGD("dlr")(hole, unit, 1.0, generator=seeded(0)).changed.all()


def test_checkpoints_are_the_published_ones():
    assert sorted(checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert max(checkpoints(7)) <= 7


class Blind:
    """Always plays 0, and remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def predict(self, obs: np.ndarray) -> tuple[np.ndarray, None]:
        self.seen.append(obs.copy())
        return np.zeros(len(obs), dtype=np.int64), None


def test_square_on_images_starts_with_stripes_and_moves_squares():
    blind, unit, eps = Blind(), torch.full((3, 2, 20, 20), 0.5), 0.25
    attacks.Square(200)(blind, unit, eps, generator=seeded(0))
    first, *proposals = [seen - 0.5 for seen in blind.seen[1:-1]]
    assert (np.abs(first) == eps).all()
    assert (first == first[:, :, :1, :]).all(), "columns of one sign"
    assert len(np.unique(first)) == 2
    sides, current = [], first
    for (
        proposal
    ) in proposals:  # ties are kept, so each proposal is the one before with one square of one sign per channel
        assert (np.abs(proposal) == eps).all()
        for image, before in zip(proposal, current, strict=True):
            rows, columns = np.nonzero((image != before).any(0))
            if len(rows):
                window = image[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
                assert all(len(np.unique(channel)) == 1 for channel in window)
                sides.append(max(np.ptp(rows), np.ptp(columns)) + 1)
        current = proposal
    assert sides[0] > 10
    assert max(sides[-20:]) <= 2, "squares shrink"


def test_square_on_vectors_moves_ever_fewer_coordinates():
    blind = Blind()
    attacks.Square(300)(blind, torch.zeros(1, 40), 0.5, generator=seeded(0))
    proposals = [seen[0] for seen in blind.seen[1:-1]]
    assert all((np.abs(proposal) == 0.5).all() for proposal in proposals)
    moved = [int((a != b).sum()) for a, b in itertools.pairwise(proposals)]
    assert max(moved[:2]) > 5
    assert max(moved[-50:]) <= 1


def test_noises_are_what_they_say(policy):
    unit, eps = torch.rand(2000, 6, generator=seeded(9)), 0.1
    shift = {
        name: (attacks.by_name(name)(policy, unit, eps, generator=seeded(0)).perturbed - unit).double() / eps
        for name in NOISES
    }
    assert float(shift["noise"].std()) == pytest.approx(1 / math.sqrt(3), rel=0.02)
    gaussian = shift["gaussian"]
    assert float(((gaussian.abs() < 0.999) & (gaussian.abs() > 0.5)).double().mean()) == pytest.approx(0.2718, abs=0.02)
    assert float((gaussian.abs() > 0.999).double().mean()) == pytest.approx(0.0455, abs=0.01)
    salt = shift["salt-and-pepper"]
    assert float((salt.abs() > 0.5).double().mean()) == pytest.approx(0.3, abs=0.02)
    assert bool(((salt.abs() < 1e-5) | ((salt.abs() - 1).abs() < 1e-5)).all())
    expected = torch.where(shift["dropout"].abs() > 1e-6, -torch.minimum(unit / eps, torch.ones(())).double(), 0.0)
    torch.testing.assert_close(shift["dropout"], expected, atol=1e-5, rtol=0)
    assert float((shift["dropout"].abs() > 1e-6).double().mean()) == pytest.approx(0.3, abs=0.02)


# --- more effort never breaks fewer states ---------------------------------------------------------------------------


def grows(weak: Attack, strong: Attack, policy, states: Tensor, eps: float) -> None:
    few, many = (attack(policy, states, eps, generator=seeded(2)).changed for attack in (weak, strong))
    assert few.any()
    assert (many | ~few).all(), f"{strong.name} lost states that {weak.name} broke"


@pytest.mark.parametrize("eps", [0.1, 0.25])
def test_more_steps_restarts_and_starts_never_lose_a_state(policy, states, eps):
    grows(attacks.PGD(5), attacks.PGD(20), policy, states, eps)
    grows(attacks.PGD(5, surrogate_p=8.0), attacks.PGD(20, surrogate_p=8.0), policy, states, eps)
    grows(attacks.PGD(5), attacks.PGD(5, restarts=3), policy, states, eps)
    grows(attacks.PGD(5, restarts=3), attacks.PGD(5, restarts=6), policy, states, eps)
    grows(attacks.PGD(5, random_start=True), attacks.PGD(9, random_start=True, restarts=1), policy, states, eps)
    grows(attacks.APGD(steps=10), attacks.APGD(steps=10, restarts=2), policy, states, eps)
    grows(attacks.RIFGSMMulti(3), attacks.RIFGSMMulti(30), policy, states, eps)
    grows(attacks.RIFGSM(), attacks.RIFGSMMulti(3), policy, states, eps)


@pytest.mark.parametrize("eps", [0.05, 0.1, 0.25, 0.5])
def test_an_ensemble_breaks_what_any_member_breaks_alone(policy, states, eps):
    members = [
        *map(attacks.by_name, (*DETERMINISTIC, *NOISES)),
        attacks.PGD(5, restarts=2),
        attacks.RIFGSMMulti(20),
        *attacks.auto(steps=12, queries=60).members,
    ]
    states = states[:200]
    for order in (members, members[::-1]):
        ensemble = attacks.Ensemble(tuple(order))
        together = ensemble(policy, states, eps, generator=seeded(3)).changed
        alone = [
            member(policy, states, eps, generator=own).changed
            for member, own in zip(order, ensemble.generators(seeded(3)), strict=True)
        ]
        # Nothing else breaks a state, and nothing that any member broke is lost.
        assert (together == np.any(alone, axis=0)).all()
        assert together.sum() > max(changed.sum() for changed in alone) or eps != 0.25


def test_an_ensemble_leaves_broken_states_alone(policy, states):
    twice = attacks.Ensemble((attacks.PGD(10), attacks.PGD(10)))
    once, both = attacks.PGD(10)(policy, states, 0.25), twice(policy, states, 0.25)
    assert torch.equal(once.perturbed, both.perturbed)
    unbroken = int((~once.changed).sum())
    assert both.gradients == 10 * (len(states) + unbroken)


def test_a_part_of_a_target_gets_the_draws_of_the_whole(policy, states):
    def target() -> Target:
        rows = torch.arange(10)
        budget = base.Budget.around(states[:10], 0.1, None, None)
        clean = policy.scores(states[:10]).argmax(1)
        return Target(Counter(policy), states[:10], clean, budget, torch.full((10, 1), 0.1), seeded(0), rows, 10)

    part = target().subset(torch.tensor([7, 2])).subset(torch.tensor([1]))
    assert torch.equal(part.unit, states[2:3])
    assert torch.equal(part.rand(3), target().rand(3)[2:3])
    assert torch.equal(part.uniform(), (lambda whole: (whole.rand(3), whole.uniform()))(target())[1][2:3])


def test_the_order_of_strength_is_what_experience_says(policy, states):
    def share(name: str, eps: float = 0.2) -> float:
        return float(attacks.by_name(name)(policy, states, eps, generator=seeded(0)).changed.mean())

    assert max(share(noise) for noise in NOISES) < share("fgsm") < share("pgd-10") <= share("auto")
    grid = [share("auto", eps) for eps in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)]
    assert grid == sorted(grid)
    assert grid[0] < 0.2
    assert grid[-1] > 0.9


def test_no_attack_reaches_into_the_certified_radius(policy, states):
    radius = torch.from_numpy(policy.certify_unit(states).radius)
    inside = radius > 0
    assert int(inside.sum()) > 300
    for name in attacks.names():
        attack = attacks.by_name("ri-fgsm-multi-50" if name == "ri-fgsm-multi" else name)
        assert not attack(policy, states[inside], 0.999 * radius[inside], generator=seeded(0)).changed.any()


# --- agents of other kinds -------------------------------------------------------------------------------------------


@dataclass
class OnlyPredicts:
    """All that is known of some agents."""

    inner: SortPolicy

    def predict(self, obs: np.ndarray) -> tuple[np.ndarray, None]:
        return self.inner.scores(torch.from_numpy(obs)).argmax(1).numpy(), None


WITHOUT_GRADIENT = [name for name in attacks.names() if not attacks.by_name(name).needs_gradient]


def test_the_messages_name_attacks_that_exist_and_need_no_gradient():
    assert set(base.WITHOUT_GRADIENT) <= set(WITHOUT_GRADIENT)
    assert set(NOISES) | {"square"} == set(base.WITHOUT_GRADIENT)


@pytest.mark.parametrize("name", base.WITHOUT_GRADIENT)
def test_attacks_without_gradient_need_only_actions(name, policy, states):
    result = attacks.by_name(name)(OnlyPredicts(policy), states, 0.3, generator=seeded(0))
    assert result.gradients == 0
    assert result.changed.sum() > 5
    if name != "square":  # which makes use of scores
        assert (result.action == attacks.by_name(name)(policy, states, 0.3, generator=seeded(0)).action).all()


def test_an_ensemble_without_gradient_needs_only_actions(policy, states):
    blackbox = attacks.Ensemble((attacks.UniformNoise(), attacks.Square(50)))
    assert not blackbox.needs_gradient
    assert blackbox(OnlyPredicts(policy), states, 0.3, generator=seeded(0)).changed.any()
    assert attacks.auto().needs_gradient


def test_teachers_are_attacked_too_and_ignore_the_surrogate(linear):
    unit = torch.randn(100, 4, generator=seeded(6))
    plain = attacks.PGD(10)(linear, unit, 0.3)
    smooth = attacks.PGD(10, surrogate_p=8.0)(linear, unit, 0.3)
    assert torch.equal(plain.perturbed, smooth.perturbed)


def test_the_surrogate_gradient_is_the_smooth_network_s(policy, states):
    loss = losses.margin(policy.scores(states).argmax(1))
    found = Counter(policy).gradient(states, loss, p=8.0)
    x = states.clone().requires_grad_()
    loss(policy.surrogate_scores(x, 8.0)).sum().backward()
    assert torch.equal(found, x.grad)
    assert not torch.equal(found.sign(), Counter(policy).gradient(states, loss).sign())


# --- names and mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*attacks.names(), "pgd-7-dlr-p16-s0.2-random-r3", "apgd-margin-20-p8-r1", "square-9"])
def test_names_lead_back_to_the_attack(name):
    attack = attacks.by_name(name)
    assert attacks.by_name(attack.name) == attack
    assert hash(attack) == hash(attacks.by_name(name.upper()))


def test_names_carry_their_numbers():
    assert attacks.by_name("pgd-30") == attacks.PGD(30)
    assert attacks.by_name("pgd-10-margin") == attacks.PGD(10, loss="margin")
    assert attacks.by_name("pgd-10-p32") == attacks.PGD(10, surrogate_p=32.0)
    assert attacks.by_name("ri-fgsm-multi-50") == attacks.RIFGSMMulti(50)
    assert attacks.by_name("apgd-dlr") == attacks.APGD("dlr")
    assert attacks.by_name("targeted-5") == attacks.Targeted(5)


class Broken(Attack):
    name = "broken"

    def search(self, target: Target) -> Tensor:
        return torch.full_like(target.unit, math.nan)


class NotAPolicy:
    pass


BAD_INPUT = {
    "typo": (lambda p, x: attacks.by_name("pdg-10"), r"Unknown attack 'pdg-10'\. Did you mean pgd-10\? Choose fgsm, "),
    "no steps by name": (lambda p, x: attacks.by_name("pgd-0"), "steps=0"),
    "nonsense": (lambda p, x: attacks.by_name("?"), "Unknown attack '\\?'. Choose"),
    "eps shape": (lambda p, x: attacks.FGSM()(p, x, torch.ones(2)), r"eps has shape \(2,\), expected .* \(400,\)"),
    "one bad eps": (
        lambda p, x: attacks.FGSM()(p, x[:2], torch.tensor([0.1, -0.5])),
        r"eps is -0\.5, expected a finite number >= 0",
    ),
    "infinite eps": (lambda p, x: attacks.FGSM()(p, x, math.inf), "eps is inf"),
    "float64": (lambda p, x: attacks.FGSM()(p, x.double(), 0.1), "inputs are torch.float64"),
    "NaN": (lambda p, x: Broken()(p, x, 0.1), "broken: a perturbation exceeds its budget by nan"),
    "not a policy": (lambda p, x: attacks.UniformNoise()(NotAPolicy(), x, 0.1), "cannot attack a NotAPolicy"),
    "only actions": (lambda p, x: attacks.PGD()(OnlyPredicts(p), x, 0.1), "no gradient.*noise, gaussian.*square"),
    "loss": (lambda p, x: attacks.PGD(loss="l2"), "loss is 'l2', expected one of ce, margin, dlr"),
    "restarts": (lambda p, x: attacks.APGD(restarts=-1), "restarts=-1"),
    "starts": (lambda p, x: attacks.RIFGSMMulti(0), "starts=0"),
    "queries": (lambda p, x: attacks.Square(0), "queries=0"),
    "share": (lambda p, x: attacks.SensorDropout(share=1.5), "share is 1.5"),
    "no members": (lambda p, x: attacks.Ensemble(()), "one or more attacks"),
    "members": (lambda p, x: attacks.Ensemble(("pgd-10",)), "members are \\['str'\\]"),
    "values": (
        lambda p, x: attacks.RIFGSMMultiT(random_policy(n_actions=2), 3)(p, x, 0.1),
        r"values have shape \(400, 2\), expected \(400, 3\)",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_mistakes_are_named(case, policy, states):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call(policy, states)


def test_an_agent_whose_actions_make_no_sense_is_refused(states):
    class Strange:
        def predict(self, obs):
            return np.full((len(obs), 2), 0.5)

    with pytest.raises(SortRLError, match=r"Strange.predict returned float64 of shape \(400, 2\)"):
        attacks.Square(3)(Strange(), states, 0.1)


class TestWhereUncertified:
    def test_gives_the_actions_of_the_attack_itself_for_less(self, policy, states):
        eps = float(np.median(policy.certify_unit(states).radius))
        plain, spared = (
            attack(policy, states, eps) for attack in (attacks.PGD(10), attacks.WhereUncertified(attacks.PGD(10)))
        )
        assert (plain.action == spared.action).all()
        assert (plain.action != plain.clean_action).any(), "an attack that breaks nothing shows nothing"
        assert spared.gradients <= 0.6 * plain.gradients

    def test_a_state_at_the_border_is_attacked(self, policy, states):
        """A radius equal to eps is no proof of anything, also where eps is rounded to float32."""
        radius = policy.certify_unit(states).radius[:1]
        result = attacks.WhereUncertified(attacks.PGD(10))(policy, states[:1], float(radius[0]))
        assert result.gradients == 10

    def test_an_agent_without_certificates_is_attacked_everywhere(self, states):
        teacher = as_teacher(nn.Linear(6, 3), 6, 3)
        plain, wrapped = (
            attack(teacher, states, 0.1) for attack in (attacks.FGSM(), attacks.WhereUncertified(attacks.FGSM()))
        )
        assert torch.equal(plain.perturbed, wrapped.perturbed)
        assert plain.gradients == wrapped.gradients


class Whole:
    """A policy that does not say which numbers of its input can matter: searches see all of them."""

    def __init__(self, policy):
        self.scores, self.normalize, self.surrogate_scores = policy.scores, policy.normalize, policy.surrogate_scores
        self.n_actions, self.obs_shape = policy.n_actions, policy.obs_shape


IMAGES = {
    "plain": {},
    "crop and scale": {"crop": (1, 2, 3, 0), "scale": 2.0},
    "pixels": {"pixels": tuple(range(0, 1800, 2))},
    "ramps": {"pixels": (*range(900), *range(300)), "ramp_width": 0.3},
}


@cache
def image_policy(kind: str) -> tuple[SortPolicy, Tensor]:
    torch.manual_seed(0)
    unit = torch.rand(200, 2, 30, 30)
    policy = SortPolicy(unit.shape[1:], 4, width=40, depth=3, rho=0.0, **IMAGES[kind])
    for part in policy.front:
        if isinstance(part, Centre):
            part.centres.uniform_(0, 1)
    policy.eval().requires_grad_(False)
    with torch.no_grad():
        policy.calibrate(unit)
        policy.bias.add_(policy.scores(unit).mean(0))
    # Some that are broken easily, some that are not.
    return policy, unit[
        torch.from_numpy(policy.certify_unit(unit).radius).argsort()[[0, 1, 2, 3, 5, 7, *range(100, 106)]]
    ]


SEARCHES = (
    attacks.PGD(10),
    attacks.PGD(6, loss="margin", restarts=2, random_start=True),
    attacks.Targeted(6),
    attacks.RIFGSMMulti(60),
)


@pytest.mark.parametrize("attack", SEARCHES, ids=lambda attack: attack.name)
@pytest.mark.parametrize("kind", IMAGES)
def test_leaving_out_what_cannot_matter_changes_nothing_but_the_time(kind, attack):
    policy, unit = image_policy(kind)
    eps = torch.linspace(0.001, 0.03, len(unit))
    low, high = torch.zeros_like(unit[0]), torch.full_like(unit[0], 0.95)  # some pixels lie beyond the valid range
    cut = policy.near(unit - eps.reshape(-1, 1, 1, 1), unit + eps.reshape(-1, 1, 1, 1))
    assert cut is not None, "nothing was left out"
    assert len(cut[0]) < unit[0].numel() / 2
    few, all_of_it = (attack(agent, unit, eps, low, high, seeded(3)) for agent in (policy, Whole(policy)))
    assert torch.equal(few.perturbed, all_of_it.perturbed)
    assert (few.action == all_of_it.action).all()
    assert 0 < few.changed.sum() < len(unit), "an attack that always or never succeeds compares little"
    assert (few.queries, few.gradients) == (all_of_it.queries, all_of_it.gradients)


def test_worst_valued_starts_are_the_same_without_what_cannot_matter():
    policy, unit = image_policy("plain")
    values = SortPolicy(unit.shape[1:], 4, width=8, depth=2).eval().requires_grad_(False)
    results = [
        attacks.RIFGSMMultiT(values, 30)(agent, unit, 0.02, generator=seeded(3)) for agent in (policy, Whole(policy))
    ]
    assert torch.equal(results[0].perturbed, results[1].perturbed)
    assert results[0].changed.any()


@pytest.mark.parametrize("kind", IMAGES)
@torch.no_grad()
def test_scores_and_gradients_are_those_of_the_whole_policy_to_the_bit(kind):
    policy, unit = image_policy(kind)
    columns, network = policy.near(unit - 0.01, unit + 0.01)
    for seed in range(5):
        x = unit + 0.01 * (2 * torch.rand(unit.shape, generator=seeded(seed)) - 1)
        part = x.flatten(1)[:, columns]
        assert torch.equal(policy.scores(x), network.scores(part))
        gradients = []
        for agent, at in ((policy, x), (network, part)):
            leaf = at.clone().requires_grad_()
            with torch.enable_grad():
                gradients.append(torch.autograd.grad(agent.scores(leaf)[:, 0].sum(), leaf)[0])
        whole = torch.zeros_like(x).flatten(1)
        whole[:, columns] = gradients[1]
        assert torch.equal(gradients[0].flatten(1), whole)
        assert (whole != 0).any()

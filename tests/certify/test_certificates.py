"""Certificates hold in floating point: against rational arithmetic, and against every float32 input within a radius."""

from __future__ import annotations

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sortrl import ops
from sortrl.certify import acr, certified_for, certified_levels, certified_shares, raw_radii
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import BoundedConv, MeanShift, SortPolicy
from sortrl.nets.float_bounds import box_around, proven, rounding_error, score_bounds, stages, traced_scores

BACKENDS = ("auto", "reference")


def uneven(tensor: torch.Tensor, decades: float) -> torch.Tensor:
    """Numbers of very different sizes."""
    return tensor * 10.0 ** (decades * (2 * torch.rand(tensor.shape) - 1))


def build(seed: int, inputs=3, actions=3, width=6, depth=3, rho=0.3, decades=1.0, **front) -> SortPolicy:
    torch.manual_seed(seed)
    shape = front.pop("shape", (inputs,))
    policy = SortPolicy(shape, actions, width, depth, rho, **front).requires_grad_(False)
    for layer in policy.layers:
        layer.weight.copy_(uneven(layer.weight, decades))
    for shift in policy.shifts:
        shift.running_mean.copy_(uneven(torch.randn_like(shift.running_mean), decades))
    policy.bias.copy_(uneven(torch.randn_like(policy.bias), decades))
    for part in policy.front:
        if isinstance(part, BoundedConv):
            part.bias.copy_(uneven(torch.randn_like(part.bias), decades))
            part.settle()
    return policy


def exact_scores(policy: SortPolicy, unit: torch.Tensor) -> list[Fraction]:
    """The evaluation network in rational arithmetic, from its definition; one state, no rounding anywhere."""
    config = policy.config
    x = np.array([Fraction(float(v)) for v in unit.flatten()], dtype=object).reshape(policy.obs_shape)
    if x.ndim == 3:
        top, bottom, left, right = config.crop
        x = x[:, top : x.shape[1] - bottom, left : x.shape[2] - right]
        size = config.pool
        rows, columns = x.shape[1] // size, x.shape[2] // size
        blocks = x[:, : rows * size, : columns * size].reshape(len(x), rows, size, columns, size)
        x = blocks.sum(4).sum(2) / Fraction(size * size)
    for part in policy.front:
        x = exact_convolution(part, x) if isinstance(part, BoundedConv) else x
    x = x.reshape(-1)[list(config.pixels)] if config.pixels else x
    factor = Fraction(float(np.float32(config.scale)))
    values, shape = [v * factor for v in x.reshape(-1)], x.shape
    for index, layer in enumerate(policy.layers):
        mix = [Fraction(float(m)) for m in layer.mix]
        seen = [values]
        if index < len(config.conv):
            channels, kernel, stride = config.conv[index]
            image = np.array(values, dtype=object).reshape(shape)
            corners = [range(0, size - kernel + 1, stride) for size in shape[1:]]
            seen = [image[:, i : i + kernel, j : j + kernel].reshape(-1) for i in corners[0] for j in corners[1]]
            shape = (channels, len(corners[0]), len(corners[1]))
        output = []
        for row in layer.weight.tolist():
            for part in seen:
                ordered = sorted((abs(v - Fraction(w)) for v, w in zip(part, row, strict=True)), reverse=True)
                output.append(sum(m * d for m, d in zip(mix, ordered, strict=False)))
        shifts = policy.shifts[index].running_mean if index < len(policy.shifts) else -policy.bias
        values = [y - Fraction(float(m)) for y, m in zip(output, shifts.tolist(), strict=True)]
    return [-v for v in values]


def exact_convolution(part: BoundedConv, x: np.ndarray) -> np.ndarray:
    kernel, stride = part.weight.shape[-1], part.stride
    corners = [range(0, size - kernel + 1, stride) for size in x.shape[1:]]
    y = np.empty((len(part.weight), len(corners[0]), len(corners[1])), dtype=object)
    for channel, (weight, bias) in enumerate(zip(part.weight.tolist(), part.bias.tolist(), strict=True)):
        template = np.vectorize(Fraction, otypes=[object])(np.array(weight))
        for row, i in enumerate(corners[0]):
            for column, j in enumerate(corners[1]):
                y[channel, row, column] = (template * x[:, i : i + kernel, j : j + kernel]).sum() + Fraction(bias)
    first, second = np.split(y, 2)
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)])


NETWORKS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 100_000),
        "inputs": st.integers(1, 4),
        "width": st.integers(1, 9),
        "depth": st.integers(1, 4),
        "rho": st.sampled_from([0.0, 0.3, 0.8]),
        "decades": st.sampled_from([0.0, 1.0, 4.0]),
        "scale": st.sampled_from([1.0, 0.1, 7.3]),
    }
)
TIGHTNESS: list[float] = []


@settings(max_examples=60, deadline=None)
@given(NETWORKS, st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e8]), st.sampled_from(BACKENDS))
def test_computed_scores_are_as_near_to_exact_ones_as_claimed(spec, size, backend):
    policy = build(**spec)
    x = uneven(torch.randn(4, spec["inputs"]), 1.0) * size
    with ops.use_backend(backend):
        scores, magnitudes = traced_scores(policy, x)
        assert torch.equal(scores, policy.scores(x)), "what is bounded must be what acts"
    bound = rounding_error(stages(policy), magnitudes)
    for row, allowed, state in zip(scores, bound, x, strict=True):
        error = max(abs(Fraction(float(s)) - e) for s, e in zip(row, exact_scores(policy, state), strict=True))
        assert error <= Fraction(float(allowed))
        if error:
            TIGHTNESS.append(float(allowed) / float(error))


def test_the_bound_is_not_idle():
    """How many times larger than the worst error that was seen; run with -rP to read it."""
    assert len(TIGHTNESS) > 20
    print(f"bound / error: least {min(TIGHTNESS):.2f}, median {np.median(TIGHTNESS):.1f}")
    assert 1.0 <= min(TIGHTNESS) < 10.0


@pytest.mark.parametrize(
    "front",
    [
        {"pool": 2},
        {"pool": 3, "scale": 5.0},
        {"pool": 2, "scale": 5.0, "pixels": (3, 0, 2)},
        {"crop": (1, 0, 0, 2), "pool": 2},
        {"conv": ((3, 3, 2),), "scale": 3.0},
        {"conv": ((3, 3, 1), (2, 2, 2)), "crop": (1, 0, 0, 2)},
        {"bounded_conv": ((4, 3, 2),), "scale": 30.0},
        {"bounded_conv": ((4, 3, 1), (6, 2, 2)), "crop": (1, 0, 0, 2), "conv": ((3, 2, 1),)},
        {"bounded_conv": ((4, 2, 1), (6, 2, 1)), "pool": 2, "scale": 0.5},
    ],
)
def test_front_ends_are_part_of_the_bound(front):
    for seed in range(3):
        policy = build(seed, shape=(2, 7, 8), width=4, depth=2, **front)
        x = uneven(torch.randn(2, 2, 7, 8), 2.0) * 1e4
        scores, magnitudes = traced_scores(policy, x)
        bound = rounding_error(stages(policy), magnitudes)
        for row, allowed, state in zip(scores, bound, x, strict=True):
            errors = [abs(Fraction(float(s)) - e) for s, e in zip(row, exact_scores(policy, state), strict=True)]
            assert max(errors) <= Fraction(float(allowed))


def test_the_bound_covers_inputs_within_reach_without_looking_at_them():
    for seed in range(15):
        policy = build(seed, inputs=4, width=12, depth=4, decades=2.0, scale=3.0)
        exact = copy.deepcopy(policy).double()
        x, reach = torch.randn(50, 4), 10.0 ** float(torch.randint(-2, 5, ()))
        _, magnitudes = traced_scores(policy, x)
        bound = rounding_error(stages(policy), magnitudes, reach)
        moved = x + reach * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0) * 0.999
        error = (policy.scores(moved).double() - exact.scores(moved.double())).abs().amax(1)
        assert (error <= bound).all()


def floats_within(x: float, radius: float, most: int = 2000) -> np.ndarray:
    """Every float32 number within a (float64) radius of x, up to ``most`` on each side."""
    bits = np.float32(x).view(np.int32) + np.arange(-most, most + 1, dtype=np.int32)
    near = bits.view(np.float32)
    # So close together, float64 subtracts them exactly.
    return near[np.abs(near.astype(np.float64) - float(np.float32(x))) <= radius]


def certified_near_a_boundary(policy: SortPolicy, offset: float, size: int) -> list[tuple[torch.Tensor, int, float]]:
    """States between two inputs that are answered differently, so close to the boundary that margins are tiny."""
    a, b = (offset + size * torch.randn(200, *policy.obs_shape) for _ in range(2))
    differ = policy.scores(a).argmax(1) != policy.scores(b).argmax(1)
    a, b = a[differ], b[differ]
    for _ in range(40):
        middle = ((a.double() + b.double()) / 2).float()
        same = (policy.scores(middle).argmax(1) == policy.scores(a).argmax(1)).reshape(-1, *[1] * (a.ndim - 1))
        a, b = torch.where(same, middle, a), torch.where(same, b, middle)
    steps = torch.cat([a + k * (a - b).sign() * a.abs() * 2.0**-23 for k in (0, 1, 3, 10, 30, 100)])
    cert = policy.certify_unit(steps)
    return [(x, int(c), float(r)) for x, c, r in zip(steps, cert.action, cert.radius, strict=True) if r > 0]


@pytest.mark.parametrize("offset", [1.0, 1000.0, 1e4])
def test_no_float32_input_at_all_within_a_radius_changes_the_action(offset):
    """One dimension: the inputs are so coarse there that all of them can be tried."""
    tried = states = 0
    for seed in range(25):
        policy = build(seed, inputs=1, actions=2, width=5, depth=3, decades=0.5)
        for layer in policy.layers[:1]:
            layer.weight.add_(offset)
        for x, action, radius in certified_near_a_boundary(policy, offset, 2)[:60]:
            inputs = floats_within(float(x[0]), radius)
            assert (policy.scores(torch.from_numpy(inputs)[:, None]).argmax(1) == action).all()
            tried, states = tried + len(inputs), states + 1
    assert states > 20
    assert tried > states, "some radii must hold more than the state itself"


def test_a_radius_without_slack_would_be_wrong():
    """Scores near 1e4 are multiples of 2^-10: ties and reversals lie within margin / (2 L), never within the radius."""
    policy = SortPolicy((1,), 2, width=1, depth=1).requires_grad_(False)  # scores -|x - w_k| - 1e4: they meet half-way
    policy.layers[0].weight.copy_(torch.tensor([[0.0], [1.0]]))
    policy.bias.fill_(1e4)
    violated = held = 0
    for x in torch.linspace(0.51, 0.7, 200):
        scores = policy.scores(x.reshape(1, 1))[0].double()
        naive = float((scores[1] - scores[0]) / (2 * policy.lipschitz))
        radius = float(policy.certify_unit(x.reshape(1, 1)).radius[0])
        assert radius < naive
        for claimed, is_sound in ((naive, False), (radius, True)):
            inputs = x - torch.linspace(max(0.0, 0.98 * claimed), claimed, 500)[:, None]
            inputs = inputs[(inputs.double() - x.double()).abs() <= claimed][:, None]
            changed = bool((policy.scores(inputs).argmax(1) != 1).any())
            assert not (changed and is_sound)
            violated += changed
        held += radius > 0
    assert held > 100
    assert violated > 100


def test_corners_at_the_very_edge_of_the_radius():
    """More dimensions: every corner and face centre of the largest float32 box within the radius."""
    checked = 0
    for seed in range(15):
        policy = build(seed, inputs=3, actions=3, width=8, depth=3, decades=0.3)
        policy.layers[0].weight.add_(100.0)
        for x, action, radius in certified_near_a_boundary(policy, 100.0, 2)[:40]:
            ends = [floats_within(float(v), radius) for v in x]
            pairs = [[e.min(), v, e.max()] for e, v in zip(ends, x.numpy(), strict=True)]
            grid = torch.from_numpy(np.stack(np.meshgrid(*pairs), -1).reshape(-1, 3))
            assert (policy.scores(grid).argmax(1) == action).all()
            checked += 1
    assert checked > 100


def test_the_radius_is_tight_where_the_network_is_as_steep_as_it_may_be():
    policy = SortPolicy((1,), 2, width=1, depth=1).requires_grad_(False)  # scores -|x - w_k|: they meet half-way
    policy.layers[0].weight.copy_(torch.tensor([[0.0], [1.0]]))
    x = torch.tensor([[0.1], [0.25], [0.49]])
    radius = policy.certify_unit(x).radius
    assert radius == pytest.approx(0.5 - x[:, 0].numpy(), abs=1e-5)
    outside = x + torch.from_numpy(radius)[:, None].float() + 2e-6
    assert (policy.scores(outside).argmax(1) == 1).all()


def test_a_large_mean_does_not_bend_the_lipschitz_constant():
    """A probe in float32 would see no difference between two inputs at means beyond 2^24: a constant of 0."""
    shift = MeanShift(3)
    shift.running_mean.copy_(torch.tensor([1e8, -3e9, 5e20]))
    assert shift.lipschitz == 1.0
    policy = build(0)
    for layer in policy.shifts:
        layer.running_mean.fill_(3e8)
    assert policy.lipschitz > 0.99


def test_ties_go_to_the_first_action_and_have_no_radius():
    policy = SortPolicy((2,), 5, width=4, depth=2).requires_grad_(False)
    policy.layers[-1].weight[1:] = policy.layers[-1].weight[0]
    x = torch.randn(40, 2)
    cert = policy.certify_unit(x)
    assert (cert.action == 0).all()
    assert (cert.action == policy.scores(x).argmax(1).numpy()).all()
    assert (cert.runner_up == 1).all()
    assert (cert.radius == 0).all()


def _stretched(policy: SortPolicy) -> SortPolicy:
    policy.requires_grad_(False).layers[0].weight.fill_(-3e38)
    return policy


BAD = {
    "NaN": (lambda p: p.certify_unit(torch.full((1, 3), math.nan)), "NaN or infinity"),
    "infinity": (lambda p: p.certify_unit(torch.tensor([[0.0, math.inf, 0.0]])), "NaN or infinity"),
    "shape": (lambda p: p.certify_unit(torch.zeros(2, 4)), r"expected \(batch, 3\)"),
    "overflow": (lambda p: _stretched(p).certify_unit(torch.full((1, 3), 3e38)), "overflow|NaN or infinity"),
    "raw NaN": (lambda p: p.certify([[0.0, math.nan, 0.0]]), "NaN or infinity"),
    "raw infinity behind a clip": (lambda p: p.predict([[0.0, math.inf, 0.0]]), "NaN or infinity"),
    "negative budget": (lambda p: certified_for(p, np.zeros((1, 3)), [-1, 0, 0]), "eps ranges from -1"),
    "unknown units": (lambda p: certified_for(p, np.zeros((1, 3)), 0.1, units="metres"), "'metres'"),
    "levels of floats": (lambda p: certified_levels(p, np.full((1, 3), 0.5)), "whole numbers"),
    "variant": (lambda p: acr(p, [torch.zeros(1, 3)], 0.1, "mine"), "choose one of margin"),
    "no episodes": (lambda p: acr(p, [], 0.1), "no episodes"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BAD)
def test_no_certificate_without_finite_numbers(case, backend):
    call, message = BAD[case]
    torch.manual_seed(0)
    policy = SortPolicy((3,), 2, width=4, depth=2, normalizer=Normalizer(np.zeros(3), np.ones(3), clip=10.0))
    with ops.use_backend(backend), pytest.raises(SortRLError, match=message):
        call(policy)


def test_numbers_that_might_overflow_next_to_the_state_are_not_certified():
    policy = SortPolicy((3,), 2, width=4, depth=2)
    assert (policy.certify_unit(torch.full((1, 3), 3e38) * torch.tensor([1.0, -1.0, 0.5])).radius == 0).all()


@settings(max_examples=40, deadline=None)
@given(NETWORKS, st.sampled_from([1e-3, 0.1, 3.0]), st.sampled_from([1.0, 1e4]))
def test_intervals_hold_the_computed_scores(spec, eps, size):
    policy = build(**spec)
    x = size * torch.randn(8, spec["inputs"])
    lo, hi = box_around(x, eps, None, None)
    low, high = score_bounds(policy, lo, hi)
    for _ in range(20):
        share = torch.rand_like(x).round() if _ % 2 else torch.rand_like(x)
        inside = torch.minimum(torch.maximum(lo + share * (hi - lo), lo), hi)
        scores = policy.scores(inside).double()
        assert ((low <= scores) & (scores <= high)).all()


def test_what_intervals_prove_is_never_changed_and_holds_the_margin():
    for seed in range(10):
        policy = build(seed, inputs=4, width=16, depth=3, decades=0.3)
        x = torch.randn(200, 4)
        cert = policy.certify_unit(x)
        action, eps = torch.from_numpy(cert.action), 0.5 * torch.rand(4)
        lo, hi = box_around(x, eps, None, None)
        held = proven(policy, lo, hi, action)
        assert held.any()
        for _ in range(50):
            corner = torch.where(torch.rand_like(x) < 0.5, lo, hi)
            assert (policy.scores(corner).argmax(1) == action)[held].all()
        inside = torch.from_numpy(cert.radius * 0.999)[:, None]
        certified = cert.radius > 1e-3
        assert proven(policy, *box_around(x, inside, None, None), action)[certified].all()


@pytest.mark.parametrize("clip", [math.inf, 2.0])
@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_raw_radii_hold_after_the_normaliser_has_rounded(mean, clip):
    scale = np.array([1e-3, 1.0, 50.0])
    generator = np.random.default_rng(0)
    changed_outside = checked = 0
    for seed in range(5):
        policy = build(seed, decades=0.2)
        policy.normalizer = Normalizer(np.full(3, mean), scale, clip)
        obs = mean + scale * generator.normal(size=(200, 3)) * 2
        action, radii = policy.predict(obs)[0], raw_radii(policy, obs)
        assert radii.shape == obs.shape
        for _ in range(15):
            sign = np.where(generator.random(obs.shape) < 0.5, -1.0, 1.0)
            moved = obs + sign * radii
            # Subtract what the addition itself may have rounded upwards.
            moved = np.where(np.abs(moved - obs) > radii, np.nextafter(moved, obs), moved)
            held = (radii > 0).all(1)
            assert (policy.predict(moved)[0] == action)[held].all()
            changed_outside += int((policy.predict(obs + sign * (3 * radii + scale))[0] != action).sum())
            checked += int(held.sum())
    assert checked > 3000
    assert changed_outside > 0


def test_a_clipped_value_may_move_as_far_as_it_stays_clipped():
    policy = build(0, decades=0.2)
    policy.normalizer = Normalizer(np.zeros(3), np.ones(3), clip=1.0)
    free, held = raw_radii(policy, [[5.0, 0.1, -0.2], [1.0, 0.1, -0.2]])
    assert free[0] == pytest.approx(held[0] + 4.0)
    assert free[1:] == pytest.approx(held[1:])


def test_budgets_per_coordinate():
    """One sensor alone may be off by far more than all together; what is promised for it holds."""
    generator = torch.Generator().manual_seed(0)
    alone = together = 0
    for seed in range(6):
        policy = build(seed, inputs=4, width=16, depth=3, decades=0.3)
        policy.normalizer = Normalizer(np.arange(4.0), np.array([0.1, 1.0, 2.0, 30.0]))
        obs = np.arange(4.0) + np.array([0.1, 1.0, 2.0, 30.0]) * torch.randn(200, 4, generator=generator).numpy()
        eps = 0.4 * np.array([0.0, 1.0, 0.0, 0.0])
        held = certified_for(policy, obs, eps)
        together += int(certified_for(policy, obs, 0.4 * policy.normalizer.scale.numpy()).sum())
        alone += int(held.sum())
        action = policy.predict(obs)[0]
        for _ in range(60):
            moved = obs + eps * (2 * torch.rand(200, 4, generator=generator).double().numpy() - 1)
            assert (policy.predict(moved)[0] == action)[held].all()
        unit_held = certified_for(policy, obs, eps / policy.normalizer.scale.numpy() * 0.999, units="unit")
        assert unit_held[held].all()
        margin = certified_for(policy, obs, policy.certify(obs).radius.min() * 0.99, units="unit")
        assert margin.all()
    assert alone > together > 0


def test_levels_of_grey():
    torch.manual_seed(0)
    policy = SortPolicy((1, 6, 6), 3, width=12, depth=2, pool=2, normalizer=Normalizer.from_pixels((1, 6, 6)))
    policy.requires_grad_(False)
    generator = np.random.default_rng(0)
    obs = generator.integers(0, 256, size=(60, 1, 6, 6))
    levels, action = certified_levels(policy, obs), policy.predict(obs)[0]
    assert levels.min() >= -1
    assert levels.max() >= 3
    assert (levels >= np.floor(policy.certify(obs).radius * 255 * 0.999)).all()
    for _ in range(200):
        step = levels.clip(min=0)[:, None, None, None] * generator.choice([-1, 1], size=obs.shape)
        moved = np.clip(obs + step, 0, 255).astype(np.uint8)
        assert (policy.predict(moved)[0] == action).all()


def test_acr_variants_differ_as_their_definitions_do():
    policy = build(1, inputs=3, width=16, depth=3, decades=0.2)
    short, long = torch.randn(10, 3), torch.randn(90, 3)
    cert = policy.certify_unit(torch.cat([short, long]))
    eps = float(np.median(cert.radius))
    margin = acr(policy, [short, long], eps)
    assert margin == pytest.approx(float((cert.radius > eps).mean()))
    radial = acr(policy, [short, long], eps, "radial")
    per_episode = [acr(policy, [part], eps, "radial") for part in (short, long)]
    assert radial == pytest.approx(np.mean(per_episode))
    assert per_episode[0] != per_episode[1], "the test needs episodes that differ"
    # The valid range leaves only the states themselves: nothing can be changed there.
    unit = torch.cat([short, long])
    tight = acr(policy, [unit], eps, "sa-dqn", unit.amin(0), unit.amax(0))
    assert tight >= acr(policy, [unit], eps, "sa-dqn") >= margin
    point = unit[:1]
    assert acr(policy, [point], 10.0, "sa-dqn", point[0], point[0]) == 1.0
    assert acr(policy, [point], 10.0, "radial", point[0], point[0]) == 0.0


def test_shares_are_those_of_the_package():
    from sortrl import certify

    assert certify.certified_shares is certified_shares
    assert set(certify.ACR_VARIANTS) == {"margin", "sa-dqn", "radial"}

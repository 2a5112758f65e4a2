"""Theorems about the layers and the policy, on random networks: they can fail, and did while this was written."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from sortrl import ops
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.nets import (
    AveragePool,
    BoundedConv,
    Centre,
    Crop,
    HybridPolicy,
    MeanShift,
    Ramp,
    Scale,
    SortConv,
    SortLinear,
    SortPolicy,
    load,
    truncated_mix,
)
from sortrl.nets.float_bounds import rounding_error, stages, traced_scores

networks = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "inputs": st.integers(1, 9),
        "actions": st.integers(2, 5),
        "width": st.integers(1, 24),
        "depth": st.integers(1, 4),
        "rho": st.sampled_from([0.0, 0.3, 0.7]),
        "scale": st.sampled_from([0.5, 1.0, 3.0]),
    }
)


def build(spec: dict) -> SortPolicy:
    torch.manual_seed(spec["seed"])
    policy = SortPolicy(
        (spec["inputs"],), spec["actions"], spec["width"], spec["depth"], spec["rho"], scale=spec["scale"]
    )
    policy.calibrate(torch.randn(64, spec["inputs"]))
    return policy


@settings(max_examples=60, deadline=None)
@given(networks, st.sampled_from([torch.float32, torch.float64]))
def test_measured_lipschitz_constant_never_exceeds_the_computed_one(spec, dtype):
    policy = build(spec).to(dtype)
    x = torch.randn(200, spec["inputs"], dtype=dtype)
    step = torch.randn_like(x) * 10.0 ** torch.randint(-3, 1, (200, 1))
    moved = (policy.scores(x + step) - policy.scores(x)).abs().amax(1)
    allowed = policy.lipschitz * (x + step - x).abs().amax(1)
    slack = 1e-5 if dtype == torch.float32 else 1e-12
    assert (moved <= allowed + slack * (1 + policy.scores(x).abs().amax(1))).all()


def test_the_constant_is_attained_so_the_bound_is_tight():
    layer = SortLinear(4, 1, rho=0.3)
    x = layer.weight.detach() + 5.0
    moved = layer(x + 1.0) - layer(x)
    assert float(moved.detach()) == pytest.approx(layer.lipschitz, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(networks)
def test_no_perturbation_inside_the_radius_changes_an_action(spec):
    policy = build(spec)
    x = torch.randn(64, spec["inputs"])
    cert = policy.certify_unit(x)
    radius = torch.from_numpy(cert.radius).float()[:, None]
    for _ in range(20):
        corner = torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0) * 0.999 * radius
        assert (policy.scores(x + corner).argmax(1).numpy() == cert.action)[cert.radius > 0].all()


def test_some_states_are_certified_and_a_planted_unsound_radius_is_caught():
    policy = build({"seed": 0, "inputs": 3, "actions": 3, "width": 16, "depth": 3, "rho": 0.3, "scale": 1.0})
    x = torch.randn(500, 3)
    cert = policy.certify_unit(x)
    assert (cert.radius > 0.01).mean() > 0.2
    unsound = torch.from_numpy(cert.radius).float()[:, None] * 20 + 0.5
    changed = 0
    for _ in range(50):
        corner = torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0) * unsound
        changed += int((policy.scores(x + corner).argmax(1).numpy() != cert.action).sum())
    assert changed > 0


@pytest.mark.parametrize("rho", [0.2, 0.3, 0.6])
def test_sampled_masks_average_to_the_exact_sort_layer(rho):
    torch.manual_seed(0)
    layer = SortLinear(20, 6, rho=rho)
    x = torch.randn(1, 20)
    keep = torch.rand(20_000, 20) >= rho
    keep[:, 0] |= ~keep.any(1)
    with torch.no_grad():
        sampled = ops.max_dist(x.expand(20_000, 20), layer.weight, keep)
    spread = sampled.std(0) / math.sqrt(20_000)
    assert ((sampled.mean(0) - layer(x)[0]).abs() <= 5 * spread + 1e-3).all()


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 0.95), st.integers(1, 700))
def test_truncated_mix_never_sums_to_more_than_one(rho, fan_in):
    mix = truncated_mix(rho, fan_in)
    total = math.fsum(mix.tolist())
    assert 1.0 - 1e-5 < total <= 1.0
    assert 1 <= len(mix) <= fan_in
    assert (mix > 0).all()


def test_the_truncated_mix_is_what_is_evaluated():
    layer = SortLinear(40, 3, rho=0.3)
    x = torch.randn(5, 40)
    ordered = (x[:, None] - layer.weight).abs().sort(dim=2, descending=True).values
    expected = ordered[..., : len(layer.mix)].double() @ layer.mix.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_front_ends_have_the_constant_they_claim():
    for front in (Crop(1, 2, 0, 3), AveragePool(2), AveragePool(4)):
        assert front.lipschitz == pytest.approx(1.0, abs=1e-12)
        x, step = torch.randn(30, 3, 12, 12), torch.rand(30, 3, 12, 12) * 2 - 1
        moved = (front(x + step) - front(x)).abs().flatten(1).amax(1)
        assert (moved <= front.lipschitz * step.abs().flatten(1).amax(1) + 1e-5).all()
    assert Scale(torch.tensor([0.5, 3.0])).lipschitz == 3.0


def test_rounding_errors_stay_within_the_slack():
    """Float32 scores against float64 ones: closer than the bound by which radii are shrunk, which is itself tiny."""
    for seed in range(20):
        policy = build({"seed": seed, "inputs": 6, "actions": 3, "width": 40, "depth": 4, "rho": 0.3, "scale": 3.0})
        x = 3 * torch.randn(200, 6)
        exact = copy.deepcopy(policy).double()
        error = (policy.scores(x).double() - exact.scores(x.double())).abs().amax(1)
        bound = rounding_error(stages(policy), traced_scores(policy, x)[1])
        assert (error <= bound).all()
        assert bound.max() < 0.01


def test_images_pass_through_the_front_end():
    policy = SortPolicy(
        (1, 12, 10), 3, width=8, depth=2, crop=(2, 2, 1, 1), pool=2, normalizer=Normalizer.from_pixels((1, 12, 10))
    )
    assert policy.layers[0].weight.shape == (8, 16)
    actions, _ = policy.predict(np.zeros((4, 1, 12, 10), dtype=np.uint8))
    assert actions.shape == (4,)


def test_a_layer_of_patches_is_a_sort_layer_at_every_patch():
    torch.manual_seed(0)
    layer = SortConv((2, 7, 6), channels=3, kernel=3, stride=2, rho=0.3)
    images = torch.randn(4, 2, 7, 6)
    dense = SortLinear(18, 3, rho=0.3)
    dense.weight = layer.weight
    out = layer(images.flatten(1)).reshape(4, *layer.out_shape)
    assert layer.out_shape == (3, 3, 2)
    for row in range(3):
        for column in range(2):
            patch = images[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            assert torch.allclose(out[:, :, row, column], dense(patch.flatten(1)))


def test_a_network_of_patches_is_as_lipschitz_as_it_says_and_trains():
    torch.manual_seed(0)
    shape = (2, 10, 10)
    policy = SortPolicy(shape, 3, width=12, depth=2, conv=((4, 3, 1), (6, 4, 2)), scale=2.0)
    x = torch.randn(64, *shape)
    exact = copy.deepcopy(policy).double()
    for size in (1e-3, 0.1, 2.0):
        moved = x + size * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0).double()
        change = (exact.scores(moved) - exact.scores(x.double())).abs().amax(1)
        assert (change <= policy.lipschitz * size * (1 + 1e-9)).all()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(20 * policy.training_scores(x), torch.arange(64) % 3).backward()
        optimizer.step()
    policy.calibrate(x)
    assert all(parameter.grad.abs().sum() > 0 for name, parameter in policy.named_parameters() if name != "mu")
    assert float((policy.scores(x).argmax(1) == torch.arange(64) % 3).float().mean()) > 0.8


def test_bounded_convolutions_are_as_lipschitz_as_they_say():
    """The worst input for a convolution is known: all its weights pulled in their own direction."""
    torch.manual_seed(0)
    layer = BoundedConv((3, 9, 8), channels=6, kernel=4, stride=2)
    layer.settle()
    assert layer.lipschitz == pytest.approx(1.0, abs=1e-6)
    x = torch.randn(2000, 3, 9, 8)
    moved = x.clone()
    moved[:, :, :4, :4] += 0.1 * layer.weight[2].sign()
    change = (layer(moved) - layer(x)).abs().amax((1, 2, 3))
    assert change.max() <= 0.1 * layer.lipschitz + 1e-6
    assert change.max() > 0.0999, "a constant that nothing reaches is not the constant"
    with torch.no_grad():
        layer.weight.mul_(3.0)
    assert layer.lipschitz == pytest.approx(3.0, abs=1e-5), "it is computed, not assumed"
    assert torch.allclose(layer.trained(x), BoundedConv.forward(_settled(layer), x), atol=1e-5)


def _settled(layer: BoundedConv) -> BoundedConv:
    twin = copy.deepcopy(layer)
    twin.settle()
    return twin


def test_bounds_of_a_bounded_convolution_hold_and_are_reached():
    torch.manual_seed(0)
    layer = BoundedConv((2, 5, 5), channels=4, kernel=3).double()
    layer.settle()
    x = torch.randn(50, 2, 5, 5, dtype=torch.float64)
    lo, hi = layer.bounds(x - 0.2, x + 0.2)
    for _ in range(20):
        y = layer(x + 0.2 * torch.where(torch.rand_like(x) < 0.5, -1.0, 1.0))
        assert ((y >= lo - 1e-12) & (y <= hi + 1e-12)).all()
    assert torch.allclose((hi - lo).amax(), torch.tensor(0.4, dtype=torch.float64), atol=1e-6)


def test_the_error_bound_notices_new_weights_of_a_convolution():
    policy = SortPolicy((2, 6, 6), 3, width=8, depth=2, bounded_conv=((4, 3, 1),))
    before = policy.error_bound().lipschitz
    with torch.no_grad():
        policy.front[0].weight.mul_(2.0)
    assert policy.error_bound().lipschitz == pytest.approx(2.0 * before)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([1e-3, 20 / 255, 1.0, 30.0]), st.sampled_from([0.5, 1.0, 1.5]))
def test_ramps_are_as_lipschitz_as_they_say_monotone_and_bounded(seed, width, limit):
    torch.manual_seed(seed)
    centre, ramp = Centre(50), Ramp(width, limit)
    centre.centres.copy_(torch.randn(50))
    x = torch.randn(100, 50)
    step = torch.rand_like(x) * 10.0 ** torch.randint(-3, 1, (100, 1))
    before, after = ramp(centre(x)), ramp(centre(x + step))
    assert (after >= before).all()
    assert float(torch.cat([before, after]).abs().max()) <= ramp.limit
    allowed = ramp.lipschitz * (x + step - x).abs().amax(1) + 1e-5 * ramp.lipschitz
    assert ((after - before).amax(1) <= allowed).all()
    assert torch.equal(before, (((x - centre.centres) / width).clamp(-limit, limit))), "the definition"


def test_saturated_ramps_still_show_attacks_where_to_go():
    """Plain automatic differentiation would give zeros, and an attack that never moves proves nothing."""
    torch.manual_seed(0)
    policy = SortPolicy((6,), 2, width=8, depth=2, rho=0.0, ramp_width=0.05).requires_grad_(False)
    x = 1.0 + torch.rand(20, 6)  # every ramp is saturated, those of the surrogate of x < 0.2 are not
    x.requires_grad_(True)
    (through,) = torch.autograd.grad(policy.scores(x).sum(), x)
    assert (through.abs().amax(1) > 0).all()
    near = (x.detach() / 10).requires_grad_(True)
    (wide,) = torch.autograd.grad(policy.surrogate_scores(near, 8.0).sum(), near)
    assert (wide[near > 0.2] == 0).all()
    assert (wide[near < 0.2] != 0).all()
    with torch.no_grad():
        assert torch.equal(policy.scores(x), policy.scores(x.detach()))
        assert torch.equal(policy.surrogate_scores(x.detach(), math.inf), policy.scores(x.detach()))


def test_a_policy_with_ramps_is_saved_with_its_centres(tmp_path):
    torch.manual_seed(0)
    policy = SortPolicy((1, 4, 4), 3, width=8, depth=2, pixels=(3, 3, 7), ramp_width=0.1, ramp_limit=1.5)
    next(part for part in policy.front if isinstance(part, Centre)).centres.copy_(torch.rand(3))
    policy.save(tmp_path)
    x = torch.rand(50, 1, 4, 4)
    again = load(tmp_path)
    assert torch.equal(again.scores(x), policy.scores(x))
    assert (again.certify_unit(x).radius == policy.certify_unit(x).radius).all()
    one = again.predict_certified(x[0].numpy())
    assert float(one.radius) == again.certify_unit(x[:1]).radius[0]
    moved = copy.deepcopy(policy)
    next(part for part in moved.front if isinstance(part, Centre)).centres.add_(0.2)
    assert not torch.equal(moved.scores(x), policy.scores(x))


@pytest.mark.parametrize(
    "change", [{"ramp_width": -1.0}, {"ramp_width": float("nan")}, {"ramp_limit": 0.0}, {"scale": 2.0}]
)
def test_ramps_that_are_none_are_refused(change):
    with pytest.raises(SortRLError, match=r"[Rr]amp"):
        SortPolicy((4,), 2, width=4, depth=1, **{"ramp_width": 0.1, **change})


def test_reachable_actions_behind_ramps_are_those_that_boxes_allow():
    torch.manual_seed(0)
    policy = SortPolicy((6,), 4, width=16, depth=3, rho=0.0, ramp_width=0.2).requires_grad_(False)
    x = torch.randn(200, 6) * 0.3
    policy.calibrate(x)
    policy.bias += policy.scores(x).mean(0)
    possible = policy.reachable(x, 0.05)
    assert possible[np.arange(200), policy.certify_unit(x).action].all()
    assert possible.sum() < 700, "some must be excluded, or nothing was tested"
    for _ in range(50):
        moved = policy.scores(x + 0.05 * (2 * torch.rand_like(x) - 1)).argmax(1).numpy()
        assert possible[np.arange(200), moved].all()


def test_mean_shift_averages_only_what_was_computed():
    shift = MeanShift(3, momentum=1.0)
    keep = torch.tensor([[True, False, True], [False, False, True]])
    x = torch.tensor([[1.0, 0.0, 1.0], [3.0, 0.0, 1.0], [0.0, 0.0, 4.0]])  # chunks of two rows and one
    out = shift.centre(x, keep)
    assert shift.running_mean.tolist() == [2.0, 0.0, 2.0]
    assert out[:, 0].tolist() == [-1.0, 1.0, -2.0]
    assert shift.lipschitz == 1.0


def test_masks_are_never_empty_and_dropped_outputs_are_not_computed():
    policy = SortPolicy((3,), 2, width=1, depth=3, rho=0.9, mask_chunk=1)
    assert torch.isfinite(policy.training_scores(torch.randn(200, 3))).all()
    wide = SortPolicy((3,), 2, width=50, depth=3, rho=0.5)
    mask = wide._draw_mask(256, wide.layers[1], torch.Generator().manual_seed(0))
    assert 0.4 < float(mask.float().mean()) < 0.6
    hidden = wide.layers[0].smooth(torch.randn(256, 3), 8.0, None, mask)
    assert (hidden[:128][:, ~mask[0]] == 0).all()


def test_training_reduces_the_loss_and_p_is_state():
    torch.manual_seed(0)
    policy = SortPolicy((4,), 2, width=32, depth=3)
    x = torch.randn(512, 4)
    labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    losses = []
    for step in range(150):
        policy.p.fill_(8.0 if step < 120 else math.inf)
        loss = torch.nn.functional.cross_entropy(policy.mu * policy.training_scores(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    policy.calibrate(x)
    assert losses[-1] < 0.5 * losses[0]
    assert float((policy.scores(x).argmax(1) == labels).float().mean()) > 0.85
    assert math.isinf(float(policy.state_dict()["p"]))


def test_surrogate_converges_to_the_network_as_p_grows():
    policy = SortPolicy((4,), 3, width=16, depth=2, rho=0.0)
    x = torch.randn(50, 4)
    errors = [(policy.surrogate_scores(x, p) - policy.scores(x)).abs().max().item() for p in (8.0, 64.0, 1024.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05


def test_copies_are_independent(tmp_path):
    policy = build({"seed": 1, "inputs": 4, "actions": 3, "width": 12, "depth": 3, "rho": 0.3, "scale": 2.0})
    x = torch.randn(20, 4)
    before = policy.scores(x)
    policy.save(tmp_path / "policy")
    clones = [copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), SortPolicy.load(tmp_path / "policy")]
    fresh = SortPolicy((4,), 3, 12, 3, scale=2.0)
    fresh.load_state_dict(policy.state_dict())
    for clone in [*clones, fresh]:
        assert torch.equal(clone.scores(x), before)
        assert clone.lipschitz == policy.lipschitz
    with torch.no_grad():
        policy.layers[0].weight.add_(1.0)
        policy.shifts[0].running_mean.add_(1.0)
    for clone in clones:
        assert torch.equal(clone.scores(x), before)


def test_evaluation_while_another_copy_trains():
    policy = SortPolicy((4,), 2, width=32, depth=3)
    policy.calibrate(torch.randn(100, 4))
    x = torch.randn(50, 4)
    before = policy.scores(x)
    trained = copy.deepcopy(policy)

    def train():
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.02)
        for _ in range(20):
            optimizer.zero_grad()
            trained.training_scores(torch.randn(128, 4)).square().mean().backward()
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    while thread.is_alive():
        assert torch.equal(policy.scores(x), before)
    thread.join()
    assert not torch.equal(trained.scores(x), before)


def test_predict_follows_the_stable_baselines3_contract():
    policy = SortPolicy((4,), 2, width=8, depth=2)
    action, state = policy.predict(np.zeros(4), state="s", episode_start=np.ones(1), deterministic=False)
    assert np.ndim(action) == 0
    assert state == "s"
    actions, _ = policy.predict(np.zeros((7, 4)))
    assert actions.shape == (7,)


def test_a_tie_has_radius_zero():
    policy = SortPolicy((2,), 2, width=4, depth=2)
    with torch.no_grad():
        policy.layers[-1].weight[1] = policy.layers[-1].weight[0]
    assert (policy.certify(np.random.default_rng(0).normal(size=(10, 2))).radius == 0).all()


BAD_INPUT = {
    "rho": (lambda: SortLinear(3, 2, rho=1.0), r"rho is 1\.0"),
    "negative rho": (lambda: SortPolicy((3,), 2, rho=-0.1), r"rho is -0\.1"),
    "no outputs": (lambda: SortLinear(3, 0), "0 outputs"),
    "no inputs": (lambda: SortLinear(0, 3), "0 inputs"),
    "one action": (lambda: SortPolicy((3,), 1), "at least 2"),
    "width": (lambda: SortPolicy((3,), 2, width=0), "width is 0"),
    "patches of vectors": (lambda: SortPolicy((3,), 2, conv=((4, 3, 1),)), "need images"),
    "patches larger than the image": (lambda: SortPolicy((1, 4, 4), 2, conv=((4, 5, 1),)), "fits into the image"),
    "half a description of patches": (lambda: SortPolicy((1, 4, 4), 2, conv=((4, 5),)), "channels, kernel, stride"),
    "an odd number of channels": (lambda: SortPolicy((1, 4, 4), 2, bounded_conv=((5, 2, 1),)), "even number"),
    "convolutions of vectors": (lambda: SortPolicy((3,), 2, bounded_conv=((4, 3, 1),)), "need images"),
    "a convolution that does not fit": (lambda: SortPolicy((1, 4, 4), 2, bounded_conv=((4, 5, 1),)), "fits into"),
    "pixels outside": (lambda: SortPolicy((3,), 2, pixels=(0, 3)), r"whole numbers in 0\.\.2"),
    "pixels outside of what a crop leaves": (lambda: SortPolicy((1, 4, 4), 2, crop=(1, 1, 0, 0), pixels=(8,)), "0..7"),
    "negative pixels": (lambda: SortPolicy((3,), 2, pixels=(-1,)), "whole numbers in"),
    "half a pixel": (lambda: SortPolicy((3,), 2, pixels=(0.5,)), "whole numbers in"),
    "pixels twice": (lambda: SortPolicy((3,), 2, pixels=(1, 1)), "no doubles"),
    "patches of pixels": (lambda: SortPolicy((1, 4, 4), 2, pixels=(1, 2), conv=((4, 2, 1),)), "leave no image"),
    "pooling vectors": (lambda: SortPolicy((3,), 2, pool=2), "need images"),
    "normalizer": (lambda: SortPolicy((3,), 2, normalizer=Normalizer.identity((4,))), "normalizer"),
    "observation shape": (lambda: SortPolicy((3,), 2).predict(np.zeros((2, 5))), r"expected \(batch, 3\)"),
    "NaN observation": (lambda: SortPolicy((3,), 2).certify(np.full((1, 3), np.nan)), "NaN or infinity"),
    "empty calibration": (lambda: SortPolicy((3,), 2).calibrate(torch.zeros(0, 3)), "no states"),
    "scale": (lambda: SortPolicy((3,), 2, scale=-1.0), "positive finite"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call()


@pytest.mark.parametrize(
    "pixels", [[0, 0], [-1, 2], [0, 3], [0, 2**70], [0, 1.0], [True, 0], "01", None, [], [[0], [1]]]
)
def test_hostile_pixels_are_refused(tmp_path, pixels):
    SortPolicy((3,), 2, width=4, depth=2, pixels=(0, 2)).save(tmp_path)
    file = tmp_path / "policy.safetensors"
    tensors, metadata = read_tensors(file)
    assert metadata["config"]["pixels"] == [0, 2]
    metadata["config"]["pixels"] = pixels
    write_tensors(file, tensors, metadata)
    with pytest.raises(SortRLError, match=r"policy.safetensors"):
        SortPolicy.load(tmp_path)


def test_pixels_that_are_not_chosen_do_not_matter(tmp_path):
    torch.manual_seed(0)
    policy = SortPolicy((2, 6, 6), 3, width=8, depth=2, crop=(1, 1, 0, 0), pool=2, pixels=(7, 0, 9)).eval()
    unit = torch.rand(20, 2, 6, 6)
    seen = policy.front(unit)
    assert torch.equal(seen, AveragePool(2)(Crop(1, 1, 0, 0)(unit)).flatten(1)[:, [7, 0, 9]])
    other = unit.clone()
    other[:, 0, :, 2:4] = 9.0
    other[:, :, 0] = 9.0
    assert torch.equal(policy.scores(other), policy.scores(unit))
    policy.save(tmp_path)
    assert torch.equal(SortPolicy.load(tmp_path).scores(unit), policy.scores(unit))
    hybrid = HybridPolicy((2, 6, 6), 3, width=8, depth=2, pixels=(7, 0, 9))
    hybrid.save(tmp_path)
    assert torch.equal(load(tmp_path).scores(unit), hybrid.scores(unit))


def test_damaged_files_are_refused(tmp_path):
    policy = SortPolicy((3,), 2, width=4, depth=2)
    policy.save(tmp_path)
    file = tmp_path / "policy.safetensors"
    content = file.read_bytes()
    for broken in (content[:50], content[:-20], b"not a policy", b""):
        file.write_bytes(broken)
        with pytest.raises(SortRLError, match="safetensors"):
            SortPolicy.load(tmp_path)
    with pytest.raises(SortRLError, match="no such file"):
        SortPolicy.load(tmp_path / "absent.safetensors")


def test_a_sort_layer_takes_the_inputs_of_a_linear_one():
    layer, linear = SortLinear(3, 2), torch.nn.Linear(3, 2)
    rows = torch.randn(24, 3)
    for x in (rows[0], rows, rows.reshape(4, 6, 3), rows.reshape(2, 3, 4, 3), torch.zeros(0, 5, 3)):
        assert layer(x).shape == linear(x).shape == layer.smooth(x, 8.0).shape
    assert torch.equal(layer(rows.reshape(4, 6, 3)).reshape(24, 2), layer(rows))
    assert torch.equal(layer(rows[0]), layer(rows)[0])
    with pytest.raises(SortRLError, match="received a single number"):
        layer(torch.tensor(1.0))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_with_what_to_do(half):
    for layer, x in ((SortLinear(3, 2), torch.zeros(2, 3, dtype=half)), (SortLinear(3, 2).to(half), torch.zeros(2, 3))):
        for call in (layer, lambda x, layer=layer: layer.smooth(x, 8.0)):
            with pytest.raises(SortRLError, match=r"prove nothing; keep this layer and its inputs in float32"):
                call(x)


def test_rho_belongs_to_the_state_of_a_layer(tmp_path):
    state = SortLinear(3, 2, rho=0.3).state_dict()
    assert list(state) == ["weight"]  # files of weights, and their fingerprints, are those of before
    with pytest.raises(RuntimeError, match=r"rho is 0\.3 there and 0\.0 here"):
        SortLinear(3, 2, rho=0.0).load_state_dict(state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match=r"1\.rho is 0\.3 there and 0\.0 here"):
        torch.nn.Sequential(torch.nn.ReLU(), SortLinear(3, 2, rho=0.0)).load_state_dict(
            torch.nn.Sequential(torch.nn.ReLU(), SortLinear(3, 2, rho=0.3)).state_dict()
        )
    layer = SortLinear(3, 2, rho=0.3)
    layer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(layer.weight, state["weight"])

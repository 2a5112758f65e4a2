"""What plays is what is certified: however weights were changed, no constant of before certifies anything."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from sortrl import load
from sortrl.certify import raw_radii
from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.nets import BoundedConv, HybridPolicy, Scale, SortLinear, SortPolicy, ThresholdPolicy
from sortrl.nets.base import CertifiedPolicy
from sortrl.nets.float_bounds import rounding_error, stages, traced_scores
from sortrl.nets.frozen import Copies

SHAPE = (2, 6, 6)
STATES = 60


def sort_policy() -> SortPolicy:
    return SortPolicy(SHAPE, 3, width=16, depth=2, bounded_conv=((4, 3, 1),), scale=2.0)


def hybrid_policy() -> HybridPolicy:
    return HybridPolicy(SHAPE, 3, width=16, depth=2, bounded_conv=((4, 3, 1),), hidden=(8,))


def rounded_policy() -> ThresholdPolicy:
    policy = ThresholdPolicy(SHAPE, 3, levels=1, conv=((4, 3, 1),), hidden=(8,))
    some = torch.rand(1, *SHAPE) < 0.05
    policy.rounding.thresholds.copy_(torch.where(some, torch.rand(1, *SHAPE), policy.rounding.thresholds))
    return policy


KINDS: dict[str, Callable[[], CertifiedPolicy]] = {
    "sort": sort_policy,
    "hybrid": hybrid_policy,
    "rounded": rounded_policy,
}


def settled(kind: str, seed: int = 0) -> tuple[CertifiedPolicy, Tensor]:
    """A policy that has played and certified already, and states."""
    torch.manual_seed(seed)
    policy, unit = KINDS[kind](), torch.rand(STATES, *SHAPE)
    policy.eval().requires_grad_(False)
    policy.calibrate(unit)
    last = policy.bias if isinstance(policy, SortPolicy) else policy.head.layers[-1].bias
    last.add_(policy.scores(unit).mean(0), alpha=1.0 if isinstance(policy, SortPolicy) else -1.0)  # no favourites
    certificate = policy.certify_unit(unit)
    assert (certificate.radius > 0).sum() > STATES / 3, "nothing is certified, so nothing can be stale"
    assert len(np.unique(certificate.action)) > 1
    return policy, unit


def grown(policy: CertifiedPolicy) -> dict[str, Tensor]:
    """Fifty times the weights."""
    names = dict(policy.named_parameters())
    return {name: 50 * tensor if name in names else tensor for name, tensor in policy.state_dict().items()}


def copied_and_loaded(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    other = copy.deepcopy(policy)
    other.load_state_dict(grown(policy))
    return other


def pickled_and_loaded(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    other = pickle.loads(pickle.dumps(policy))
    other.load_state_dict(grown(policy), assign=True)
    return other


def by_data(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    for parameter in policy.parameters():
        parameter.data.mul_(50)
    return policy


def by_new_data(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    for parameter in policy.parameters():
        parameter.data = parameter.data * 50
    return policy


def by_numpy(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    for parameter in policy.parameters():
        view = parameter.numpy()
        view *= 50
    return policy


def one_number_by_numpy(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    """The smallest ones, at which nobody looks."""
    for parameter in (some for some in policy.parameters() if some.ndim > 1):
        flat = parameter.numpy().reshape(-1)
        flat[np.abs(flat).argmin()] = 50 * np.abs(flat).max() + 1
    return policy


def by_inference(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
    """Tensors of inference mode do not count how often they are written to."""
    with torch.inference_mode():
        policy.load_state_dict({name: tensor.clone() for name, tensor in policy.state_dict().items()}, assign=True)
        policy.certify_unit(unit)
        for parameter in policy.parameters():
            parameter.mul_(50)
    return policy


def retrained(optimizer: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[..., CertifiedPolicy]:
    def train(policy: CertifiedPolicy, unit: Tensor) -> CertifiedPolicy:
        other = copy.deepcopy(policy).requires_grad_(True)
        other.certify_unit(unit)
        steps = optimizer(other.parameters(), lr=3.0, **options)
        other.scores(unit)[:, 0].sum().backward()
        steps.step()
        return other

    return train


CHANGES = {
    "copied, then loaded": copied_and_loaded,
    "pickled, then loaded": pickled_and_loaded,
    "through data": by_data,
    "by other data": by_new_data,
    "through NumPy": by_numpy,
    "one number through NumPy": one_number_by_numpy,
    "in inference mode": by_inference,
    "a step of a copy": retrained(torch.optim.SGD),
    "a fused step of a copy": retrained(torch.optim.Adam, fused=True),
}


def fresh(policy: CertifiedPolicy) -> CertifiedPolicy:
    """Another policy of these weights, which never certified anything."""
    other = type(policy)(normalizer=copy.deepcopy(policy.normalizer), **policy.describe())
    other.load_state_dict({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    return other.eval().requires_grad_(False)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_certificates_are_those_of_the_weights_as_they_are(kind, change):
    policy, unit = settled(kind)
    before = policy.scores(unit)
    changed = CHANGES[change](policy, unit)
    now, expected = changed.certify_unit(unit), fresh(changed).certify_unit(unit)
    assert np.array_equal(now.radius, expected.radius)
    assert np.array_equal(now.action, expected.action)
    assert changed.lipschitz == fresh(changed).lipschitz
    assert torch.equal(changed.scores(unit), fresh(changed).scores(unit))
    assert not torch.allclose(before, changed.scores(unit), rtol=1e-3), "nothing was changed"
    corners = unit + torch.from_numpy(0.999 * now.radius).reshape(-1, 1, 1, 1) * torch.sign(
        torch.randn(50, *unit.shape)
    )
    actions = changed.predict(corners.flatten(0, 1).float())[0].reshape(50, -1)
    assert (actions == now.action)[:, now.radius > 0].all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_that_is_not_noticed_changes_neither_play_nor_certificates(kind):
    policy, unit = settled(kind)
    scores, decision = policy.scores(unit), policy.predict_certified(unit)
    one_number_by_numpy(policy, unit)
    assert torch.equal(policy.scores(unit), scores)
    again = policy.predict_certified(unit)
    assert np.array_equal(again.radius, decision.radius)
    assert np.array_equal(again.action, policy.predict(unit)[0])
    policy.certify_unit(unit)  # reads all weights
    assert not torch.equal(policy.scores(unit), scores)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_get_the_gradients_of_the_scores(kind):
    policy, unit = settled(kind)
    policy.requires_grad_(True)
    policy.scores(unit)[:, 0].sum().backward()
    weight = policy.layers[-1].weight if isinstance(policy, SortPolicy) else policy.head.layers[-1].weight
    assert weight.grad is not None
    assert weight.grad.dtype == weight.dtype
    step, direction = 1e-2, torch.sign(weight.grad)
    before = policy.scores(unit)[:, 0].sum()
    with torch.no_grad():
        weight.add_(step * direction)
    gained = float((policy.scores(unit)[:, 0].sum() - before).detach())
    assert gained == pytest.approx(step * float(weight.grad.abs().sum()), rel=0.05)


def test_a_replaced_part_is_noticed():
    policy, unit = settled("sort")
    policy.predict(unit)
    policy.layers[-1] = SortLinear(16, 3, rho=0.3).requires_grad_(False)
    assert torch.equal(policy.scores(unit), fresh(policy).scores(unit))


def test_a_hook_cannot_change_what_plays():
    policy, unit = settled("sort")
    before = policy.scores(unit)
    policy.layers[0].register_forward_hook(lambda module, inputs, output: 50 * output)
    assert torch.equal(copy.deepcopy(policy).scores(unit), before)


def test_saved_after_a_change_that_was_not_noticed_it_loads_as_what_is_certified(tmp_path):
    policy, unit = settled("sort")
    one_number_by_numpy(policy, unit)
    policy.save(tmp_path)
    assert np.array_equal(load(tmp_path).certify_unit(unit).radius, policy.certify_unit(unit).radius)


def test_bare_layers_compute_their_constant_each_time():
    for layer, name in ((BoundedConv(SHAPE, 4, 3), "weight"), (Scale(2.0), "factor"), (SortLinear(5, 4), "mix")):
        before = layer.lipschitz
        getattr(layer, name).data.mul_(50)
        assert layer.lipschitz == pytest.approx(50 * before)
        getattr(layer, name).data.mul_(-1)
        assert layer.lipschitz == pytest.approx(50 * before)


@pytest.mark.parametrize("kind", KINDS)
def test_other_precisions_are_not_certified(kind):
    policy, unit = settled(kind)
    with pytest.raises(SortRLError, match="float64"):
        policy.double().certify_unit(unit.double())


@pytest.mark.parametrize("part", [lambda p: p.front[-1].factor, lambda p: p.layers[-1].mix])
def test_signs_that_the_proof_excludes_are_refused(part):
    policy, unit = settled("sort")
    part(policy).mul_(-1)
    with pytest.raises(SortRLError, match="negative"):
        policy.certify_unit(unit)


def test_a_network_that_ignores_its_input_is_certified():
    policy, unit = settled("sort")
    policy.front[0].weight.zero_()
    decision = policy.predict_certified(unit[0].numpy())
    assert decision.radius > 0
    assert int(decision.action) == int(policy.predict(100 * unit[0].numpy())[0])


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def test_copies_to_float64_do_not_depend_on_flushing():
    head = hybrid_policy().head.requires_grad_(False)
    head.layers[0].weight.fill_(1e-40)
    normal = Copies()(head).layers[0].weight
    with flushing():
        flushed = Copies()(head).layers[0].weight
    assert normal.dtype == torch.float64
    assert torch.equal(normal, flushed)


# Convolutions


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("channels", [1, 8])
def test_a_convolution_stays_within_its_rounding_bound_in_every_batch(onednn, channels):
    """Without oneDNN, torch computes small kernels in large batches by Winograd's algorithm."""
    torch.manual_seed(0)
    layer = BoundedConv((channels, 20, 20), 16, 3).requires_grad_(False)
    # Few large weights in one corner: what Winograd's transforms mix into the others is large beside their own sums.
    x = torch.rand(32, channels, 20, 20) * 10.0 ** torch.randint(-4, 1, (32, channels, 20, 20))
    exact = copy.deepcopy(layer).double()(x.double())
    size = torch.nn.functional.conv2d(x.double(), layer.weight.double().abs())
    size = torch.maximum(*size.chunk(2, 1)).repeat(1, 2, 1, 1)
    roundoff = layer.roundings * 2.0**-24
    with torch.backends.mkldnn.flags(enabled=onednn):
        for batch in (1, 16, 32):
            error = (layer(x[:batch]).double() - exact[:batch]).abs()
            assert bool((error <= roundoff / (1 - roundoff) * size[:batch]).all())


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_answered_as_each_state_alone(kind, onednn):
    policy, unit = settled(kind)
    with torch.backends.mkldnn.flags(enabled=onednn):
        together, alone = policy.scores(unit), torch.cat([policy.scores(state) for state in unit.split(1)])
        if isinstance(policy, SortPolicy):
            allowed = 2 * rounding_error(stages(policy), traced_scores(policy, unit)[1])[:, None]
        else:
            allowed = 2.0**-22 * together.abs().amax(1, keepdim=True)
        assert bool(((together - alone).abs() <= allowed).all())


# Numbers that are too small or too large


def leaning(policy: HybridPolicy | ThresholdPolicy, size: float) -> None:
    """A head that prefers the first action by no more than numbers of this size say."""
    for layer in policy.head.layers:
        layer.weight.fill_(size)
        layer.bias.zero_()
    policy.head.layers[-1].weight[1:].zero_()


@pytest.mark.parametrize(("size", "hidden"), [(1e-44, ()), (1e-22, (4,)), (3e-39, ())])
def test_scores_too_small_for_float32_are_ties(size, hidden):
    torch.manual_seed(0)
    hybrid = HybridPolicy((3,), 2, width=8, depth=2, hidden=hidden).requires_grad_(False)
    hybrid.trunk.bias.sub_(2.0)
    rounded = ThresholdPolicy(SHAPE, 2, levels=1, conv=(), hidden=hidden).requires_grad_(False)
    rounded.rounding.thresholds.fill_(0.5)
    for policy, unit in ((hybrid, torch.zeros(5, 3)), (rounded, torch.ones(5, *SHAPE))):
        leaning(policy, size)
        assert (policy.certify_unit(unit).radius == 0).all()
        with flushing():
            assert (policy.certify_unit(unit).radius == 0).all()


def test_scores_that_are_flushed_to_zero_are_ties():
    """Of two scores above 2^-126 the difference is certified; below, they may both be zero."""
    policy = HybridPolicy((2,), 2, width=2, depth=1, hidden=()).requires_grad_(False)
    policy.trunk.layers[0].weight.copy_(torch.tensor([[4.0, 4.0], [-4.0, -4.0]]))
    policy.head.layers[0].weight.copy_(torch.tensor([[-3e-38, 0.0], [0.0, -3e-38]]))
    policy.head.layers[0].bias.zero_()
    unit = torch.linspace(-3, 3, 41)[:, None].expand(-1, 2).contiguous()
    with flushing():
        certificate = policy.certify_unit(unit)
        for sign in (-1, 1):
            moved = unit + sign * torch.from_numpy(certificate.radius)[:, None].float()
            assert (policy.predict(moved)[0] == certificate.action)[certificate.radius > 0].all()
    policy.head.layers[0].weight.mul_(1e8)
    assert (policy.certify_unit(unit).radius > 0).any()


@pytest.mark.parametrize("build", [SortPolicy, HybridPolicy])
def test_what_overflows_nearby_is_not_certified(build):
    torch.manual_seed(0)
    policy = build((3,), 2, width=8, depth=2, scale=1e38).requires_grad_(False)
    unit = torch.rand(50, 3)
    assert (policy.certify_unit(unit).radius == 0).all()
    assert not policy.proven(unit - 4.0, unit + 4.0, torch.from_numpy(policy.certify_unit(unit).action)).any()


def test_a_number_that_overflows_on_the_way_is_not_certified():
    """Large weights and a small factor behind them: the scores are ordinary numbers, what leads to them is not."""
    torch.manual_seed(0)
    policy = SortPolicy(SHAPE, 3, width=8, depth=2, bounded_conv=((4, 3, 1),), scale=1e-36).requires_grad_(False)
    unit = torch.rand(STATES, *SHAPE) * 100
    policy.calibrate(unit)
    policy.front[0].weight.mul_(1e36)
    assert torch.isfinite(policy.scores(unit)).all()
    assert (policy.certify_unit(unit).radius == 0).all()
    assert (policy.predict_certified(unit[0].numpy()).radius == 0).all()


def test_head_scores_beyond_float32_are_not_certified():
    policy = ThresholdPolicy(SHAPE, 2, levels=1, conv=(), hidden=()).requires_grad_(False)
    policy.rounding.thresholds.fill_(0.5)
    leaning(policy, 2e37)
    policy.head.layers[0].bias.fill_(1e38)
    unit = torch.zeros(2, *SHAPE)
    unit[0, 0, 0, :2] = 1.0
    assert (policy.certify_unit(unit).radius == 0).all()


def test_raw_radii_are_rounded_down_where_scales_have_few_digits():
    torch.manual_seed(0)
    smallest = 5e-324
    scale = smallest * np.arange(1.0, 7.0)
    policy = SortPolicy((6,), 2, width=16, depth=2, normalizer=Normalizer(np.zeros(6), scale)).requires_grad_(False)
    obs = np.random.default_rng(0).integers(-3, 4, (100, 6)) * smallest
    radius = policy.certify(obs).radius
    found = raw_radii(policy, obs)
    assert (radius > 0.3).any()
    for row, most in zip(found, radius, strict=True):
        assert all(Fraction(raw) <= Fraction(most) * Fraction(unit) for raw, unit in zip(row, scale, strict=True))


# Thresholds


def test_a_threshold_that_counts_as_unused_does_not_act():
    policy = ThresholdPolicy((1, 2, 2), 2, levels=1, conv=(), hidden=()).requires_grad_(False)
    policy.rounding.thresholds.fill_(30_000.0)
    policy.head.layers[0].weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
    policy.head.layers[0].bias.copy_(torch.tensor([0.5, 0.0]))
    unit = torch.full((1, 1, 2, 2), 29_999.75)
    certificate = policy.certify_unit(unit)
    assert certificate.radius[0] > 0.5
    assert policy.predict(unit + 0.5)[0][0] == certificate.action[0]
    leads = torch.zeros(1, dtype=torch.int64)
    assert bool(policy.proven(unit - 1, unit + 1, leads))
    assert torch.equal(policy.scores(unit), policy.scores((unit + 0.5).requires_grad_()))

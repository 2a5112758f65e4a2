"""The kernels against the definition: forward, backward, every instruction set, odd shapes, ties, bad input."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from sortrl import ops
from sortrl.core.errors import SortRLError
from sortrl.ops import cpu, reference
from sortrl.ops.dispatch import lp_dist_op, max_dist_op, sort_dist_op

SHAPES = [(1, 1, 1), (3, 17, 5), (2, 1023, 7), (70, 33, 19), (40, 129, 70)]
EXPONENTS = [2.0, 3.5, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 1000.0, 1024.0, 5000.0]
needs_kernels = pytest.mark.skipif(cpu.select().module is None, reason=f"no compiled kernels: {cpu.select().reason}")


def problem(
    batch: int, fan_in: int, out: int, masked: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(batch * fan_in + out)
    x = torch.randn(batch, fan_in, generator=generator)
    w = torch.randn(out, fan_in, generator=generator)
    grad = torch.randn(batch, out, generator=generator)
    if not masked:
        return x, w, None, None, grad
    chunks = batch // 16 + 1  # the last chunk is shorter
    in_keep = torch.rand(chunks, fan_in, generator=generator) < 0.7
    in_keep[:, 0] = True
    out_keep = torch.rand(chunks, out, generator=generator) < 0.7
    return x, w, in_keep, out_keep, grad


def with_gradients(function, x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = function(x, w)
    return (y.detach(), *torch.autograd.grad(y, (x, w), grad.to(y.dtype)))


def assert_same(ours, definition, tolerance: float) -> None:
    for name, mine, exact in zip(("y", "grad_x", "grad_w"), ours, definition, strict=False):
        scale = exact.abs().max().clamp(min=1e-6) if exact.numel() else 1.0
        error = ((mine.double() - exact) / scale).abs().max() if exact.numel() else torch.zeros(())
        assert error <= tolerance, f"{name}: relative error {float(error):.2e}"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_max_dist_is_its_definition(shape, masked):
    x, w, in_keep, out_keep, grad = problem(*shape, masked)
    ours = with_gradients(lambda a, b: ops.max_dist(a, b, in_keep, out_keep), x, w, grad)
    definition = with_gradients(lambda a, b: reference.max_dist(a, b, in_keep, out_keep), x.double(), w.double(), grad)
    assert_same(ours, definition, 1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lp_dist_is_its_definition(shape, p, masked):
    x, w, in_keep, out_keep, grad = problem(*shape, masked)
    ours = with_gradients(lambda a, b: ops.lp_dist(a, b, p, in_keep, out_keep), x, w, grad)
    definition = with_gradients(
        lambda a, b: reference.lp_dist(a, b, p, in_keep, out_keep), x.double(), w.double(), grad
    )
    # Rounding of |t| / y is magnified p times by the power, here and in any float32 implementation.
    assert_same(ours, definition, 2e-6 + 4e-7 * p)
    assert_same(ours[:1], definition[:1], 2e-6)


def few_values(batch: int, fan_in: int, counts: tuple[int, ...], others: int = 0) -> Tensor:
    """Columns of x that take few values (``counts``, over and over), and ``others`` that take as many as there are rows."""
    generator = torch.Generator().manual_seed(batch * fan_in)
    columns = []
    for column in range(fan_in):
        values = torch.randn(counts[column % len(counts)], generator=generator)
        columns.append(values[torch.randint(len(values), (batch,), generator=generator)])
    x = torch.stack(columns, 1)
    if others:
        x[:, :: fan_in // others] = torch.randn(batch, len(range(0, fan_in, fan_in // others)), generator=generator)
    return x


FEW = [
    (64, 100, 33, (2,), 0),
    (133, 257, 50, (1, 2, 3, 5, 7, 16), 0),
    (40, 130, 20, (2, 3, 17, 4), 13),
    (600, 65, 17, (2,), 20),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("p", [2.0, 3.5, 8.0, 24.0, 64.0, 1000.0, 1024.0])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_lp_dist_of_few_values_is_its_definition(case, p, masked):
    """Inputs like those of images behind ramps go through tables; the gradient of w alone does, too."""
    batch, fan_in, out, counts, others = case
    x = few_values(batch, fan_in, counts, others)
    _, w, _, out_keep, grad = problem(batch, fan_in, out, masked)
    results = []
    for function, weight in ((ops.lp_dist, w.clone()), (reference.lp_dist, w.double())):
        leaf = weight.requires_grad_()
        y = function(x.to(leaf.dtype), leaf, p, None, out_keep)
        results.append((y.detach(), torch.zeros(1), torch.autograd.grad(y, leaf, grad.to(y.dtype))[0]))
    ours, definition = results
    assert_same(ours, definition, 2e-6 + 4e-7 * p)
    assert_same(ours[:1], definition[:1], 2e-6)


def test_tables_give_way_where_powers_would_vanish():
    """A unit whose scale is far above its distances in some rows: sums of tables would be 0 there."""
    x = torch.zeros(64, 40)
    x[:32] = 50.0
    w = torch.cat([torch.full((20, 40), 50.0), torch.full((20, 40), 49.0)])
    definition = reference.lp_dist(x.double(), w.double(), 64.0)
    assert definition.max() / definition[definition > 0].min() > 40
    torch.testing.assert_close(ops.lp_dist(x, w, 64.0).double(), definition, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_max_dist_of_few_values_is_its_definition_to_the_bit(case):
    batch, fan_in, out, counts, others = case
    x = few_values(batch, fan_in, counts, others)
    w = torch.randn(out, fan_in, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ops.max_dist(x, w), reference.max_dist(x, w))


@pytest.mark.parametrize("top", [1, 3, 4, 8, 12, 16, 20, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_sort_dist_is_its_definition(shape, top):
    x, w, _, _, grad = problem(*shape, masked=False)
    if top > x.shape[1]:
        pytest.skip("the mix is longer than the fan-in")
    mix = torch.rand(top, generator=torch.Generator().manual_seed(top))
    ours = with_gradients(lambda a, b: ops.sort_dist(a, b, mix), x, w, grad)
    definition = with_gradients(lambda a, b: reference.sort_dist(a, b, mix), x.double(), w.double(), grad)
    assert_same(ours, definition, 2e-6)


@pytest.mark.parametrize("top", [1, 3, 12, 32])
@pytest.mark.parametrize("shape", [(9, 640, 33), (3, 1100, 5), (2, 2500, 3), (130, 40, 17), (2, 7056, 18)])
def test_sort_dist_is_its_definition_where_many_values_are_equal(shape, top):
    """Whole numbers, so that ranks are full of ties; enough inputs that whole blocks of them are skipped."""
    x, w, _, _, grad = problem(*shape, masked=False)
    x, w, mix = (2 * x).round(), (2 * w).round(), torch.rand(top, generator=torch.Generator().manual_seed(top))
    ours = with_gradients(lambda a, b: ops.sort_dist(a, b, mix), x, w, grad)
    definition = with_gradients(lambda a, b: reference.sort_dist(a, b, mix), x.double(), w.double(), grad)
    assert_same(ours, definition, 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_are_their_definition_and_hold(shape):
    lo, w, _, _, _ = problem(*shape, masked=False)
    hi = lo + torch.rand_like(lo)
    mix = torch.tensor([0.7, 0.2, 0.1])[: lo.shape[1]]
    inside = lo + torch.rand(20, *lo.shape) * (hi - lo)
    for bounds, layer in (
        (ops.sort_bounds(lo, hi, w, mix), lambda x: ops.sort_dist(x, w, mix)),
        (ops.max_bounds(lo, hi, w), lambda x: ops.max_dist(x, w)),
    ):
        for x in inside:
            y = layer(x)
            assert (y >= bounds[0] - 1e-5).all()
            assert (y <= bounds[1] + 1e-5).all()
    for ours, exact in zip(
        ops.sort_bounds(lo, hi, w, mix), reference.sort_bounds(lo.double(), hi.double(), w.double(), mix), strict=True
    ):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    # Exact, not merely valid: the farthest corner attains the upper bound.
    k = 0
    corner = torch.where((lo - w[k]).abs() > (hi - w[k]).abs(), lo, hi)
    torch.testing.assert_close(ops.max_dist(corner, w)[:, k], ops.max_bounds(lo, hi, w)[1][:, k])


@pytest.mark.parametrize("shape", [*SHAPES, (7, 1100, 45)])
@pytest.mark.parametrize("width", [0.0, 0.05, 3.0])
def test_bounds_of_a_maximum_are_its_definition_to_the_bit(shape, width):
    """Whole numbers among them: intervals that end at a weight, and corners at the same distance from it."""
    x, w, _, _, _ = problem(*shape, masked=False)
    for scale in (1.0, 1e-30, 1e30):
        for lo, weights in ((scale * x, scale * w), ((2 * x).round() * scale, (2 * w).round() * scale)):
            hi = lo + width * scale
            for ours, exact in zip(ops.max_bounds(lo, hi, weights), reference.max_bounds(lo, hi, weights), strict=True):
                assert torch.equal(ours.view(torch.int32), exact.view(torch.int32))


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e15])
@pytest.mark.parametrize("p", [2.0, 8.0, 16.0, 1000.0])
def test_lp_dist_survives_any_magnitude(p, scale):
    x, w, _, _, grad = problem(5, 40, 6, masked=False)
    ours = with_gradients(lambda a, b: ops.lp_dist(a, b, p), x * scale, w * scale, grad)
    definition = with_gradients(
        lambda a, b: reference.lp_dist(a, b, p), (x * scale).double(), (w * scale).double(), grad
    )
    assert_same(ours, definition, 1e-5 + 4e-7 * p)


def test_identical_points_have_distance_and_gradient_zero():
    x = torch.ones(2, 5)
    for function in (ops.max_dist, lambda a, b: ops.lp_dist(a, b, 8.0), lambda a, b: ops.lp_dist(a, b, 100.0)):
        y, gx, gw = with_gradients(function, x, x.clone(), torch.ones(2, 2))
        assert (y == 0).all()
        assert (gx == 0).all()
        assert (gw == 0).all()


def test_ties_go_to_the_lower_input():
    x, w = torch.zeros(1, 6), torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.5, 2.0]])
    _, gx, _ = with_gradients(ops.max_dist, x, w, torch.ones(1, 1))
    assert gx.tolist() == [[0, -1, 0, 0, 0, 0]]
    _, gx, _ = with_gradients(lambda a, b: ops.sort_dist(a, b, torch.tensor([0.5, 0.25])), x, w, torch.ones(1, 1))
    assert gx.tolist() == [[0, -0.5, -0.25, 0, 0, 0]]


def test_empty_batch():
    x, w = torch.zeros(0, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    for y in (ops.max_dist(x, w), ops.lp_dist(x, w, 8.0), ops.sort_dist(x, w, torch.ones(2))):
        assert y.shape == (0, 2)
        gx, gw = torch.autograd.grad(y.sum(), (x, w))
        assert gx.shape == (0, 3)
        assert (gw == 0).all()


def test_p_to_infinity_converges_to_the_maximum():
    x, w, *_ = problem(20, 50, 10, masked=False)
    errors = [float((ops.lp_dist(x, w, p) - ops.max_dist(x, w)).abs().max()) for p in (8.0, 64.0, 512.0, 4096.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01
    assert torch.equal(ops.lp_dist(x, w, math.inf), ops.max_dist(x, w))


@needs_kernels
@pytest.mark.parametrize("isa", [name for name in cpu.INSTRUCTION_SETS if cpu.select().module is not None])
def test_every_instruction_set_passes_these_tests(isa):
    """Run this file again in a process that is told which instruction set to use."""
    if os.environ.get("SORTRL_ISA"):
        pytest.skip("already inside such a run")
    if isa not in cpu.select().module.cpu_supports():
        pytest.skip(f"this processor has no {isa}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "definition or magnitude or ties or empty",
    ]
    run = subprocess.run(command, env={**os.environ, "SORTRL_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    assert " passed" in run.stdout


@needs_kernels
def test_custom_ops_are_well_formed():
    x, w, in_keep, out_keep, _ = problem(5, 9, 4, masked=True)
    x.requires_grad_()
    w.requires_grad_()
    for op, args in (
        (max_dist_op, (x, w, in_keep, out_keep)),
        (lp_dist_op, (x, w, 8.0, None, out_keep)),
        (sort_dist_op, (x, w, torch.tensor([0.7, 0.3]))),
    ):
        torch.library.opcheck(op, args)


def test_gradcheck_of_the_reference():
    x, w, in_keep, out_keep, _ = problem(3, 7, 4, masked=True)
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    mix = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: ops.max_dist(a, b, in_keep, out_keep), (x, w))
    assert torch.autograd.gradcheck(lambda a, b: ops.lp_dist(a, b, 8.0, in_keep, out_keep), (x, w))
    assert torch.autograd.gradcheck(lambda a, b: ops.sort_dist(a, b, mix), (x, w))


@needs_kernels
def test_torch_compile_without_graph_breaks():
    x, w, *_ = problem(5, 9, 4, masked=False)
    x.requires_grad_()
    mix = torch.tensor([0.7, 0.3])

    def both(a):
        return ops.sort_dist(ops.lp_dist(a, w, 8.0), w[:, :4], mix).sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(both(x), x))


@needs_kernels
def test_results_do_not_depend_on_threads_and_repeat_exactly():
    x, w, in_keep, out_keep, grad = problem(300, 200, 150, masked=True)
    mix = torch.rand(12)
    functions = [
        lambda a, b: ops.max_dist(a, b, in_keep, out_keep),
        lambda a, b: ops.lp_dist(a, b, 8.0, in_keep, out_keep),
        lambda a, b: ops.lp_dist(a, b, 96.0, in_keep, out_keep),
        lambda a, b: ops.sort_dist(a, b, mix),
    ]
    before = torch.get_num_threads()
    try:
        for function in functions:
            results = []
            for threads in (1, 2, 3, 7, 1):
                torch.set_num_threads(threads)
                results.append(with_gradients(function, x, w, grad))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
        few = few_values(300, 200, (2, 3))
        for p in (8.0, 64.0):
            results = []
            for threads in (1, 2, 3, 7, 1):
                torch.set_num_threads(threads)
                leaf = w.clone().requires_grad_()
                y = ops.lp_dist(few, leaf, p)
                results.append((y.detach(), *torch.autograd.grad(y, leaf, grad)))
            assert all(torch.equal(a, b) for other in results for a, b in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_many_python_threads_at_once():
    x, w, _, _, grad = problem(200, 150, 120, masked=False)
    alone = with_gradients(lambda a, b: ops.lp_dist(a, b, 8.0), x, w, grad)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda _: with_gradients(lambda a, b: ops.lp_dist(a, b, 8.0), x, w, grad), range(24)))
    for result in together:
        assert all(torch.equal(a, b) for a, b in zip(alone, result, strict=True))


def _in_child(_: int) -> float:
    x, w, *_ = problem(200, 150, 120, masked=False)
    return float(cpu.max_forward(x, w, None, None).sum())


@needs_kernels
def test_kernels_work_in_a_forked_child():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        here = _in_child(0)  # starts this process's worker threads, which a child does not inherit
        with multiprocessing.get_context("fork").Pool(2) as children:
            assert children.map_async(_in_child, range(4)).get(timeout=60) == [here] * 4
    finally:
        torch.set_num_threads(before)


def test_backends_can_be_asked_for_and_forced():
    x, w, *_ = problem(30, 40, 20, masked=False)
    with ops.use_backend("reference"):
        assert ops.backend_for(x)[0] == "reference"
        y = ops.max_dist(x, w)
    torch.testing.assert_close(y, ops.max_dist(x, w))
    assert ops.backend_for(x.double())[0] == "reference"


def test_the_reference_backend_keeps_memory_bounded_and_gradients_right(monkeypatch):
    monkeypatch.setattr(ops, "_slice_rows", lambda w: 7)
    x, w, in_keep, out_keep, grad = problem(40, 20, 10, masked=True)
    with ops.use_backend("reference"):
        sliced = with_gradients(lambda a, b: ops.lp_dist(a, b, 8.0, in_keep, out_keep), x, w, grad)
    whole = with_gradients(lambda a, b: reference.lp_dist(a, b, 8.0, in_keep, out_keep), x, w, grad)
    for a, b in zip(sliced, whole, strict=True):
        torch.testing.assert_close(a, b)


X, W = torch.zeros(2, 3), torch.zeros(4, 3)
BAD_INPUT = {
    "rank": (lambda: ops.max_dist(torch.zeros(3), W), r"x has shape \(3,\)"),
    "sizes": (lambda: ops.max_dist(torch.zeros(2, 5), W), "5 inputs"),
    "dtype": (lambda: ops.max_dist(X.int(), W), r"torch\.int32"),
    "mixed dtypes": (lambda: ops.lp_dist(X.double(), W, 8.0), r"float64 and w is torch\.float32"),
    "device": (lambda: ops.max_dist(X.to("meta"), W), "on meta and w on cpu"),
    "no inputs": (lambda: ops.max_dist(torch.zeros(2, 0), torch.zeros(4, 0)), "at least 1"),
    "p too small": (lambda: ops.lp_dist(X, W, 1.0), r"p is 1\.0"),
    "p is NaN": (lambda: ops.lp_dist(X, W, math.nan), "p is nan"),
    "K < 1": (lambda: ops.sort_dist(X, W, torch.zeros(0)), "K between 1 and the 3 inputs"),
    "K > fan-in": (lambda: ops.sort_dist(X, W, torch.zeros(4)), "K between 1 and the 3 inputs"),
    "mask shape": (
        lambda: ops.max_dist(X, W, torch.ones(1, 4, dtype=torch.bool)),
        r"expected bool of shape \(chunks, 3\)",
    ),
    "mask dtype": (lambda: ops.max_dist(X, W, torch.ones(1, 3)), r"torch\.float32 of shape"),
    "mask chunks": (
        lambda: ops.max_dist(X, W, torch.ones(1, 3, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)),
        "1 chunks and out_keep 2",
    ),
    "empty mask": (lambda: ops.max_dist(X, W, torch.zeros(1, 3, dtype=torch.bool)), "keeps no input"),
    "box upside down": (lambda: ops.max_bounds(X + 1, X, W), "lo exceeds hi"),
    "box shapes": (lambda: ops.max_bounds(X, torch.zeros(1, 3), W), "equal shapes"),
    "unknown backend": (lambda: ops.use_backend("gpu").__enter__(), "choose one of"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named(case):
    call, message = BAD_INPUT[case]
    with pytest.raises(SortRLError, match=message):
        call()


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_numbers_are_refused(bad):
    x = X.clone()
    x[1, 2] = bad
    for call in (
        lambda: ops.max_dist(x, W),
        lambda: ops.lp_dist(X, W + bad, 8.0),
        lambda: ops.sort_dist(x, W, torch.ones(2)),
    ):
        with pytest.raises(SortRLError, match="NaN or infinity"):
            call()


class OnlyDlpack:
    """An array that has none of the newer ways to be read: what torch before 2.10 shows to the kernels."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def detach(self) -> OnlyDlpack:
        return OnlyDlpack(self.tensor.detach())

    def __dlpack__(self, **options: object) -> object:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> object:
        return self.tensor.__dlpack_device__()


@needs_kernels
@pytest.mark.parametrize("array", [OnlyDlpack, lambda tensor: tensor.detach().numpy()], ids=["dlpack", "numpy"])
def test_kernels_take_any_array_that_speaks_dlpack(array):
    x, w, in_keep, out_keep, _ = problem(5, 9, 4, masked=True)
    expected, y = cpu.max_forward(x, w, in_keep, out_keep), torch.zeros(5, 4)
    module = cpu.select().module
    module.max_forward(array(x.requires_grad_()), array(w), array(in_keep), array(out_keep), 1, array(y))
    assert torch.equal(y, expected)
    with pytest.raises(SortRLError, match=r"y is float32 of shape \(5, 3\)"):
        module.max_forward(array(x), array(w), None, None, 1, array(torch.zeros(5, 3)))


def _read_only(tensor: Tensor) -> object:
    array = tensor.numpy()
    array.flags.writeable = False
    return array


Y, MIX, KEEP = torch.zeros(2, 4), torch.ones(2), torch.ones(2, 3, dtype=torch.bool)
BAD_CALLS = {
    "none": ("max_forward", (None, W, None, None, 1, Y), "incompatible"),
    "no tensor": ("max_forward", (3, W, None, None, 1, Y), "x is a int, expected a tensor"),
    "x: rank": ("max_forward", (X[0], W, None, None, 1, Y), r"x is float32 of shape \(3,\); .* shape \(any, 3\)"),
    "x: type": ("max_forward", (X.double(), W, None, None, 1, Y), "x is float64 .* expected .* float32"),
    "x: strides": ("max_forward", (torch.zeros(3, 2).T, W, None, None, 1, Y), "x is .* not contiguous"),
    "x: slice": ("max_forward", (torch.zeros(2, 6)[:, ::2], W, None, None, 1, Y), "x is .* not contiguous"),
    "w: inputs": ("max_forward", (X, torch.zeros(4, 5), None, None, 1, Y), r"x is .* expected .* \(any, 5\)"),
    "w: empty": ("max_forward", (X, torch.zeros(0, 3), None, None, 1, Y), "w has a side of 0"),
    "mask: type": ("max_forward", (X, W, torch.ones(1, 3), None, 1, Y), "in_keep is float32 .* expected .* bool"),
    "mask: size": ("max_forward", (X, W, None, KEEP, 1, Y), r"out_keep is bool of shape \(2, 3\)"),
    "mask: rows": ("max_forward", (X, W, KEEP, torch.ones(1, 4).bool(), 1, Y), r"out_keep is .* shape \(2, 4\)"),
    "mask: empty": ("max_forward", (X, W, KEEP[:0], None, 1, Y), "masks have no rows"),
    "y: size": ("max_forward", (X, W, None, None, 1, X), r"y is .* shape \(2, 3\); .* \(2, 4\)"),
    "y: read only": ("max_forward", (X, W, None, None, 1, _read_only(Y)), "y is a .*ndarray, expected a writable"),
    "grad: size": ("max_backward", (X, W, None, None, 1, Y, X, None, None), r"grad is .* expected .* \(2, 4\)"),
    "grad_x: size": ("max_backward", (X, W, None, None, 1, Y, Y, W, None), r"grad_x is .* expected .* \(2, 3\)"),
    "grad_w: size": ("lp_backward", (X, W, None, None, 1, 8.0, Y, Y, None, X), r"grad_w is .* expected .* \(4, 3\)"),
    "p": ("lp_forward", (X, W, None, None, 1, math.inf, Y), "p is inf"),
    "p of backward": ("lp_backward", (X, W, None, None, 1, 1.0, Y, Y, X, W), r"p is 1\.0"),
    "mix: too long": ("sort_forward", (X, W, 1, torch.ones(4), Y), "mix has 4 weights; expected 1 to 3"),
    "mix: longer than the kernels": (
        "sort_backward",
        (torch.zeros(2, 99), torch.zeros(4, 99), 1, torch.ones(33), Y, None, None),
        "expected 1 to 32",
    ),
    "mix: empty": ("sort_forward", (X, W, 1, torch.ones(0), Y), "mix has 0 weights"),
    "hi: size": ("sort_bounds", (X, X[:1], W, 1, MIX, Y, Y), r"hi is .* shape \(1, 3\)"),
    "hi of a maximum: size": ("max_bounds", (X, X[:1], W, 1, Y, Y), r"hi is .* shape \(1, 3\)"),
    "limit": ("limit", (3, 1, 0.0), "op is 3"),
    "finite: type": ("all_finite", (X.double(),), "tensor is float64"),
}


@needs_kernels
@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_of_a_kernel_is_an_error_and_not_a_crash(case):
    name, arguments, message = BAD_CALLS[case]
    with pytest.raises(TypeError if message == "incompatible" else SortRLError, match=message):
        getattr(cpu.select().module, name)(*arguments)


@pytest.mark.parametrize("shape", [*SHAPES, (5, 1100, 7)])
@pytest.mark.parametrize("width", [0.0, 0.1, 1.0])
def test_inputs_out_of_reach_never_are_the_maximum(shape, width):
    x, w, _, _, grad = problem(*shape, masked=False)
    for scale in (1.0, 1e-30, 1e30):
        lo, hi, weights = (x - width) * scale, (x + width) * scale, w * scale
        used = ops.max_reach(lo, hi, weights)
        assert torch.equal(used, reference.max_reach(lo, hi, weights))
        inside = lo + torch.rand_like(x) * (hi - lo)
        whole = with_gradients(lambda a, b: ops.max_dist(a, b), inside, weights, grad)
        part = with_gradients(lambda a, b: ops.max_dist(a, b), inside[:, used], weights[:, used], grad)
        assert torch.equal(whole[0], part[0])
        assert torch.equal(whole[1][:, used], part[1])
        assert not whole[1][:, ~used].any()
    assert width > 0 or used.sum() <= shape[0] * shape[2]

"""The Triton kernels compute what the reference defines, gradients included.

Triton decides when it is first imported whether to interpret kernels on the CPU (``TRITON_INTERPRET=1``) or to compile
them, and some other test may have imported it by then. So this file runs itself again in fresh processes, one per
mode: ``interpret`` and ``cuda`` (where there is a GPU) check values, ``compile`` checks that the CUDA compiler accepts
every kernel: the interpreter is more lenient than the compiler, and the compiler needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sortrl.ops import reference

MODE = os.environ.get("SORTRL_TEST_TRITON", "")
DEVICE = "cuda" if MODE == "cuda" else "cpu"

# The last one needs several tiles in every direction of the result.
SHAPES = [(1, 1, 1), (3, 17, 5), (8, 33, 19), (35, 5, 40)]
LONG = (2, 1023, 7)  # the interpreter needs about a millisecond for each input
EXPONENTS = [2.0, 3.5, 8.0, 1000.0]

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_triton
class TestInFreshProcesses:
    __test__ = MODE == ""

    @pytest.mark.parametrize("mode", ["interpret", "compile", pytest.param("cuda", marks=needs_cuda)])
    def test_kernels(self, mode: str, tmp_path: Any) -> None:
        env = {**os.environ, "SORTRL_TEST_TRITON": mode, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        env["TRITON_INTERPRET"] = "1" if mode == "interpret" else "0"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", __file__]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, f"{mode}: exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
        assert " passed" in run.stdout, f"{mode} ran no test:\n{run.stdout}"


@pytest.fixture(scope="module")
def kernels() -> Any:
    return importlib.import_module("sortrl.ops.triton")


def operands(batch: int, n_in: int, n_out: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and a gradient of small integers: sums of such gradients are exact, so their order cannot matter."""
    generator = torch.Generator().manual_seed(1000 * batch + 10 * n_in + n_out)
    x = torch.randn(batch, n_in, generator=generator)
    w = torch.randn(n_out, n_in, generator=generator)
    grad = torch.randint(1, 5, (batch, n_out), generator=generator) * 2.0 - 5.0
    return x.to(DEVICE), w.to(DEVICE), grad.to(DEVICE)


def halves(batch: int, n_in: int, n_out: int, chunks: int) -> tuple[Tensor, Tensor]:
    """Masks that keep about half, at least one input per chunk."""
    generator = torch.Generator().manual_seed(n_in)
    in_keep = torch.rand(chunks, n_in, generator=generator) < 0.5
    in_keep[torch.arange(chunks), torch.randint(n_in, (chunks,), generator=generator)] = True
    return in_keep.to(DEVICE), (torch.rand(chunks, n_out, generator=generator) < 0.5).to(DEVICE)


def masks(kind: str, shape: tuple[int, int, int]) -> tuple[Tensor | None, Tensor | None]:
    """None, either mask alone, or both; with 3 chunks the last one is ragged (8 = 3 + 3 + 2) or even empty (1 = 1)."""
    in_keep, out_keep = halves(*shape, chunks=3)
    return (in_keep if "in" in kind else None), (out_keep if "out" in kind else None)


def differentiate(function: Callable[..., Tensor], x: Tensor, w: Tensor, grad: Tensor, *rest: Any) -> list[Tensor]:
    """The reference's value and its gradients for x and w."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = function(x, w, *rest)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    assert w.grad is not None
    return [y.detach(), x.grad, w.grad]


def mixture(top: int) -> Tensor:
    """Decreasing multiples of 1/64, whose products with integer gradients are exact."""
    return torch.arange(top, 0, -1, device=DEVICE) / 64.0


def assert_same(actual: Any, expected: Any, what: str) -> None:
    assert torch.equal(actual, expected), f"{what}: differs by {(actual - expected).abs().max().item():.3g}"


def check_max(kernels: Any, x: Tensor, w: Tensor, grad: Tensor, keep: tuple[Tensor | None, Tensor | None]) -> None:
    y, grad_x, grad_w = differentiate(reference.max_dist, x, w, grad, *keep)
    assert_same(kernels.max_forward(x, w, *keep), y, "y")
    actual_x, actual_w = kernels.max_backward(grad, x, w, y, *keep, True, True)
    assert_same(actual_x, grad_x, "grad_x")
    assert_same(actual_w, grad_w, "grad_w")


def check_lp(
    kernels: Any, x: Tensor, w: Tensor, grad: Tensor, p: float, keep: tuple[Tensor | None, Tensor | None]
) -> None:
    """Against float64. A relative error e in |t| / y (two roundings) becomes p * e in the gradient's terms."""
    y, grad_x, grad_w = differentiate(reference.lp_dist, x.double(), w.double(), grad, p, *keep)
    actual = kernels.lp_forward(x, w, p, *keep)
    torch.testing.assert_close(actual.double(), y, rtol=2e-6, atol=0.0)
    actual_x, actual_w = kernels.lp_backward(grad, x, w, actual, p, *keep, True, True)
    error = 1e-6 + 2e-7 * p
    for value, exact, terms in ((actual_x, grad_x, grad), (actual_w, grad_w, grad.t())):
        # Each term is at most |grad|, so their sum over the row bounds what rounding can do.
        worst = ((value.double() - exact).abs() / terms.abs().sum(1, keepdim=True)).max()
        assert worst <= error, f"gradient differs by {worst:.3g} of sum |grad|, at most {error:.3g} allowed"


def check_sort(kernels: Any, x: Tensor, w: Tensor, grad: Tensor, mix: Tensor) -> None:
    y, grad_x, grad_w = differentiate(reference.sort_dist, x, w, grad, mix)
    torch.testing.assert_close(kernels.sort_forward(x, w, mix), y, rtol=1e-6, atol=0.0)
    actual_x, actual_w = kernels.sort_backward(grad, x, w, mix, True, True)
    assert_same(actual_x, grad_x, "grad_x")
    assert_same(actual_w, grad_w, "grad_w")


class TestValues:
    __test__ = MODE in ("interpret", "cuda")

    @pytest.mark.parametrize("kind", ["none", "in", "out", "in+out"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_max(self, kernels: Any, shape: tuple[int, int, int], kind: str) -> None:
        check_max(kernels, *operands(*shape), masks(kind, shape))

    @pytest.mark.parametrize(("kind", "p"), [*(("none", p) for p in EXPONENTS), ("in+out", 3.5), ("in+out", 8.0)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_lp(self, kernels: Any, shape: tuple[int, int, int], kind: str, p: float) -> None:
        check_lp(kernels, *operands(*shape), p, masks(kind, shape))

    # 12 and 1024 go by multiplications, 1000.5 and 2048 by logarithms.
    @pytest.mark.parametrize(("kind", "p"), [("in", 12.0), ("out", 1024.0), ("none", 1000.5), ("in+out", 2048.0)])
    def test_lp_with_other_masks_and_exponents(self, kernels: Any, kind: str, p: float) -> None:
        check_lp(kernels, *operands(3, 17, 5), p, masks(kind, (3, 17, 5)))

    @pytest.mark.parametrize("top", [1, 3, 12])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_sort(self, kernels: Any, shape: tuple[int, int, int], top: int) -> None:
        check_sort(kernels, *operands(*shape), mixture(min(top, shape[1])))

    def test_sort_of_all_inputs(self, kernels: Any) -> None:
        check_sort(kernels, *operands(4, 32, 3), mixture(32))

    @pytest.mark.parametrize("kind", ["none", "in+out"])
    def test_max_of_many_inputs(self, kernels: Any, kind: str) -> None:
        check_max(kernels, *operands(*LONG), masks(kind, LONG))

    @pytest.mark.parametrize(("kind", "p"), [("none", 3.5), ("none", 1000.0), ("in+out", 8.0)])
    def test_lp_of_many_inputs(self, kernels: Any, kind: str, p: float) -> None:
        check_lp(kernels, *operands(*LONG), p, masks(kind, LONG))

    def test_sort_of_many_inputs(self, kernels: Any) -> None:
        check_sort(kernels, *operands(*LONG), mixture(3))

    def test_ties_go_to_the_first_index(self, kernels: Any) -> None:
        x, w, grad = operands(8, 33, 19)
        x, w = x.round(), w.round()
        distance = reference.differences(x, w).abs()
        ties = (distance == distance.amax(2, keepdim=True)).sum(2)
        assert (ties > 1).float().mean() > 0.5, "this test is about ties, and there are too few"
        check_max(kernels, x, w, grad, (None, None))
        check_max(kernels, x, w, grad, masks("in+out", (8, 33, 19)))
        check_sort(kernels, x, w, grad, mixture(6))

    def test_zero_distances_have_no_gradient(self, kernels: Any) -> None:
        x, w, grad = operands(3, 17, 5)
        w[1], w[3] = x[0], x[2]
        assert (reference.max_dist(x, w) == 0).sum() == 2
        check_max(kernels, x, w, grad, (None, None))
        for p in (2.0, 3.5, 1000.0):
            check_lp(kernels, x, w, grad, p, (None, None))
        check_sort(kernels, x, w, grad, mixture(3))

    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_no_exponent_leaves_the_range_of_float32(self, kernels: Any, scale: float) -> None:
        x, w, grad = operands(3, 17, 5)
        for p in (3.5, 8.0, 1000.0):
            check_lp(kernels, x * scale, w * scale, grad, p, (None, None))

    def test_chunks_beyond_the_batch(self, kernels: Any) -> None:
        x, w, grad = operands(5, 9, 6)  # 4 chunks of 2 rows: the last one is empty
        keep = halves(5, 9, 6, chunks=4)
        check_max(kernels, x, w, grad, keep)
        check_lp(kernels, x, w, grad, 8.0, keep)

    def test_masks_must_agree(self, kernels: Any) -> None:
        x, w, _ = operands(5, 9, 6)
        with pytest.raises(ValueError, match="same number of rows"):
            kernels.max_forward(x, w, halves(5, 9, 6, chunks=2)[0], halves(5, 9, 6, chunks=3)[1])

    def test_nan_is_not_hidden(self, kernels: Any) -> None:
        x, w, _ = operands(3, 17, 5)
        for position in (0, 8, 16):
            broken = x.clone()
            broken[1, position] = float("nan")
            results = [
                kernels.max_forward(broken, w, None, None),
                kernels.lp_forward(broken, w, 8.0, None, None),
                kernels.sort_forward(broken, w, mixture(3)),
            ]
            for y in results:
                assert y[1].isnan().all()
                assert y[[0, 2]].isfinite().all()

    def test_empty_batch(self, kernels: Any) -> None:
        x, w, grad = (
            torch.zeros(0, 4, device=DEVICE),
            torch.zeros(3, 4, device=DEVICE),
            torch.zeros(0, 3, device=DEVICE),
        )
        keep = halves(0, 4, 3, chunks=2)
        for y in (kernels.max_forward(x, w, *keep), kernels.lp_forward(x, w, 8.0, *keep)):
            assert y.shape == (0, 3)
        assert kernels.sort_forward(x, w, mixture(2)).shape == (0, 3)
        for grad_x, grad_w in (
            kernels.max_backward(grad, x, w, grad, *keep, True, True),
            kernels.lp_backward(grad, x, w, grad, 8.0, *keep, True, True),
            kernels.sort_backward(grad, x, w, mixture(2), True, True),
        ):
            assert grad_x.shape == (0, 4)
            assert_same(grad_w, torch.zeros_like(w), "grad_w")

    def test_only_the_wanted_gradients(self, kernels: Any) -> None:
        x, w, grad = operands(3, 17, 5)
        y, mix = reference.lp_dist(x, w, 8.0), mixture(3)
        backwards: list[Callable[[bool, bool], Any]] = [
            lambda *need: kernels.max_backward(grad, x, w, y, None, None, *need),
            lambda *need: kernels.lp_backward(grad, x, w, y, 8.0, None, None, *need),
            lambda *need: kernels.sort_backward(grad, x, w, mix, *need),
        ]
        for backward in backwards:
            both = backward(True, True)
            assert backward(False, False) == (None, None)
            only_x, nothing = backward(True, False)
            assert nothing is None
            assert_same(only_x, both[0], "grad_x alone")
            nothing, only_w = backward(False, True)
            assert nothing is None
            assert_same(only_w, both[1], "grad_w alone")

    def test_results_repeat_bit_for_bit(self, kernels: Any) -> None:
        x, w, grad = operands(35, 5, 40)
        grad, keep, mix = torch.sin(grad * torch.arange(40, device=DEVICE)), masks("in+out", (35, 5, 40)), mixture(3)

        def everything() -> Iterator[Tensor]:
            yield (y := kernels.max_forward(x, w, *keep))
            yield from kernels.max_backward(grad, x, w, y, *keep, True, True)
            yield (y := kernels.lp_forward(x, w, 3.5, *keep))
            yield from kernels.lp_backward(grad, x, w, y, 3.5, *keep, True, True)
            yield kernels.sort_forward(x, w, mix)
            yield from kernels.sort_backward(grad, x, w, mix, True, True)

        for first, second in zip(everything(), everything(), strict=True):
            assert_same(second, first, "second run")


class Compiled:
    """Stands in for a kernel: instead of launching, compiles exactly what the launch would."""

    def __init__(self, kernel: Any, seen: list[str]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.compile

    def compile(self, *positional: Any, **named: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        pointers = {torch.float32: "*fp32", torch.int32: "*i32", torch.uint8: "*u8"}
        arguments = {**dict(zip(self.kernel.arg_names, positional, strict=False)), **named}
        assert set(arguments) == set(self.kernel.arg_names)
        types = {}
        for name in self.kernel.arg_names:
            value = arguments[name]
            if isinstance(value, Tensor):
                types[name] = pointers[value.dtype]
            elif name.isupper() or value is None or (isinstance(value, int) and value == 1):
                types[name] = "constexpr"  # Triton makes a constant of None and of the integer 1 as well
            else:
                types[name] = "i32" if isinstance(value, int) else "fp32"
        constants = {name: arguments[name] for name, kind in types.items() if kind == "constexpr"}
        code = triton.compile(ASTSource(self.kernel, types, constants), target=GPUTarget("cuda", 80, 32))
        assert "atom." not in code.asm["ptx"], f"{self.kernel.__name__}: atomics make results depend on timing"
        self.seen.append(self.kernel.__name__)


class TestCompilation:
    __test__ = MODE == "compile"

    @pytest.mark.parametrize("shape", [(1, 1, 1), (35, 17, 40)])
    def test_every_kernel_compiles_for_cuda(
        self, kernels: Any, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[str] = []
        names = ["_max_kernel", "_lp_kernel", "_lp_grad_kernel", "_top_kernel", "_scatter_kernel"]
        for name in names:
            monkeypatch.setattr(kernels, name, Compiled(getattr(kernels, name), seen))
        x, w, grad = operands(*shape)
        for kind, p in (("none", 8.0), ("in", 3.5), ("out", 8.0), ("in+out", 3.5)):
            keep = masks(kind, shape)
            kernels.max_forward(x, w, *keep)
            kernels.max_backward(grad, x, w, grad, *keep, True, True)
            kernels.lp_forward(x, w, p, *keep)
            kernels.lp_backward(grad, x, w, grad, p, *keep, True, True)
        mix = mixture(min(3, shape[1]))
        kernels.sort_forward(x, w, mix)
        kernels.sort_backward(grad, x, w, mix, True, True)
        assert set(seen) == set(names)


class TestDistillation:
    """A student trained and evaluated by these kernels alone is the one that the reference trains, within float error."""

    __test__ = MODE in ("interpret", "cuda")

    def test_a_tiny_student_is_that_of_the_reference(self, monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
        from sortrl import SortPolicy
        from sortrl.distill import DistillConfig, fit
        from sortrl.ops import use_backend

        launched: set[str] = set()

        def counted(name: str) -> Callable[..., Any]:
            kernel = getattr(kernels, name)
            return lambda *arguments: (launched.add(name), kernel(*arguments))[1]

        names = [f"{kind}_{way}" for kind in ("max", "lp", "sort") for way in ("forward", "backward")]
        for name in names:
            monkeypatch.setattr(kernels, name, counted(name))
        # Warm-up, a rise of p, random masks, p = infinity, and in the end the exact network.
        config = DistillConfig(eps=0.05, steps=10, batch=16, lambda_end=0.3, final_share=0.4, exact_share=0.2)
        inputs = torch.rand(64, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
        labels = (inputs[:, 0] > 0).long()

        def student(backend: str) -> tuple[Tensor, Tensor]:
            torch.manual_seed(1)
            policy = SortPolicy((3,), 2, width=9, depth=3, rho=0.3, mask_chunk=8).to(DEVICE)
            with use_backend(backend):
                curve = fit(policy, inputs, labels, config)
                scores = policy.scores(policy.normalize(inputs))
            return torch.tensor([[row["loss"], row["cross_entropy"]] for row in curve]), scores.cpu()

        expected = student("reference")
        assert not launched
        curve, scores = student("triton")
        assert launched == {*names}
        torch.testing.assert_close(curve, expected[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(scores, expected[1], rtol=1e-3, atol=1e-4)
        assert float(curve[:, 0].std()) > 0.01, "the curve moves"

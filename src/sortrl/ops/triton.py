# Kernels are compiled from their source by Triton: their arguments have no Python types to annotate.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for the operators that :mod:`sortrl.ops.reference` defines: float32, forward and backward.

Three rules hold throughout:

* No (batch, out, in) tensor. A program owns a 2-D tile of the RESULT and walks along the third axis, so there is no
  reduction across threads and no atomic: every sum has one fixed order and results repeat bit for bit.
* Both gradients come from one kernel. Each term is odd in ``t = x - w``, so the gradient of ``w`` is the gradient of
  ``x`` with the roles of ``x`` and ``w`` exchanged.
* Masks become lists of indices (:func:`_kept`), so dropped inputs and outputs cost no time in the forward kernels.

Arguments are trusted (contiguous float32 on one device, bool masks): the dispatcher checks them. Set
``TRITON_INTERPRET=1`` before the first import of Triton to run everything on CPU tensors, slowly.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sortrl.ops.reference import expand_chunks

# A tile of 32 x 32 results is 8 per thread with Triton's default of 4 warps: each load serves several results, and the
# compiler still keeps all of top-K's state in registers (32 x 64 takes all 255 of a thread and spills on some GPUs).
_TILE = 32


@triton.jit
def _wide(n):
    """Sizes take part in offsets as 64-bit numbers: a product of two of them may exceed 2^31."""
    return tl.cast(n, tl.int64)


@triton.jit
def _span(axis: tl.constexpr, n, BLOCK: tl.constexpr):
    """This program's positions along an axis of length n, and which of them exist."""
    # Those beyond the end repeat the last one, so that loads need no mask; only stores do.
    position = tl.program_id(axis) * BLOCK + tl.arange(0, BLOCK)
    return tl.minimum(position, n - 1), position < n


@triton.jit
def _tile(in_kept, out_kept, batch, n_in, n_out, chunk_rows, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr):
    """This program's rows, outputs and which pairs exist; where its list of inputs starts and how long it is."""
    tiles = (chunk_rows + BLOCK_B - 1) // BLOCK_B
    chunk = tl.program_id(0) // tiles
    row = (tl.program_id(0) % tiles) * BLOCK_B + tl.arange(0, BLOCK_B)
    b = chunk * chunk_rows + row
    b_ok = (row < chunk_rows) & (b < batch)
    steps = n_in if in_kept is None else tl.load(in_kept + chunk * (n_in + 1))
    o, o_ok = _span(1, n_out, BLOCK_O)
    if out_kept is not None:
        count = tl.load(out_kept + chunk * (n_out + 1))
        steps = tl.where(tl.program_id(1) * BLOCK_O < count, steps, 0)  # no kept output, nothing to do
        o_ok = o_ok & (o < count)
        o = tl.load(out_kept + chunk * (n_out + 1) + 1 + o)
    return tl.minimum(b, batch - 1), o, b_ok[:, None] & o_ok[None, :], chunk * (n_in + 1) + 1, steps


@triton.jit
def _largest(xt, wt, in_kept, b, o, skip, steps, batch, n_out):
    """The largest distance; NaN if any is NaN, because a hidden NaN would turn into a wrong certificate.

    The operands come transposed, so that the loads of a step are contiguous.
    """
    best = tl.zeros((b.shape[0], o.shape[0]), tl.float32)
    for step in range(steps):
        i = step if in_kept is None else tl.load(in_kept + skip + step)
        distance = tl.abs(tl.load(xt + i * batch + b)[:, None] - tl.load(wt + i * n_out + o)[None, :])
        best = tl.maximum(best, distance, propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def _power(base, exponent, WHOLE: tl.constexpr):
    """``base ** exponent`` for base in [0, 1]; by multiplications alone if WHOLE, the same exponent, is not 0."""
    if WHOLE > 0:
        result = tl.full(base.shape, 1.0, tl.float32)
        for bit in tl.static_range(11):
            if (WHOLE >> bit) % 2 == 1:
                result = result * base
            if WHOLE >> (bit + 1) > 0:
                base = base * base
    else:
        result = tl.exp2(exponent * tl.log2(base))
    return result


@triton.jit
def _max_kernel(
    xt, wt, y, in_kept, out_kept, batch, n_in, n_out, chunk_rows, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr
):
    batch, n_out = _wide(batch), _wide(n_out)
    b, o, ok, skip, steps = _tile(in_kept, out_kept, batch, n_in, n_out, chunk_rows, BLOCK_B, BLOCK_O)
    best = _largest(xt, wt, in_kept, b, o, skip, steps, batch, n_out)
    tl.store(y + b[:, None] * n_out + o[None, :], best, mask=ok)


@triton.jit
def _lp_kernel(
    xt, wt, y, in_kept, out_kept, batch, n_in, n_out, chunk_rows, p,
    WHOLE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    batch, n_out = _wide(batch), _wide(n_out)
    b, o, ok, skip, steps = _tile(in_kept, out_kept, batch, n_in, n_out, chunk_rows, BLOCK_B, BLOCK_O)
    largest = _largest(xt, wt, in_kept, b, o, skip, steps, batch, n_out)
    scale = tl.where(largest == 0, 1.0, largest)
    total = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    for step in range(steps):
        i = step if in_kept is None else tl.load(in_kept + skip + step)
        distance = tl.abs(tl.load(xt + i * batch + b)[:, None] - tl.load(wt + i * n_out + o)[None, :])
        # Rounded division: p multiplies its relative error, and the largest term must be exactly 1.
        total += _power(tl.div_rn(distance, scale), p, WHOLE)
    # Where every distance is 0 the total is 0 as well; a NaN in largest survives the product.
    norm = largest * tl.exp2(tl.log2(tl.where(total == 0, 1.0, total)) / p)
    tl.store(y + b[:, None] * n_out + o[None, :], norm, mask=ok)


@triton.jit
def _lp_grad_kernel(
    own, other, grad, y, result, keep, n_own, n_other, n_in, chunk_rows, exponent,
    WHOLE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """``result[r, i] = sum_c grad[c, r] sign(t) (|t| / y[c, r])^exponent`` with ``t = own[r, i] - other[c, i]``."""
    n_own, n_in = _wide(n_own), _wide(n_in)
    r, r_ok = _span(0, n_own, BLOCK_R)
    i, i_ok = _span(1, n_in, BLOCK_I)
    at = r[:, None] * n_in + i[None, :]
    mine = tl.load(own + at)
    total = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for c in range(n_other):
        t = mine - tl.load(other + c * n_in + i)[None, :]
        g = tl.load(grad + c * n_own + r)
        norm = tl.load(y + c * n_own + r)
        norm = tl.where(norm == 0, float("inf"), norm)  # no distance, or a dropped output: no gradient
        # The ratio exceeds 1 only by rounding, or at dropped inputs, whose (now finite) value is discarded.
        ratio = tl.minimum(tl.div_rn(tl.abs(t), norm[:, None]), 1.0, propagate_nan=tl.PropagateNan.ALL)
        term = g[:, None] * _power(ratio, exponent, WHOLE)
        if keep is not None:
            kept = tl.load(keep + (c // chunk_rows) * n_in + i) != 0
            term = tl.where(kept[None, :], term, 0.0)
        total += tl.where(t < 0, -term, term)
    tl.store(result + at, total, mask=r_ok[:, None] & i_ok[None, :])


@triton.jit
def _top_kernel(
    xt, wt, mix, y, grad, index, slope, in_kept, out_kept, batch, n_in, n_out, chunk_rows, top,
    BLOCK_B: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    """Select the ``top`` largest distances, one pass each, in the order (distance descending, input ascending).

    A pass takes the best entry that comes after the previous pass's entry, so the state is one entry whatever ``top``
    is. Without ``grad`` the mixed value goes to ``y``; with it, ``index[pass]`` and ``slope[pass] = dy/dt * grad``.
    """
    batch, n_out = _wide(batch), _wide(n_out)
    b, o, ok, skip, steps = _tile(in_kept, out_kept, batch, n_in, n_out, chunk_rows, BLOCK_B, BLOCK_O)
    at = b[:, None] * n_out + o[None, :]
    last = tl.full((BLOCK_B, BLOCK_O), float("inf"), tl.float32)
    last_i = tl.full((BLOCK_B, BLOCK_O), -1, tl.int32)
    total = tl.zeros((BLOCK_B, BLOCK_O), tl.float32)
    for k in range(top):
        best = tl.full((BLOCK_B, BLOCK_O), -1.0, tl.float32)
        best_i = tl.full((BLOCK_B, BLOCK_O), -1, tl.int32)
        for step in range(steps):
            i = step if in_kept is None else tl.load(in_kept + skip + step)
            distance = tl.abs(tl.load(xt + i * batch + b)[:, None] - tl.load(wt + i * n_out + o)[None, :])
            # Written so that NaN does not count as taken: it then reaches y through the maximum.
            taken = (distance > last) | ((distance == last) & (i <= last_i))
            distance = tl.where(taken, -1.0, distance)
            best_i = tl.where(distance > best, i, best_i)
            best = tl.maximum(best, distance, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.load(mix + k)
        if grad is None:
            total += weight * best
        else:
            witness = tl.maximum(best_i, 0)  # where the first distance is NaN there is none: -1, ignored later
            x = tl.load(xt + witness * batch + b[:, None])
            w = tl.load(wt + witness * n_out + o[None, :])
            pull = weight * tl.load(grad + at)
            tl.store(index + at, best_i, mask=ok)
            tl.store(slope + at, tl.where(x > w, pull, tl.where(x < w, -pull, 0.0)), mask=ok)
            index += batch * n_out
            slope += batch * n_out
        last, last_i = best, best_i
    if grad is None:
        tl.store(y + at, total, mask=ok)


@triton.jit
def _scatter_kernel(index, slope, result, n_own, n_other, n_in, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr):
    """``result[r, i] = sum of slope[c, r] over the c with index[c, r] == i``: a scatter that needs no atomics."""
    n_own, n_in = _wide(n_own), _wide(n_in)
    r, r_ok = _span(0, n_own, BLOCK_R)
    i, i_ok = _span(1, n_in, BLOCK_I)
    total = tl.zeros((BLOCK_R, BLOCK_I), tl.float32)
    for _ in range(n_other):
        hit = tl.load(index + r)[:, None] == i[None, :]
        total += tl.where(hit, tl.load(slope + r)[:, None], 0.0)
        index += n_own
        slope += n_own
    tl.store(result + r[:, None] * n_in + i[None, :], total, mask=r_ok[:, None] & i_ok[None, :])


def _blocks(rows: int, columns: int) -> tuple[int, int]:
    """Tile sizes: powers of two, no larger than the problem needs."""
    return min(_TILE, triton.next_power_of_2(rows)), min(_TILE, triton.next_power_of_2(columns))


def _kept(keep: Tensor | None) -> Tensor | None:
    """(chunks, 1 + n) int32: how many indices each chunk keeps, then those indices in ascending order."""
    if keep is None:
        return None
    order = keep.byte().argsort(dim=1, descending=True, stable=True)
    return torch.cat([keep.sum(1, keepdim=True), order], dim=1).int()


def _launch_tiles(
    kernel: Any, x: Tensor, w: Tensor, tensors: tuple[Tensor | None, ...],
    in_keep: Tensor | None, out_keep: Tensor | None, **scalars: float,
) -> None:  # fmt: skip
    """Run a kernel whose tiles are (rows of one chunk) x (outputs that this chunk keeps)."""
    batch, n_in, n_out = len(x), x.shape[1], len(w)
    chunks = {len(keep) for keep in (in_keep, out_keep) if keep is not None} or {1}
    if len(chunks) > 1:
        raise ValueError(f"in_keep and out_keep must have the same number of rows (chunks), got {sorted(chunks)}")
    if batch == 0 or n_out == 0:
        return
    chunk_rows = triton.cdiv(batch, chunks.pop())
    block_b, block_o = _blocks(chunk_rows, n_out)
    used_chunks = triton.cdiv(batch, chunk_rows)  # rounding up may leave the last chunks without rows
    grid = (used_chunks * triton.cdiv(chunk_rows, block_b), triton.cdiv(n_out, block_o))
    xt, wt = x.t().contiguous(), w.t().contiguous()
    with torch.cuda.device_of(x):
        kernel[grid](
            xt, wt, *tensors, _kept(in_keep), _kept(out_keep), batch, n_in, n_out, chunk_rows,
            BLOCK_B=block_b, BLOCK_O=block_o, **scalars,
        )  # fmt: skip


def _whole(p: float) -> int:
    """p if it is 2^n or 2^n + 2^m (8, 12, 16, 24, ...) below 2048, otherwise 0.

    Such exponents need few multiplications, and they are few: each one costs a compilation.
    """
    return int(p) if p == int(p) and p < 2048 and bin(int(p)).count("1") <= 2 else 0


def _lp_grad(own: Tensor, other: Tensor, grad: Tensor, y: Tensor, p: float, keep: Tensor | None = None) -> Tensor:
    """Gradient for ``own``; ``grad`` and ``y`` are (other, own), ``keep`` has chunks of the rows of ``other``."""
    result = torch.zeros_like(own)
    if own.numel() == 0 or len(other) == 0:
        return result
    n_own, n_in = own.shape
    chunk_rows = 1 if keep is None else triton.cdiv(len(other), len(keep))
    block_r, block_i = _blocks(n_own, n_in)
    with torch.cuda.device_of(own):
        _lp_grad_kernel[(triton.cdiv(n_own, block_r), triton.cdiv(n_in, block_i))](
            own, other, grad, y, result, None if keep is None else keep.view(torch.uint8),
            n_own, len(other), n_in, chunk_rows, p - 1.0,
            WHOLE=max(_whole(p) - 1, 0), BLOCK_R=block_r, BLOCK_I=block_i,
        )  # fmt: skip
    return result


def _scatter(index: Tensor, slope: Tensor, n_in: int) -> Tensor:
    """Add up the slopes, (top, other, own), at their inputs: (own, n_in)."""
    top, n_other, n_own = index.shape
    result = slope.new_zeros(n_own, n_in)
    if index.numel() == 0:
        return result
    block_r, block_i = _blocks(n_own, n_in)
    with torch.cuda.device_of(index):
        _scatter_kernel[(triton.cdiv(n_own, block_r), triton.cdiv(n_in, block_i))](
            index.contiguous(), slope.contiguous(), result, n_own, top * n_other, n_in,
            BLOCK_R=block_r, BLOCK_I=block_i,
        )  # fmt: skip
    return result


def _top_backward(
    grad: Tensor, x: Tensor, w: Tensor, mix: Tensor,
    in_keep: Tensor | None, out_keep: Tensor | None, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Find the witnesses again, then send each its share of the gradient."""
    if not (need_x or need_w):
        return None, None
    shape = (len(mix), len(x), len(w))
    index = torch.zeros(shape, dtype=torch.int32, device=x.device)
    slope = x.new_zeros(shape)  # dropped outputs keep 0
    _launch_tiles(_top_kernel, x, w, (mix, None, grad, index, slope), in_keep, out_keep, top=len(mix))
    grad_x = _scatter(index.transpose(1, 2), slope.transpose(1, 2), x.shape[1]) if need_x else None
    return grad_x, _scatter(index, -slope, x.shape[1]) if need_w else None


def max_forward(x: Tensor, w: Tensor, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    """:func:`sortrl.ops.reference.max_dist`."""
    y = x.new_zeros(len(x), len(w))  # dropped outputs are never written
    _launch_tiles(_max_kernel, x, w, (y,), in_keep, out_keep)
    return y


def max_backward(
    grad: Tensor, x: Tensor, w: Tensor, y: Tensor,
    in_keep: Tensor | None, out_keep: Tensor | None, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of :func:`max_forward`: to the first arg-max among the kept inputs, with the sign of x - w."""
    return _top_backward(grad, x, w, y.new_ones(1), in_keep, out_keep, need_x, need_w)


def lp_forward(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    """:func:`sortrl.ops.reference.lp_dist`."""
    y = x.new_zeros(len(x), len(w))  # dropped outputs are never written
    _launch_tiles(_lp_kernel, x, w, (y,), in_keep, out_keep, p=float(p), WHOLE=_whole(p))
    return y


def lp_backward(
    grad: Tensor, x: Tensor, w: Tensor, y: Tensor, p: float,
    in_keep: Tensor | None, out_keep: Tensor | None, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of :func:`lp_forward`, whose result is ``y``: ``grad * sign(t) * (|t| / y)^(p-1)``, 0 where y is 0."""
    if out_keep is not None:
        grad = grad.masked_fill(~expand_chunks(out_keep, len(x)), 0.0)
    grad_x = grad_w = None
    if need_x:
        grad_x = _lp_grad(x, w, grad.t().contiguous(), y.t().contiguous(), p)
        if in_keep is not None:
            grad_x.masked_fill_(~expand_chunks(in_keep, len(x)), 0.0)
    if need_w:
        grad_w = _lp_grad(w, x, grad, y, p, in_keep)
    return grad_x, grad_w


def sort_forward(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """:func:`sortrl.ops.reference.sort_dist`."""
    y = x.new_zeros(len(x), len(w))
    _launch_tiles(_top_kernel, x, w, (mix, y, None, None, None), None, None, top=len(mix))
    return y


def sort_backward(
    grad: Tensor, x: Tensor, w: Tensor, mix: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of :func:`sort_forward`: ``mix[j]`` times the sign of x - w goes to the j-th largest."""
    return _top_backward(grad, x, w, mix, None, None, need_x, need_w)

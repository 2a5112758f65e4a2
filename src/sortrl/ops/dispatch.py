"""The kernels as torch custom operators: fake versions for tracing, autograd, and the choice between CPU and GPU.

An operator must return tensors, so a gradient nobody asked for is an empty tensor here and None to autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from sortrl.core.errors import SortRLError
from sortrl.ops import cpu
from sortrl.ops.backend import backend_for


def _kernels(x: Tensor) -> Any:
    if backend_for(x)[0] == "cpu":
        return cpu
    from sortrl.ops import triton  # only where it is wanted: importing Triton is slow, and CPU users need not have it

    return triton


def _check_finite(x: Tensor, w: Tensor) -> None:
    if x.device.type != "cpu" or cpu.select().module is None:
        return
    for name, tensor in (("x", x), ("w", w)):
        if not cpu.all_finite(tensor):
            raise SortRLError(
                f"{name} of shape {tuple(tensor.shape)} contains NaN or infinity; distances need finite numbers."
            )


def _tensors(gradients: tuple[Tensor | None, Tensor | None], x: Tensor) -> tuple[Tensor, Tensor]:
    gx, gw = gradients
    return x.new_empty(0) if gx is None else gx, x.new_empty(0) if gw is None else gw


def _fake_gradients(x: Tensor, w: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x) if need_x else x.new_empty(0), torch.empty_like(w) if need_w else x.new_empty(0)


def _optional(gradient: Tensor, needed: bool) -> Tensor | None:
    return gradient if needed else None


@custom_op("sortrl::max_dist", mutates_args=())
def max_dist_op(x: Tensor, w: Tensor, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    _check_finite(x, w)
    y: Tensor = _kernels(x).max_forward(x, w, in_keep, out_keep)
    return y


@custom_op("sortrl::max_dist_backward", mutates_args=())
def _max_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    return _tensors(_kernels(x).max_backward(grad.contiguous(), x, w, y, in_keep, out_keep, need_x, need_w), x)


@custom_op("sortrl::lp_dist", mutates_args=())
def lp_dist_op(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    _check_finite(x, w)
    y: Tensor = _kernels(x).lp_forward(x, w, p, in_keep, out_keep)
    return y


@custom_op("sortrl::lp_dist_backward", mutates_args=())
def _lp_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    p: float,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    return _tensors(_kernels(x).lp_backward(grad.contiguous(), x, w, y, p, in_keep, out_keep, need_x, need_w), x)


@custom_op("sortrl::sort_dist", mutates_args=())
def sort_dist_op(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    _check_finite(x, w)
    y: Tensor = _kernels(x).sort_forward(x, w, mix)
    return y


@custom_op("sortrl::sort_dist_backward", mutates_args=())
def _sort_backward(
    grad: Tensor, x: Tensor, w: Tensor, mix: Tensor, need_x: bool, need_w: bool
) -> tuple[Tensor, Tensor]:
    return _tensors(_kernels(x).sort_backward(grad.contiguous(), x, w, mix, need_x, need_w), x)


@max_dist_op.register_fake
def _(x: Tensor, w: Tensor, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@lp_dist_op.register_fake
def _(x: Tensor, w: Tensor, p: float, in_keep: Tensor | None, out_keep: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@sort_dist_op.register_fake
def _(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@_max_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(x, w, need_x, need_w)


@_lp_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    y: Tensor,
    p: float,
    in_keep: Tensor | None,
    out_keep: Tensor | None,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, Tensor]:
    return _fake_gradients(x, w, need_x, need_w)


@_sort_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, mix: Tensor, need_x: bool, need_w: bool) -> tuple[Tensor, Tensor]:
    return _fake_gradients(x, w, need_x, need_w)


def _save_max(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, in_keep, out_keep = inputs
    ctx.save_for_backward(x, w, output, in_keep, out_keep)


def _max_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, y, in_keep, out_keep = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    gx, gw = _max_backward(grad, x, w, y, in_keep, out_keep, need_x, need_w)
    return _optional(gx, need_x), _optional(gw, need_w), None, None


def _save_lp(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.p, in_keep, out_keep = inputs
    ctx.save_for_backward(x, w, output, in_keep, out_keep)


def _lp_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, y, in_keep, out_keep = ctx.saved_tensors
    need_x, need_w = ctx.needs_input_grad[:2]
    gx, gw = _lp_backward(grad, x, w, y, ctx.p, in_keep, out_keep, need_x, need_w)
    return _optional(gx, need_x), _optional(gw, need_w), None, None, None


def _save_sort(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sort_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, mix = ctx.saved_tensors
    need_x, need_w, need_mix = ctx.needs_input_grad
    if need_mix:
        raise SortRLError("sort_dist: the mix is fixed by rho and has no gradient; detach it.")
    gx, gw = _sort_backward(grad, x, w, mix, need_x, need_w)
    return _optional(gx, need_x), _optional(gw, need_w), None


max_dist_op.register_autograd(_max_autograd, setup_context=_save_max)
lp_dist_op.register_autograd(_lp_autograd, setup_context=_save_lp)
sort_dist_op.register_autograd(_sort_autograd, setup_context=_save_sort)

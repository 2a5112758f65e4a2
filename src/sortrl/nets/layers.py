"""Layers that are Lipschitz in l_inf by construction. Every constant is computed from the parts, never assigned.

==========================  ============================================
instead of                  use
==========================  ============================================
``Linear`` + activation     ``SortLinear`` (|x - w|, sorted and mixed)
``Conv2d`` + activation     ``SortConv`` (the same, for every patch of an image), or ``BoundedConv`` (:mod:`sortrl.nets.front`)
``BatchNorm``               ``MeanShift`` (subtracts the mean, no scaling)
image resize                ``AveragePool``, ``Crop``, ``Pixels`` (there, too)
input normalisation         ``Scale`` (its constant enters the certificate), ``Centre`` and ``Ramp`` (there, too)
==========================  ============================================
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl import ops
from sortrl.core import parallel
from sortrl.core.errors import SortRLError

LARGEST_MIX = 100_000
_HALF = (torch.float16, torch.bfloat16)
FEW_PATCHES = 16  # per image: measured, on one core


def truncated_mix(rho: float, fan_in: int, tolerance: float = 1e-4) -> Tensor:
    """The first K weights of ``(1 - rho) rho^j``, scaled to sum to 1, with K such that the rest sums to at most ``tolerance``.

    The weights are rounded towards zero, so that their exact sum never exceeds 1: what is evaluated is what is certified.

    >>> truncated_mix(0.0, 8)
    tensor([1.])
    >>> len(truncated_mix(0.3, 640))
    8
    """
    if not 0.0 <= rho < 1.0:
        raise SortRLError(f"rho is {rho}, expected a number in [0, 1).")
    if not 0.0 < tolerance < 1.0:
        raise SortRLError(f"tolerance is {tolerance}, expected a number in (0, 1).")
    if fan_in < 1:
        raise SortRLError(f"a layer has {fan_in} inputs, expected at least 1.")
    top = 1 if rho == 0.0 else min(fan_in, math.ceil(math.log(tolerance) / math.log(rho)))
    if top > LARGEST_MIX:
        raise SortRLError(
            f"rho is {rho}, so close to 1 that {top} distances would count; expected at most {LARGEST_MIX}."
        )
    weights = (1.0 - rho) * rho ** np.arange(top, dtype=np.float64)
    weights /= math.fsum(weights)
    rounded = weights.astype(np.float32)
    above = rounded.astype(np.float64) > weights
    rounded[above] = np.nextafter(rounded[above], np.float32(0.0))
    return torch.from_numpy(rounded)


class SortLinear(nn.Module):
    """``y_k = sum_j mix_j * (j-th largest of |x - w_k|)``, exactly ``sum(mix)``-Lipschitz in l_inf.

    Args:
        in_features: size of the input.
        out_features: number of units.
        rho: how slowly the mix decays, in [0, 1); 0 is a plain maximum. It belongs to the state: weights of a layer with another
            one are refused.
        tolerance: share of the mix that may be cut off at evaluation.

    Inputs are those of ``nn.Linear``: (..., in_features), in float32 or float64.

    >>> layer = SortLinear(3, 2, rho=0.3)
    >>> layer(torch.zeros(5, 3)).shape, layer(torch.zeros(4, 5, 3)).shape, layer(torch.zeros(3)).shape
    (torch.Size([5, 2]), torch.Size([4, 5, 2]), torch.Size([2]))
    >>> round(layer.lipschitz, 6)
    1.0
    """

    mix: Tensor

    def __init__(self, in_features: int, out_features: int, rho: float = 0.3, tolerance: float = 1e-4) -> None:
        super().__init__()
        if out_features < 1:
            raise SortRLError(f"SortLinear: {out_features} outputs, expected at least 1.")
        self.rho = rho
        self.register_buffer("mix", truncated_mix(rho, in_features, tolerance), persistent=False)
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        # Beside the tensors, so that files of weights, and fingerprints of them, stay what they are.
        self._register_state_dict_hook(_remember_rho)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: Any,
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        rho = local_metadata.get("rho", self.rho)
        if rho != self.rho:
            errors.append(f"{prefix}rho is {rho} there and {self.rho} here: make the layer with rho={rho}.")

    @property
    def out_size(self) -> int:
        """Numbers per output."""
        return len(self.weight)

    @property
    def lipschitz(self) -> float:
        """Sum of the mix: a change of x by at most d moves every sorted distance by at most d. A maximum has no mix."""
        return 1.0 if len(self.mix) == 1 else math.fsum(map(abs, self.mix.tolist()))

    @property
    def roundings(self) -> int:
        """On the way of one distance: its subtraction, its product and the sums; a maximum takes the first alone."""
        return 1 if len(self.mix) == 1 else 1 + len(self.mix)

    def forward(self, x: Tensor) -> Tensor:
        """The evaluation layer (..., in) -> (..., out): exact top-K."""
        if x.ndim != 2:
            rows = self._rows(x)
            return self(rows).reshape(*x.shape[:-1], len(self.weight))  # type: ignore[no-any-return]
        self._check(x)
        if len(self.mix) == 1:  # the mix is {1}
            return ops.max_dist(x, self.weight)
        return ops.sort_dist(x, self.weight, self.mix.to(x.dtype))

    def smooth(self, x: Tensor, p: float, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
        """The training layer: an l_p norm in place of the maximum, over the inputs that a random mask keeps."""
        if x.ndim != 2:
            return self.smooth(self._rows(x), p, in_keep, out_keep).reshape(*x.shape[:-1], len(self.weight))
        self._check(x)
        return ops.lp_dist(x, self.weight, p, in_keep, out_keep)

    def bounds(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The exact range of the layer over a box of inputs."""
        if len(self.mix) == 1:
            return ops.max_bounds(lo, hi, self.weight)
        return ops.sort_bounds(lo, hi, self.weight, self.mix.to(lo.dtype))

    def _rows(self, x: Tensor) -> Tensor:
        if x.ndim == 0:
            raise SortRLError(f"SortLinear: received a single number, expected inputs (..., {self.weight.shape[1]}).")
        return x[None] if x.ndim == 1 else x.flatten(0, -2)

    def _check(self, x: Tensor) -> None:
        if x.dtype in _HALF or self.weight.dtype in _HALF:
            raise SortRLError(
                f"SortLinear: inputs are {x.dtype} and weights {self.weight.dtype}, expected float32 or float64. Distances of half "
                "precision prove nothing; keep this layer and its inputs in float32 (layer.float(), x.float())."
            )

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, rho={self.rho}, top={len(self.mix)}"


def _remember_rho(layer: SortLinear, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    metadata["rho"] = layer.rho


class SortConv(SortLinear):
    """A :class:`SortLinear` that looks at every patch of an image with the same weights: how far is it from a template?

    Images come and go flat, (batch, channels * height * width), so that it stands wherever a :class:`SortLinear` does. Each
    output depends on one patch, and no pixel is scaled: the constant is that of the layer.

    Args:
        in_shape: channels, height and width of the input.
        channels: templates.
        kernel: side of a patch.
        stride: pixels from one patch to the next.
        rho: as in :class:`SortLinear`; the default is a plain maximum, because patches are small.

    >>> layer = SortConv((3, 8, 8), channels=5, kernel=4, stride=2)
    >>> layer.out_shape, layer(torch.zeros(2, 3 * 8 * 8)).shape, layer.lipschitz
    ((5, 3, 3), torch.Size([2, 45]), 1.0)
    """

    def __init__(
        self, in_shape: tuple[int, int, int], channels: int, kernel: int, stride: int = 1, rho: float = 0.0
    ) -> None:
        grid = patch_grid("SortConv", in_shape, kernel, stride)
        super().__init__(in_shape[0] * kernel * kernel, channels, rho)
        self.in_shape, self.kernel, self.stride = in_shape, kernel, stride
        self.out_shape = (channels, *grid)

    @property
    def out_size(self) -> int:
        return math.prod(self.out_shape)

    def patches(self, x: Tensor) -> Tensor:
        """Flat images (batch, in) -> one row per patch (batch * height * width, channels * kernel * kernel)."""
        columns = functional.unfold(x.reshape(len(x), *self.in_shape), self.kernel, stride=self.stride)
        return columns.transpose(1, 2).reshape(-1, self.weight.shape[1])

    def flat(self, rows: Tensor) -> Tensor:
        """What a layer made of the patches (batch * height * width, channels) -> flat images (batch, out)."""
        channels, height, width = self.out_shape
        return rows.reshape(-1, height * width, channels).transpose(1, 2).reshape(-1, self.out_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(super().forward(self.patches(x)))

    def smooth(self, x: Tensor, p: float, in_keep: Tensor | None = None, out_keep: Tensor | None = None) -> Tensor:
        """The training layer. Patches overlap, so ``in_keep`` cannot be had; what ``out_keep`` drops is set to 0."""
        if in_keep is not None:
            raise SortRLError("SortConv: a random mask over its inputs is not supported; use rho = 0.")
        y = self.flat(super().smooth(self.patches(x), p))
        return y if out_keep is None else y * ops.reference.expand_chunks(out_keep, len(y))

    def bounds(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        low, high = super().bounds(self.patches(lo), self.patches(hi))
        return self.flat(low), self.flat(high)

    def extra_repr(self) -> str:
        return f"{self.in_shape} -> {self.out_shape}, kernel={self.kernel}, stride={self.stride}, rho={self.rho}"


class MeanShift(nn.Module):
    """Subtracts a per-channel mean: the batch's in training, the running one in evaluation. 1-Lipschitz: no scaling."""

    running_mean: Tensor

    def __init__(self, features: int, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(features))

    @property
    def lipschitz(self) -> float:
        """A translation moves no two points apart, whatever the mean; a float32 probe would miss it at large means."""
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x - self.running_mean

    def centre(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """Training: subtract the batch mean of each channel over the samples in which a mask let it be computed.

        ``keep`` (chunks, features) says where; elsewhere x is 0, so that sums need no gather.
        """
        if keep is None:
            mean = parallel.averaged(x.mean(0))
            seen = torch.ones_like(mean, dtype=torch.bool)
        else:
            rows = -(-len(x) // len(keep))
            sizes = torch.full((len(keep), 1), float(rows), dtype=x.dtype, device=x.device)
            sizes[-1] = len(x) - rows * (len(keep) - 1)
            count = (keep * sizes).sum(0)
            seen = count > 0
            mean = torch.where(seen, parallel.averaged(x.sum(0) / count.clamp(min=1.0)), self.running_mean)
        with torch.no_grad():
            self.running_mean.copy_(torch.where(seen, self.running_mean.lerp(mean, self.momentum), self.running_mean))
        return x - mean


def patch_conv(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
    """A convolution as one product of matrices, patches by weights: every output is a plain sum of its products.

    ``conv2d`` promises no such thing. For small kernels some builds of torch compute it by Winograd's algorithm, whose
    intermediate numbers round far more than the sum does, and only for some sizes of a batch.
    """
    kernel = weight.shape[-1]
    height, width = patch_grid("patch_conv", (x.shape[1], x.shape[2], x.shape[3]), kernel, stride)
    columns = functional.unfold(x, kernel, stride=stride)  # (batch, weights, patches)
    if height * width < FEW_PATCHES:  # a product per image would be one with a vector
        rows = columns.transpose(1, 2).flatten(0, 1) @ weight.flatten(1).T
        y = rows.reshape(len(x), height * width, len(weight)).transpose(1, 2)
    else:
        y = weight.flatten(1) @ columns
    return (y if bias is None else y + bias[:, None]).reshape(len(x), len(weight), height, width)


def patch_grid(layer: str, in_shape: tuple[int, int, int], kernel: int, stride: int) -> tuple[int, int]:
    """How many patches fit into an image, down and across."""
    if kernel < 1 or stride < 1 or kernel > min(in_shape[1:]):
        raise SortRLError(
            f"{layer}: kernel {kernel} and stride {stride} on images of shape {tuple(in_shape)}, expected a kernel that "
            "fits into the image, and both at least 1."
        )
    return (in_shape[1] - kernel) // stride + 1, (in_shape[2] - kernel) // stride + 1

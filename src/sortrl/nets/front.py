"""What may come before the sort layers: images cut and shrunk, inputs scaled, convolutions with bounded weights.

Each part is Lipschitz in l_inf, with a constant that is computed from it, and says how often it rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from sortrl.core.errors import SortRLError
from sortrl.nets.layers import patch_conv, patch_grid


class Scale(nn.Module):
    """Multiplies each coordinate by a positive factor. Its l_inf constant is the largest factor."""

    factor: Tensor

    def __init__(self, factor: float | Tensor) -> None:
        super().__init__()
        # Not on the device of a caller who only wants to see shapes: the value is looked at.
        value = (
            factor.float() if isinstance(factor, Tensor) else torch.tensor(factor, dtype=torch.float32, device="cpu")
        )
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise SortRLError(f"Scale: factor is {factor}, expected positive finite numbers.")
        self.register_buffer("factor", value)

    @property
    def lipschitz(self) -> float:
        return float(self.factor.abs().max())

    @property
    def roundings(self) -> int:
        """Float operations that may round, per output."""
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Crop(nn.Module):
    """Removes borders of an image (batch, channels, height, width)."""

    def __init__(self, top: int = 0, bottom: int = 0, left: int = 0, right: int = 0) -> None:
        super().__init__()
        if min(top, bottom, left, right) < 0:
            raise SortRLError(f"Crop: borders are {(top, bottom, left, right)}, expected none negative.")
        self.top, self.bottom, self.left, self.right = top, bottom, left, right

    @property
    def lipschitz(self) -> float:
        return nonnegative_lipschitz(self, (1, self.top + self.bottom + 1, self.left + self.right + 1))

    @property
    def roundings(self) -> int:
        """Nothing is computed."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.top : x.shape[-2] - self.bottom, self.left : x.shape[-1] - self.right]


class AveragePool(nn.Module):
    """Means over ``size`` x ``size`` blocks of an image (batch, channels, height, width)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size < 1:
            raise SortRLError(f"AveragePool: size is {size}, expected at least 1.")
        self.size = size

    @property
    def lipschitz(self) -> float:
        return nonnegative_lipschitz(self, (1, self.size, self.size))

    @property
    def roundings(self) -> int:
        """Sums and one division, per output."""
        return self.size * self.size + 1

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, self.size)


class Pixels(nn.Module):
    """Keeps some coordinates of the flattened input (batch, ...) and ignores the others: (batch, len(indices)).

    >>> Pixels((3, 0), 4)(torch.tensor([[5.0, 6.0, 7.0, 8.0]]))
    tensor([[8., 5.]])
    """

    indices: Tensor

    def __init__(self, indices: Sequence[int], size: int) -> None:
        super().__init__()
        # Plain numbers are checked, not the tensor, which may be on a device that only knows shapes.
        if not indices or not all(type(index) is int and 0 <= index < size for index in indices):
            raise SortRLError(
                f"Pixels: {len(indices)} indices, {str(tuple(indices[:8]))[:80]} the first, expected one or more whole "
                f"numbers in 0..{size - 1}."
            )
        if len(set(indices)) < len(indices):
            raise SortRLError(
                f"Pixels: {len(indices)} indices of which {len(set(indices))} differ, expected no doubles."
            )
        self.register_buffer("indices", torch.tensor(indices, dtype=torch.int64), persistent=False)

    @property
    def lipschitz(self) -> float:
        """Every output is one of the inputs, so it moves as far as that one does, whichever it is."""
        return 1.0

    @property
    def roundings(self) -> int:
        """Nothing is computed."""
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).index_select(1, self.indices)

    def extra_repr(self) -> str:
        return f"{len(self.indices)}"


class BoundedConv(nn.Module):
    """An ordinary convolution whose weights sum to at most 1 in absolute value, for every output, then pairs of channels in
    order: the larger ones first, then the smaller ones (MaxMin).

    It is 1-Lipschitz in l_inf, and unlike a distance to a template it is learned easily from raw pixels: a first step that
    finds edges and objects for the sort layers behind it. MaxMin loses nothing, where ReLU would lose half.

    In training the weights are divided by their sums (:meth:`trained`); :meth:`settle` makes that permanent. The evaluation
    layer takes the weights as they are, sums in float64, and its constant is computed from them.

    Args:
        in_shape: channels, height and width of the input.
        channels: of the output; an even number.
        kernel: side of a patch.
        stride: pixels from one patch to the next.

    >>> layer = BoundedConv((3, 8, 8), channels=6, kernel=4, stride=2)
    >>> layer.settle()
    >>> layer(torch.zeros(2, 3, 8, 8)).shape, round(layer.lipschitz, 6)
    (torch.Size([2, 6, 3, 3]), 1.0)
    """

    evaluated_in_double = True

    def __init__(self, in_shape: tuple[int, int, int], channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.out_shape = (channels, *patch_grid("BoundedConv", in_shape, kernel, stride))
        if channels < 2 or channels % 2:
            raise SortRLError(f"BoundedConv: {channels} channels, expected an even number: they are ordered in pairs.")
        self.stride = stride
        # Cubes of normal numbers: few large weights, so that a fresh layer keeps contrast instead of averaging it away.
        self.weight = nn.Parameter(torch.randn(channels, in_shape[0], kernel, kernel) ** 3)
        self.bias = nn.Parameter(torch.zeros(channels))

    @property
    def lipschitz(self) -> float:
        """The largest sum of absolute weights of an output, rounded up."""
        return float(self.weight.detach().double().abs().flatten(1).sum(1).max()) * (1.0 + 1e-12)

    @property
    def offset(self) -> float:
        """How large an output can be where all inputs are 0."""
        return float(self.bias.detach().abs().max())

    @property
    def roundings(self) -> int:
        """On the way of one input: its product and the sums, of both signs of weights apart if bounds are computed. Sums in
        float64 round far less; those of an exported network, which are in float32, as much."""
        return self.weight[0].numel() + 3

    def forward(self, x: Tensor) -> Tensor:
        return _ordered(patch_conv(x.double(), self.weight.double(), self.bias.double(), self.stride)).to(x.dtype)

    def trained(self, x: Tensor) -> Tensor:
        """The layer while it is trained: weights divided by their sums, differentiably."""
        return _ordered(functional.conv2d(x, self._normalized(), self.bias, self.stride))

    @torch.no_grad()
    def settle(self) -> None:
        """Divide the weights by their sums for good."""
        self.weight.copy_(self._normalized())

    def _normalized(self) -> Tensor:
        return self.weight / self.weight.abs().sum((1, 2, 3), keepdim=True).clamp(min=1e-12)

    def bounds(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The exact range of the convolution over a box of inputs; MaxMin is nondecreasing."""
        weight, bias = self.weight.double(), self.bias.double()
        rising, falling = weight.clamp(min=0.0), weight.clamp(max=0.0)

        def end(low: Tensor, high: Tensor) -> Tensor:
            least = patch_conv(high.double(), falling, None, self.stride)
            return _ordered(patch_conv(low.double(), rising, bias, self.stride) + least).to(lo.dtype)

        return end(lo, hi), end(hi, lo)

    def extra_repr(self) -> str:
        return f"-> {self.out_shape}, kernel={self.weight.shape[-1]}, stride={self.stride}"


def _ordered(x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], 1)


def nonnegative_lipschitz(module: nn.Module, shape: tuple[int, ...]) -> float:
    """The l_inf constant of a linear map with nonnegative coefficients: its largest row sum, read off an input of ones."""
    with torch.no_grad():
        return float(module(torch.ones(1, *shape, dtype=torch.float64)).max())

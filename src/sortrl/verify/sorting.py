"""Sort networks as their files describe them, with or without a linear head, in plain NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sortrl.verify.reading import Array, Doubles

_DISTANCES_AT_ONCE = 1 << 23
_LARGEST_RADIUS = 8.0  # of those that are sought behind a head
_BISECTIONS = 60


@dataclass(frozen=True)
class SortNetwork:
    """The evaluation network as its file describes it."""

    crop: tuple[int, int, int, int]
    pool: int
    pixels: tuple[int, ...]
    """Places in what crop and pool leave, flattened: nothing else is seen. None: all of it."""
    bounded: list[tuple[Doubles, Doubles, int]]
    """Weights, biases and strides of the convolutions with bounded weights, which come before the factor."""
    factor: Doubles
    conv: list[tuple[int, int, int]]
    """Channels, kernel and stride of the first layers, which see patches."""
    weights: list[Doubles]
    means: list[Doubles]
    mixes: list[Doubles]
    bias: Doubles
    head: list[tuple[Doubles, Doubles]]
    """Weights and biases of the linear layers, if there are any."""

    def seen(self, obs_shape: tuple[int, ...]) -> tuple[int, ...]:
        """What crop, pool and the choice of pixels leave of an observation."""
        if min(obs_shape, default=0) < 1 or min(self.crop) < 0 or self.pool < 1:
            raise ValueError(f"obs_shape {obs_shape}, crop {self.crop}, pool {self.pool}")
        shape = obs_shape
        if self.pool > 1 or any(self.crop):
            (channels, height, width), (top, bottom, left, right) = obs_shape, self.crop
            shape = channels, max(0, (height - top - bottom) // self.pool), max(0, (width - left - right) // self.pool)
        if not self.pixels:
            return shape
        # A negative place would be counted from the end, and what comes before convolutions must be an image.
        size, several = math.prod(shape), len(set(self.pixels)) < len(self.pixels)
        if several or min(self.pixels) < 0 or max(self.pixels) >= size or self.conv or self.bounded:
            raise ValueError(f"pixels outside 0..{size - 1}, or several times, or before convolutions")
        return (len(self.pixels),)

    @property
    def lipschitz(self) -> float:
        sums = [np.abs(weight).reshape(len(weight), -1).sum(1).max() for weight, _, _ in self.bounded]
        return float(self.factor.max() * math.prod(sums)) * math.prod(math.fsum(mix) for mix in self.mixes)

    def judge(self, states: Doubles) -> tuple[Doubles, Doubles]:
        """Scores (batch, actions), and the largest radius (batch,) that can be proven for the best action."""
        features = self._features(states)
        scores = self._scores(features)
        return scores, self._bound(features, scores.argmax(1))

    def _scores(self, features: Doubles) -> Doubles:
        """Of what the sort layers give, which without a head are the scores themselves."""
        x = features
        for index, (weight, bias) in enumerate(self.head):
            x = (np.maximum(x, 0.0) if index else x) @ weight.T + bias
        return x

    def _bound(self, features: Doubles, action: Array) -> Doubles:
        """The largest radius that margins, or intervals behind a head, allow."""
        rows = np.arange(len(features))
        if not self.head:
            others = features.copy()
            others[rows, action] = -np.inf
            return np.asarray((features[rows, action] - others.max(1)) / (2.0 * self.lipschitz))
        low, high = np.zeros(len(features)), np.full(len(features), _LARGEST_RADIUS)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            holds = (self._leads(features, action, middle[:, None] * self.lipschitz) > 0).all(1)
            low, high = np.where(holds, middle, low), np.where(holds, high, middle)
        return np.where((self._leads(features, action, np.zeros((len(features), 1))) > 0).all(1), high, 0.0)

    def _leads(self, features: Doubles, action: Array, reach: Doubles) -> Doubles:
        """How far the action leads each other one at least while the features move by ``reach``; infinite for itself."""
        lo, hi = features - reach, features + reach
        for weight, bias in self.head[:-1]:
            centre, radius = (lo + hi) / 2 @ weight.T + bias, (hi - lo) / 2 @ np.abs(weight).T
            lo, hi = np.maximum(centre - radius, 0.0), np.maximum(centre + radius, 0.0)
        weight, bias = self.head[-1]
        leads = np.empty((len(features), len(weight)))
        for other in range(len(weight)):
            difference = weight[action] - weight[other]
            middle = (difference * (lo + hi) / 2).sum(1) + bias[action] - bias[other]
            leads[:, other] = middle - (np.abs(difference) * (hi - lo) / 2).sum(1)
        leads[np.arange(len(features)), action] = np.inf
        return leads

    def _features(self, states: Doubles) -> Doubles:
        """What the sort layers give."""
        x = states
        top, bottom, left, right = self.crop
        if any(self.crop):
            x = x[..., top : x.shape[-2] - bottom, left : x.shape[-1] - right]
        if self.pool > 1:
            x = _pooled(x, self.pool)
        if self.pixels:
            x = x.reshape(len(x), -1)[:, list(self.pixels)]
        for weight, bias, stride in self.bounded:
            x = _bounded_layer(x, weight, bias, stride)
        shape = x.shape[1:]
        x = (x * self.factor).reshape(len(x), -1)
        means = [*self.means, -self.bias]
        for index, (weight, mix, mean) in enumerate(zip(self.weights, self.mixes, means, strict=True)):
            if index < len(self.conv):
                y, shape = _patch_layer(x, shape, weight, mix, *self.conv[index])
            else:
                y = _sort_layer(x, weight, mix)
            x = y - mean
        return -x


def _wrong_shapes(network: SortNetwork, config: dict[str, Any]) -> list[str]:
    """Numpy would stretch shapes that do not fit until they do; here each must be what the configuration says."""
    shape = network.seen(tuple(map(int, config["obs_shape"])))
    n_actions, width = int(config["n_actions"]), int(config["width"])
    expected: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for i, (channels, kernel, stride) in enumerate(_conv(config, "bounded_conv")):
        weight, bias, _ = network.bounded[i]
        expected |= {f"convolution {i}": (weight.shape, (channels, shape[0], kernel, kernel))}
        expected |= {f"bias of convolution {i}": (bias.shape, (channels,))}
        shape = (channels, *((size - kernel) // stride + 1 for size in shape[1:]))
    pairs, outputs = [], []
    for channels, kernel, stride in network.conv:
        high, wide = ((size - kernel) // stride + 1 for size in shape[1:])
        pairs.append((channels, shape[0] * kernel * kernel))
        shape = (channels, high, wide)
        outputs.append(math.prod(shape))
    sizes = [math.prod(shape), *[width] * (len(network.weights) - len(pairs) - 1), width if network.head else n_actions]
    pairs += [(b, a) for a, b in pairwise(sizes)]
    outputs += sizes[1:]
    expected |= {f"layer {i}": (w.shape, pairs[i]) for i, w in enumerate(network.weights)}
    expected |= {f"mean {i}": (mean.shape, (outputs[i],)) for i, mean in enumerate(network.means)}
    expected |= {"bias": (network.bias.shape, (outputs[-1],))}
    head = [width, *map(int, config.get("hidden", [])), n_actions]
    for i, (weight, bias) in enumerate(network.head):
        expected |= {f"linear layer {i}": (weight.shape, (head[i + 1], head[i]))}
        expected |= {f"bias of linear layer {i}": (bias.shape, (head[i + 1],))}
    lines = [f"{name}: shape {got}, expected {wanted}" for name, (got, wanted) in expected.items() if got != wanted]
    if network.factor.size != 1 or not 0 < float(network.factor.max()) < math.inf:
        lines.append("the factor on the inputs: expected one positive number")
    return lines


def sort_network(
    weights: dict[str, Array], config: dict[str, Any], tensors: dict[str, Array]
) -> tuple[SortNetwork, list[str]]:
    """The network, and what does not fit: then nothing can be computed with it. ``tensors`` are those of the certificates."""
    mixes = [tensors[f"mix.{index}"] for index in range(_layers(config))]
    network = _read(weights, config, mixes)
    return network, _wrong_mixes(mixes, network.weights, config) + _wrong_shapes(network, config)


def _read(weights: dict[str, Array], config: dict[str, Any], mixes: list[Array]) -> SortNetwork:
    def double(name: str) -> Doubles:
        return weights[name].astype(np.float64)

    head = [(double(f"head.layers.{i}.weight"), double(f"head.layers.{i}.bias")) for i in range(_linear_layers(config))]
    weights = {name.removeprefix("trunk."): array for name, array in weights.items()}
    depth = _layers(config)
    factors = [name for name in weights if name.startswith("front.") and name.endswith(".factor")]
    if len(factors) > 1 or int(config["depth"]) < 1:
        raise ValueError(f"{len(factors)} factors on the inputs, depth {config['depth']}")
    top, bottom, left, right = (int(border) for border in config["crop"])
    return SortNetwork(
        crop=(top, bottom, left, right),
        pool=int(config["pool"]),
        pixels=_pixels(config),
        factor=double(factors[0]) if factors else np.ones(1),
        bounded=_bounded(weights, config),
        conv=_conv(config),
        weights=[double(f"layers.{index}.weight") for index in range(depth)],
        means=[double(f"shifts.{index}.running_mean") for index in range(depth - 1)],
        mixes=[mix.astype(np.float64) for mix in mixes],
        bias=double("bias"),
        head=head,
    )


def _pixels(config: dict[str, Any]) -> tuple[int, ...]:
    """Files of before pixels could be chosen do not mention them."""
    pixels = tuple(config.get("pixels", []))
    if any(type(place) is not int for place in pixels):
        raise ValueError("pixels that are no whole numbers")
    return pixels


def _conv(config: dict[str, Any], name: str = "conv") -> list[tuple[int, int, int]]:
    """Files of before there were patches do not mention them."""
    return [(int(channels), int(kernel), int(stride)) for channels, kernel, stride in config.get(name, [])]


def _bounded(weights: dict[str, Array], config: dict[str, Any]) -> list[tuple[Doubles, Doubles, int]]:
    """In the file they are numbered among the front ends, behind crop and pool."""
    first = any(map(int, config["crop"])) + (int(config["pool"]) > 1)
    return [
        (weights[f"front.{i}.weight"].astype(np.float64), weights[f"front.{i}.bias"].astype(np.float64), stride)
        for i, (_, _, stride) in enumerate(_conv(config, "bounded_conv"), start=first)
    ]


def _layers(config: dict[str, Any]) -> int:
    return len(_conv(config)) + int(config["depth"])


def _linear_layers(config: dict[str, Any]) -> int:
    return len(config["hidden"]) + 1 if "hidden" in config else 0


def _wrong_mixes(mixes: list[Array], weights: list[Doubles], config: dict[str, Any]) -> list[str]:
    """The mix of a layer is (1 - rho) rho^j, cut and scaled to sum to 1; the first layer and those of patches take a maximum."""
    lines, plain = [], max(1, len(_conv(config)))
    for index, mix in enumerate(mixes):
        rho, fan_in = float(config["rho"]) if index >= plain else 0.0, weights[index].shape[1]
        expected = (1.0 - rho) * rho ** np.arange(len(mix), dtype=np.float64)
        expected /= expected.sum()
        if len(mix) > fan_in or (mix < 0).any() or np.abs(mix - expected).max() > 1e-6 or math.fsum(mix) > 1.0:
            lines.append(f"mix of layer {index}: not that of rho = {rho:g} with sum at most 1")
    return lines


def _sort_layer(x: Doubles, weight: Doubles, mix: Doubles) -> Doubles:
    """y[b, k] = sum_j mix[j] * (j-th largest of |x[b] - weight[k]|), a few rows at a time."""
    y = np.empty((len(x), len(weight)))
    rows = max(1, _DISTANCES_AT_ONCE // weight.size)
    cut = weight.shape[1] - len(mix)
    for begin in range(0, len(x), rows):
        distance = np.abs(x[begin : begin + rows, None, :] - weight[None])
        largest = np.partition(distance, cut, axis=2)[..., cut:] if cut else distance
        y[begin : begin + rows] = np.sort(largest, axis=2)[..., ::-1] @ mix
    return y


def _bounded_layer(x: Doubles, weight: Doubles, bias: Doubles, stride: int) -> Doubles:
    """A convolution; then of channels k and k + half, the larger one, and after all of those the smaller one."""
    y = np.empty(0)
    for row, image in enumerate(x):
        windows = np.lib.stride_tricks.sliding_window_view(image, weight.shape[2:], axis=(1, 2))[:, ::stride, ::stride]
        one = np.tensordot(weight, windows, axes=([1, 2, 3], [0, 3, 4])) + bias[:, None, None]
        y = y if row else np.empty((len(x), *one.shape))
        y[row] = one
    first, second = np.split(y, 2, axis=1)
    return np.concatenate([np.maximum(first, second), np.minimum(first, second)], axis=1)


def _patch_layer(
    x: Doubles, shape: tuple[int, ...], weight: Doubles, mix: Doubles, channels: int, kernel: int, stride: int
) -> tuple[Doubles, tuple[int, int, int]]:
    """The same for every patch of flat images; also the shape of what comes out."""
    images = x.reshape(len(x), *shape)
    windows = np.lib.stride_tricks.sliding_window_view(images, (kernel, kernel), axis=(2, 3))[:, :, ::stride, ::stride]
    height, width = windows.shape[2:4]
    rows = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, shape[0] * kernel * kernel)
    y = _sort_layer(rows, weight, mix).reshape(len(x), height, width, channels).transpose(0, 3, 1, 2)
    return y.reshape(len(x), -1), (channels, height, width)


def _pooled(x: Doubles, size: int) -> Doubles:
    batch, channels, height, width = x.shape
    rows, columns = height // size, width // size
    blocks = x[..., : rows * size, : columns * size].reshape(batch, channels, rows, size, columns, size)
    return np.asarray(blocks.mean(axis=(3, 5)))

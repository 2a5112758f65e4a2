"""An independent check of certificate files: plain NumPy in float64, written from the definition and sharing no code.

It reads the safetensors files itself, computes every score again and asks, per state: is the action the arg-max, is the
radius at most margin / (2 L) (with a linear head: does the action lead at that radius, by intervals), do the weights have
the stated hash?
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sortrl.errors import SortRLError

FORMAT = "sortrl-certificates-1"
Array = npt.NDArray[Any]
Doubles = npt.NDArray[np.float64]
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
_LARGEST_HEADER = 100_000_000
_LARGEST_FILE = 8 * 2**30
_DISTANCES_AT_ONCE = 1 << 23
_LARGEST_RADIUS = 8.0  # of those that are sought behind a head
_BISECTIONS = 60


@dataclass(frozen=True)
class Verdict:
    """What was checked and what is wrong, one line each."""

    states: int
    lipschitz: float
    failures: tuple[str, ...]
    smallest_spare: float
    """The least of margin / (2 L) (or what intervals allow) - radius over the states: what rounding slack was kept."""

    @property
    def ok(self) -> bool:
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what could not be computed is null."""
        numbers = {"lipschitz": self.lipschitz, "smallest_spare": self.smallest_spare}
        known = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {**vars(self), **known, "failures": list(self.failures), "ok": self.ok}


@dataclass(frozen=True)
class _Network:
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

    def scores(self, features: Doubles) -> Doubles:
        """Of what the sort layers give, which without a head are the scores themselves."""
        x = features
        for index, (weight, bias) in enumerate(self.head):
            x = (np.maximum(x, 0.0) if index else x) @ weight.T + bias
        return x

    def bound(self, features: Doubles, action: Array) -> Doubles:
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

    def features(self, states: Doubles) -> Doubles:
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


def verify(path: str | Path, policy: str | Path | None = None) -> Verdict:
    """Check a file of certificates; ``policy`` overrides where the policy's file is."""
    tensors, metadata = read_safetensors(Path(path))
    if metadata.get("format") != FORMAT:
        raise SortRLError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT}. It holds no certificates.")
    file = Path(path).parent / str(metadata.get("policy")) if policy is None else Path(policy)
    file = file / "policy.safetensors" if os.path.isdir(file) else file  # False for names that no system takes
    weights, description = read_safetensors(file)
    try:
        stored = [tensors[f"mix.{index}"] for index in range(_layers(description["config"]))]
        network = _network(weights, description["config"], stored)
        states, action, radius = (tensors[name] for name in ("states", "action", "radius"))
        unfit = _wrong_mixes(stored, network.weights, description["config"])
        unfit += _wrong_shapes(network, description["config"], tensors)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise SortRLError(f"{path} or {file} lacks something ({error!r}). Write the certificates again.") from error
    digest, stated = _hash(weights), str(metadata.get("weights_sha256"))
    failures = [] if digest == stated else [f"{file} has weights {digest[:12]}…, the certificates are of {stated[:64]}"]
    if unfit:  # then there is no network, or no state, to compute with
        return Verdict(len(states) if states.ndim else 0, math.nan, (*failures, *unfit), math.nan)
    with np.errstate(all="ignore"):  # what overflows is not finite, and that is a failure below
        wrong, spare = _wrong_states(network, states.astype(np.float64), action, radius.astype(np.float64))
    return Verdict(len(states), network.lipschitz, (*failures, *wrong), spare)


def _wrong_shapes(network: _Network, config: dict[str, Any], tensors: dict[str, Array]) -> list[str]:
    """Numpy would stretch shapes that do not fit until they do; here each must be what the configuration says."""
    obs_shape, n = tuple(map(int, config["obs_shape"])), len(tensors["action"])
    n_actions, width, shape = int(config["n_actions"]), int(config["width"]), network.seen(obs_shape)
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
    expected |= {"bias": (network.bias.shape, (outputs[-1],)), "states": (tensors["states"].shape, (n, *obs_shape))}
    expected |= {"action": (tensors["action"].shape, (n,)), "radius": (tensors["radius"].shape, (n,))}
    head = [width, *map(int, config.get("hidden", [])), n_actions]
    for i, (weight, bias) in enumerate(network.head):
        expected |= {f"linear layer {i}": (weight.shape, (head[i + 1], head[i]))}
        expected |= {f"bias of linear layer {i}": (bias.shape, (head[i + 1],))}
    lines = [f"{name}: shape {got}, expected {wanted}" for name, (got, wanted) in expected.items() if got != wanted]
    if network.factor.size != 1 or not 0 < float(network.factor.max()) < math.inf:
        lines.append("the factor on the inputs: expected one positive number")
    if tensors["action"].dtype.kind != "i":
        lines.append(f"action: type {tensors['action'].dtype}, expected integers")
    elif n and not 0 <= tensors["action"].min() <= tensors["action"].max() < n_actions:
        lines.append(f"action: outside 0..{n_actions - 1}")
    return lines


def _wrong_states(network: _Network, states: Doubles, action: Array, radius: Doubles) -> tuple[list[str], float]:
    if not len(states):
        return [], math.inf
    if not np.isfinite(states).all():
        return ["a state contains NaN or infinity"], math.nan
    features, rows = network.features(states), np.arange(len(states))
    scores = network.scores(features)
    best = scores.argmax(1)
    bound = network.bound(features, best)
    lines = []
    for i in rows:
        if not (np.isfinite(radius[i]) and radius[i] >= 0):
            lines.append(f"state {i}: its radius is {radius[i]}")
        elif best[i] != action[i] and (radius[i] > 0 or scores[i, action[i]] < scores[i, best[i]] - _tie(scores[i])):
            lines.append(f"state {i}: action {action[i]} is stated, the scores say {best[i]}")
        elif not radius[i] <= bound[i]:  # a score that is not a number proves nothing
            lines.append(f"state {i}: radius {radius[i]:.9g} is stated, at most {bound[i]:.9g} can be proven")
    return lines, float((bound - radius).min())


def _tie(scores: Doubles) -> float:
    """Without a certificate the float32 policy may see a near-tie the other way round."""
    return 1e-3 * float(1.0 + np.abs(scores).max())


def _network(weights: dict[str, Array], config: dict[str, Any], mixes: list[Array]) -> _Network:
    def double(name: str) -> Doubles:
        return weights[name].astype(np.float64)

    head = [(double(f"head.layers.{i}.weight"), double(f"head.layers.{i}.bias")) for i in range(_linear_layers(config))]
    weights = {name.removeprefix("trunk."): array for name, array in weights.items()}
    depth = _layers(config)
    factors = [name for name in weights if name.startswith("front.") and name.endswith(".factor")]
    if len(factors) > 1 or int(config["depth"]) < 1:
        raise ValueError(f"{len(factors)} factors on the inputs, depth {config['depth']}")
    top, bottom, left, right = (int(border) for border in config["crop"])
    return _Network(
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


def _hash(tensors: dict[str, Array]) -> str:
    """Of the weights as they are computed with: those in half precision are widened, which is exact."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = tensors[name].astype("<f4") if tensors[name].dtype == np.float16 else tensors[name]
        digest.update(f"{name}:{array.dtype.str}:{list(array.shape)};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors and metadata of a safetensors file: the length of a JSON header, the header, the bytes."""
    try:
        # Certificates name the policy's file: that may be a device or a pipe, which has no end.
        if not os.path.isfile(path) or path.stat().st_size > _LARGEST_FILE:
            found = "a file beyond every policy's size" if os.path.isfile(path) else "no such file"
            raise SortRLError(f"Cannot read {path}: {found}.")
        content = path.read_bytes()
    except OSError as error:
        raise SortRLError(f"Cannot read {path}: {error.strerror or error}.") from error
    try:
        size = int.from_bytes(content[:8], "little")
        if not 0 < size <= min(len(content) - 8, _LARGEST_HEADER):
            raise ValueError("its header is cut off")
        header = json.loads(content[8 : 8 + size])
        data = memoryview(content)[8 + size :]
        metadata = json.loads(header.pop("__metadata__", {}).get("sortrl", "{}"))
        tensors = {name: _tensor(entry, data) for name, entry in header.items()}
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not an object")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SortRLError(f"{path} is not a readable safetensors file ({error}). It may be damaged.") from error
    return tensors, metadata


def _tensor(entry: dict[str, Any], data: memoryview) -> Array:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= len(data):
        raise ValueError("a tensor lies outside the file")
    return np.frombuffer(data[begin:end], dtype=_TYPES[entry["dtype"]]).reshape(entry["shape"])

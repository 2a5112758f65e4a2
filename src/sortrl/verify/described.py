"""What a policy's metadata says of its network: every size, and the exact set of tensors that belongs to it.

Nothing is taken on trust: an unknown or missing setting, a wrong type, a size that fits nowhere is an error, as it is for who
loads the policy. What follows from the settings (mixes, places of the front ends, shapes) is derived here once more.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from sortrl.verify.reading import Array, Doubles

FORMAT = 1
_KINDS = ("sort", "hybrid", "rounded")
_SORT_KEYS = {"obs_shape", "n_actions", "width", "depth", "rho", "scale", "crop", "pool", "mask_chunk"}
# Files written before these existed omit them, and have none.
_LATER_SORT_KEYS = {"conv", "bounded_conv", "pixels", "ramp_width", "ramp_limit"}
_NO_RAMP = {"width": 0.0, "limit": 1.0}
_ROUNDED_KEYS = {"obs_shape", "n_actions", "levels", "conv", "hidden"}
_LATER_ROUNDED_KEYS = {"norm"}
_CUT = 1e-4  # share of a mix that is cut off
_LONGEST_MIX = 100_000

Shape = tuple[int, ...]
Convolution = tuple[int, int, int]
"""Channels, kernel and stride."""


@dataclass(frozen=True)
class Tensor:
    """What a file must hold under a name."""

    shape: Shape
    double: bool = False
    """float64; otherwise float32, or halves that are widened."""
    finite: bool = True
    positive: bool = False
    value: float | None = None
    """If only one number will do."""

    def wrong(self, found: Array) -> str | None:
        types = (np.dtype("<f8"),) if self.double else (np.dtype("<f4"), np.dtype("<f2"))
        if found.shape != self.shape or found.dtype not in types:
            kind = "float64" if self.double else "float32"
            return f"shape {found.shape} of {found.dtype}, expected {self.shape} of {kind}"
        if self.finite and not np.isfinite(found).all():
            return "contains NaN or infinity"
        if self.positive and not (found > 0).all():
            return "expected positive numbers"
        if self.value is not None and float(found.max()) != self.value:
            return f"is {float(found.max()):.9g}, the configuration says {self.value:.9g}"
        return None


@dataclass(frozen=True)
class SortDescription:
    """Front ends and sort layers, and the widths of the linear layers behind them, if there are any."""

    obs_shape: Shape
    n_actions: int
    crop: tuple[int, int, int, int]
    pool: int
    pixels: Shape
    """Places in what crop and pool leave, flattened: nothing else is seen. None: all of it."""
    centres: str | None
    """The name of the centres of ramps, if what is seen is seen through ramps."""
    ramp: tuple[float, float]
    """Their width and limit, in float32."""
    bounded: list[Convolution]
    first_bounded: int
    """Its number among the front ends."""
    factor: str | None
    """The name of the factor on the inputs."""
    conv: list[Convolution]
    fans: list[int]
    """Inputs of a unit, of each sort layer."""
    rho: float
    prefix: str
    head: list[int] | None
    """Sizes from the features to the scores."""
    tensors: dict[str, Tensor]

    def mix(self, layer: int) -> Doubles:
        """(1 - rho) rho^j, cut, scaled to sum to 1 and rounded towards zero; the first layer and patches take a maximum."""
        rho, fan_in = self.rho if layer >= max(1, len(self.conv)) else 0.0, self.fans[layer]
        if rho == 0.0:
            return np.ones(1)
        length = min(fan_in, math.ceil(math.log(_CUT) / math.log(rho)))
        if length > _LONGEST_MIX:
            raise ValueError(f"rho {rho} makes a mix of {length} numbers, expected at most {_LONGEST_MIX}")
        exact = (1.0 - rho) * rho ** np.arange(length, dtype=np.float64)
        exact /= math.fsum(exact)
        single = exact.astype(np.float32)
        single = np.where(single.astype(np.float64) > exact, np.nextafter(single, np.float32(0.0)), single)
        return single.astype(np.float64)


@dataclass(frozen=True)
class ThresholdDescription:
    """Thresholds, convolutions, linear layers."""

    obs_shape: Shape
    n_actions: int
    strides: list[int]
    """Of each layer; 0 for a linear one."""
    norm: bool
    tensors: dict[str, Tensor]


def described(metadata: dict[str, Any], names: Collection[str]) -> SortDescription | ThresholdDescription:
    """Raises ValueError for what no policy says of itself. ``names`` are those of the file's tensors."""
    _check_keys("metadata", metadata, {"format", "config", "clip"}, {"kind"})
    if type(metadata["format"]) is not int or metadata["format"] != FORMAT:
        raise ValueError(f"format {str(metadata['format'])[:40]!r}, expected {FORMAT}")
    kind = metadata.get("kind", "sort")  # files written before there were other kinds omit it
    if kind not in _KINDS:
        raise ValueError(f"kind {str(kind)[:40]!r}, expected one of {', '.join(_KINDS)}")
    if metadata["clip"] is not None:
        _number("clip", metadata["clip"], above=0.0)
    if not isinstance(metadata["config"], dict):
        raise ValueError("config: expected an object")
    reading = _rounded if kind == "rounded" else _sort
    return reading(metadata["config"], kind == "hybrid", len(names))


def wrong_tensors(expected: dict[str, Tensor], found: dict[str, Array]) -> list[str]:
    """One line for each tensor that is missing, that does not belong, or that is not as it must be."""
    lines = [f"{name}: nothing, expected {expected[name].shape}" for name in sorted(expected.keys() - found.keys())]
    lines += [f"{name[:80]}: expected no such tensor" for name in sorted(found.keys() - expected.keys())]
    wrong = {name: expected[name].wrong(found[name]) for name in sorted(expected.keys() & found.keys())}
    return lines + [f"{name}: {reason}" for name, reason in wrong.items() if reason is not None]


def _sort(config: dict[str, Any], hybrid: bool, count: int) -> SortDescription:
    _check_keys("config", config, _SORT_KEYS | ({"hidden"} if hybrid else set()), _LATER_SORT_KEYS)
    obs_shape, n_actions = _wholes("obs_shape", config["obs_shape"], 1), _whole("n_actions", config["n_actions"], 2)
    width, depth = _whole("width", config["width"], 2 if hybrid else 1), _whole("depth", config["depth"], 1)
    _whole("mask_chunk", config["mask_chunk"], 1)
    rho, scale = _number("rho", config["rho"]), _number("scale", config["scale"], above=0.0)
    if not 0.0 <= rho < 1.0:
        raise ValueError(f"rho {rho}, expected a number in [0, 1)")
    crop, pool = _wholes("crop", config["crop"], 0), _whole("pool", config["pool"], 1)
    conv, bounded = (_convolutions(name, config.get(name, [])) for name in ("conv", "bounded_conv"))
    pixels = _wholes("pixels", config.get("pixels", []), 0)
    ramp_width, ramp_limit = (_number(f"ramp_{name}", config.get(f"ramp_{name}", x)) for name, x in _NO_RAMP.items())
    hidden = _wholes("hidden", config["hidden"], 1) if hybrid else ()
    if depth + len(conv) + len(bounded) + len(hidden) > count:
        raise ValueError(f"{count} tensors for {depth + len(conv) + len(bounded) + len(hidden)} layers")
    if not obs_shape or len(crop) != 4:
        raise ValueError(f"obs_shape {obs_shape}, crop {crop}: expected one size or more, and four borders")
    shape, front = obs_shape, any(crop) + (pool > 1)
    if (front or conv or bounded) and len(obs_shape) != 3:
        raise ValueError(f"crop, pool and convolutions need images, not observations of shape {obs_shape}")
    if front:
        shape = (shape[0], (shape[1] - crop[0] - crop[1]) // pool, (shape[2] - crop[2] - crop[3]) // pool)
        if min(shape) < 1:
            raise ValueError(f"crop {crop} and pool {pool} leave nothing of {obs_shape}")
    if pixels:
        doubles = len(set(pixels)) < len(pixels) and not ramp_width
        if conv or bounded or doubles or max(pixels) >= math.prod(shape):
            raise ValueError(f"pixels outside 0..{math.prod(shape) - 1}, or several times, or before convolutions")
        shape, front = (len(pixels),), front + 1
    elif ramp_width:
        shape, front = (math.prod(shape),), front + 1
    inner: dict[str, Tensor] = {
        "normalizer.mean": Tensor(obs_shape, double=True),
        "normalizer.scale": Tensor(obs_shape, double=True, positive=True),
        "p": Tensor((), double=True, finite=False),  # of training alone, as mu is
        "mu": Tensor(()),
    }
    centres = None
    if ramp_width:
        if not (1e-6 <= ramp_width <= 1e6 and 1e-6 <= ramp_limit <= 1e6) or conv or bounded or scale != 1.0:
            raise ValueError(
                f"ramps of width {ramp_width} and limit {ramp_limit}, or with convolutions or a scale behind them"
            )
        centres, front = f"front.{front}.centres", front + 2
        inner[centres] = Tensor(shape)
    first_bounded = front
    for channels, kernel, stride in bounded:
        if channels % 2:
            raise ValueError(f"bounded_conv with {channels} channels, expected pairs")
        inner[f"front.{front}.weight"] = Tensor((channels, shape[0], kernel, kernel))
        inner[f"front.{front}.bias"] = Tensor((channels,))
        shape, front = _after("bounded_conv", shape, (channels, kernel, stride)), front + 1
    factor = None
    if scale != 1.0:
        factor = f"front.{front}.factor"
        with np.errstate(over="ignore"):
            inner[factor] = Tensor((), positive=True, value=float(np.float32(scale)))
    fans, outputs = [], []
    for index, layer in enumerate(conv):
        fans.append(shape[0] * layer[1] ** 2)
        inner[f"layers.{index}.weight"] = Tensor((layer[0], fans[-1]))
        shape = _after("conv", shape, layer)
        outputs.append(math.prod(shape))
    sizes = [math.prod(shape), *[width] * (depth - 1), width if hybrid else n_actions]
    for index, (a, b) in enumerate(pairwise(sizes), start=len(conv)):
        fans.append(a)
        inner[f"layers.{index}.weight"] = Tensor((b, a))
        outputs.append(b)
    inner |= {f"shifts.{index}.running_mean": Tensor((size,)) for index, size in enumerate(outputs[:-1])}
    inner["bias"] = Tensor((outputs[-1],))
    prefix, head = ("trunk.", [width, *hidden, n_actions]) if hybrid else ("", None)
    tensors = {prefix + name: tensor for name, tensor in inner.items()}
    for index, (a, b) in enumerate(pairwise(head or [])):
        tensors |= {f"head.layers.{index}.weight": Tensor((b, a)), f"head.layers.{index}.bias": Tensor((b,))}
    borders = (crop[0], crop[1], crop[2], crop[3])
    ramp = float(np.float32(ramp_width)), float(np.float32(ramp_limit))
    return SortDescription(
        obs_shape, n_actions, borders, pool, pixels, centres, ramp,
        bounded, first_bounded, factor, conv, fans, rho, prefix, head, tensors,
    )  # fmt: skip


def _rounded(config: dict[str, Any], _: bool, count: int) -> ThresholdDescription:
    _check_keys("config", config, _ROUNDED_KEYS, _LATER_ROUNDED_KEYS)
    obs_shape, n_actions = _wholes("obs_shape", config["obs_shape"], 1), _whole("n_actions", config["n_actions"], 2)
    levels, conv = _whole("levels", config["levels"], 1), _convolutions("conv", config["conv"])
    hidden, norm = _wholes("hidden", config["hidden"], 1), config.get("norm", False)
    if len(obs_shape) != 3 or type(norm) is not bool:
        raise ValueError(f"obs_shape {obs_shape} and norm {str(norm)[:40]!r}, expected an image, and true or false")
    if len(conv) + len(hidden) > count:
        raise ValueError(f"{count} tensors for {len(conv) + len(hidden)} layers")
    tensors = {
        "normalizer.mean": Tensor(obs_shape, double=True),
        "normalizer.scale": Tensor(obs_shape, double=True, positive=True),
        "rounding.thresholds": Tensor((levels, *obs_shape)),
    }
    shape: Shape = (levels * obs_shape[0], *obs_shape[1:])
    weights: list[Shape] = []
    for layer in conv:
        weights.append((layer[0], shape[0], layer[1], layer[1]))
        shape = _after("conv", shape, layer)
    weights += [(b, a) for a, b in pairwise((math.prod(shape), *hidden, n_actions))]
    for index, weight in enumerate(weights):
        tensors |= {f"head.layers.{index}.weight": Tensor(weight), f"head.layers.{index}.bias": Tensor(weight[:1])}
        if norm and index < len(weights) - 1:
            tensors |= {f"head.norms.{index}.{name}": Tensor(weight[:1]) for name in ("weight", "bias")}
    strides = [stride for _, _, stride in conv] + [0] * (len(hidden) + 1)
    return ThresholdDescription(obs_shape, n_actions, strides, norm, tensors)


def _after(name: str, shape: Shape, layer: Convolution) -> Shape:
    channels, kernel, stride = layer
    if kernel > min(shape[1:]):
        raise ValueError(f"{name}: a kernel of {kernel} on images of {shape}")
    return (channels, *((size - kernel) // stride + 1 for size in shape[1:]))


def _check_keys(where: str, found: dict[str, Any], needed: set[str], later: set[str]) -> None:
    missing, unknown = sorted(needed - found.keys()), sorted(found.keys() - needed - later)
    if missing or unknown:
        raise ValueError(
            f"{where} lacks {', '.join(missing) or 'nothing'}, unknown: {', '.join(unknown)[:80] or 'none'}"
        )


def _whole(name: str, value: Any, least: int) -> int:
    if type(value) is not int or value < least:  # True is an int to Python
        raise ValueError(f"{name} {str(value)[:40]!r}, expected a whole number of at least {least}")
    return value


def _wholes(name: str, values: Any, least: int) -> Shape:
    if not isinstance(values, list):
        raise ValueError(f"{name} {str(values)[:40]!r}, expected a list")
    return tuple(_whole(name, value, least) for value in values)


def _number(name: str, value: Any, above: float = -math.inf) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value > above):
        raise ValueError(f"{name} {str(value)[:40]!r}, expected a number{f' above {above:g}' if above == 0.0 else ''}")
    return float(value)


def _convolutions(name: str, layers: Any) -> list[Convolution]:
    found = [_wholes(name, layer, 1) for layer in layers] if isinstance(layers, list) else [()]
    if any(len(layer) != 3 for layer in found):
        raise ValueError(f"{name} {str(layers)[:40]!r}, expected [channels, kernel, stride] for each layer")
    return [(layer[0], layer[1], layer[2]) for layer in found]

"""A frozen policy as one run of bytes, for the evaluation of single observations in one call (csrc/network.h reads it).

The bytes are little-endian, without padding: the units, the front ends, the sort layers, the error bound, and a CRC-32.
"""

from __future__ import annotations

import math
import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.files import atomic_path
from sortrl.core.normalizer import Normalizer
from sortrl.nets.float_bounds import ErrorBound, FrontPart, Network
from sortrl.nets.front import AveragePool, BoundedConv, Centre, Ramp, Scale
from sortrl.nets.layers import SortLinear
from sortrl.ops import MAX_TOP, cpu

if TYPE_CHECKING:
    from sortrl.nets.sort import SortPolicy

MAGIC = b"sortrl\0\1"
PICK, AVERAGE, SHIFT, SCALE, RAMP = range(5)


def without_place(network: Network) -> str | None:
    """A part of the network that has no place in the bytes, or None."""
    layers = (layer for layer in network.layers if type(layer) is not SortLinear or len(layer.mix) > MAX_TOP)
    part = next((part for part in network.front if isinstance(part, BoundedConv)), None) or next(layers, None)
    return None if part is None else str(part)


def packed(network: Network, bound: ErrorBound, normalizer: Normalizer) -> bytes:
    """The bytes; a :class:`SortRLError` where a part of the network has no place in them."""
    strange = without_place(network)
    if strange is not None:
        raise SortRLError(
            f"packing a policy: it has {strange}; what can be packed are sort layers of up to {MAX_TOP} sorted distances, on "
            "observations that are cropped, pooled, picked, centred, scaled or seen through ramps."
        )
    body = b"".join((MAGIC, *_parts(network, bound, normalizer)))
    return body + struct.pack("<I", zlib.crc32(body))


def _parts(network: Network, bound: ErrorBound, normalizer: Normalizer) -> Iterator[bytes]:
    front, layers, shape = list(network.front), network.layers, normalizer.obs_shape
    yield struct.pack("<3I", math.prod(shape), len(front), len(layers))
    yield _numbers(normalizer.mean, "<f8") + _numbers(normalizer.scale, "<f8") + struct.pack("<d", normalizer.clip)
    for part, constants in zip(front, bound.front, strict=True):
        kind, content, shape = _front(part, shape)
        yield struct.pack("<IddI", kind, constants.lipschitz, constants.offset, math.prod(shape)) + content
    subtracted = [shift.running_mean for shift in network.shifts] + [network.bias]
    for layer, shift in zip(layers, subtracted, strict=True):
        sizes = struct.pack("<2I", len(layer.weight), len(layer.mix))
        yield sizes + _numbers(layer.mix, "<f4") + _numbers(layer.weight, "<f4") + _numbers(shift, "<f4")
    numbers = (bound.lipschitz, bound.per_reach, bound.constant, bound.peak, *bound.per_magnitude)
    yield struct.pack(f"<{len(numbers)}d", *numbers)


def _front(part: FrontPart, shape: tuple[int, ...]) -> tuple[int, bytes, tuple[int, ...]]:
    """The kind of a front end on inputs of this shape, its numbers, and the shape of what it gives."""
    if isinstance(part, Centre):
        return SHIFT, _numbers(part.centres, "<f4"), shape
    if isinstance(part, Scale):
        return SCALE, _numbers(part.factor.expand(shape), "<f4"), shape
    if isinstance(part, Ramp):
        return RAMP, struct.pack("<2f", part.width, part.limit), shape
    places = torch.arange(math.prod(shape)).reshape(1, *shape)
    if isinstance(part, AveragePool):
        kept = (length - length % part.size for length in shape[-2:])
        corners = places[..., : next(kept) : part.size, : next(kept) : part.size]
        return AVERAGE, _numbers(corners, "<i4") + struct.pack("<2I", part.size, shape[-1]), tuple(corners.shape[1:])
    picked = part(places)  # where the numbers go that are picked, read off the numbers of their places
    return PICK, _numbers(picked, "<i4"), tuple(picked.shape[1:])


def _numbers(tensor: Tensor, dtype: str) -> bytes:
    return np.ascontiguousarray(tensor.detach().cpu().numpy()).astype(dtype).tobytes()


def export_c(policy: SortPolicy, directory: str | Path) -> None:
    """Write ``policy.bin`` and the C sources that read it: ``policy.h`` (plain C) and what is behind it, an example, a Makefile.

    The radius is that of the margin: behind ramps less than what :meth:`SortPolicy.certify` proves there by boxes.
    """
    kernels = cpu.select().module
    if kernels is None:
        raise SortRLError(f"export_c: the C sources come with the kernels, which are missing: {cpu.select().reason}.")
    network = policy.sort_evaluation(thorough=True)
    content = packed(network, network.bound, policy.normalizer)
    target = Path(directory)
    for source in sorted((Path(str(kernels.__file__)).parent / "c").iterdir()):
        with atomic_path(target / source.name) as temporary:
            shutil.copyfile(source, temporary)
    with atomic_path(target / "policy.bin") as temporary:
        temporary.write_bytes(content)

"""What a student of images sees of them: pixels that vary, each through ramps whose constants are found in the data.

Fresh weights of sort layers are N(0, 1): on pixels between 0 and 1 every unit would measure its own weights, and nothing is
learned. So what enters has a spread of about 1. A screen shows few colours, and between the values that a pixel takes there are
gaps: a ramp across a gap tells its two sides apart, and saturates beyond. Where pixels take all values, as in photographs and
textures, there are none, and ramps are wide: pixels less their mean, divided by the spread, and clipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import avg_pool2d

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Demonstrations
from sortrl.nets import Centre, SortPolicy

BYTES = 256  # values that a pixel can take
STATES = 16_384  # that constants are found in
RARE = 2e-5  # values that a pixel takes in a smaller share of the states do not count
GAPS = (32.0, 20.0, 15.0, 10.5, 7.5, 5.0)  # halves of gaps, in bytes, widest first
EXPLAINED = 2 / 3  # share of the variance of pixels that ramps across gaps have to explain,
TOLD = 0.5  # and what they tell from the background, at least, of what those across the narrowest gaps tell
APART = 0.9  # and of the different states, the share that must still differ: mazes change much of a screen, and a car little
LEVELS = 2  # ramps per pixel, at most
CLIPPED = 1.5  # standard deviations at which pixels are clipped, where there are no gaps
VARYING = 0.02  # of the largest deviation: pixels that vary less are left out there
LARGEST_POOL = 11  # sums of blocks are kept in two bytes


@dataclass(frozen=True)
class Ramps:
    """Places in flattened images (of blocks of pixels, if they are pooled), each with the centre of its ramp in unit space, and the
    shape of all ramps."""

    pixels: npt.NDArray[np.int64]
    centres: npt.NDArray[np.float64]
    width: float
    limit: float
    pool: int = 1

    def shape(self) -> dict[str, Any]:
        """Arguments of a policy that sees whole images."""
        pixels = tuple(self.pixels.tolist())
        return {"pixels": pixels, "ramp_width": self.width, "ramp_limit": self.limit, "pool": self.pool}

    def seen(self, demonstrations: Demonstrations, normalizer: Normalizer) -> tuple[Demonstrations, Normalizer, Ramps]:
        """The data without the pixels that nobody sees, which makes training twice as fast; normaliser and ramps that fit them."""
        used, places = np.unique(self.pixels, return_inverse=True)
        obs, n = demonstrations.obs, self.pool**2
        shift, unit = _pooled_units(normalizer, self.pool)
        mean, scale = (n * part.flatten()[used] for part in (shift, unit))
        columns = np.empty((len(obs), len(used)), obs.dtype if n == 1 else np.int16)
        for begin in range(0, len(obs), 4096):
            part = _sums(obs[begin : begin + 4096], self.pool)
            columns[begin : begin + 4096] = part.reshape(len(part), -1)[:, used]
        narrow = replace(self, pixels=places.astype(np.int64), pool=1)
        return replace(demonstrations, obs=columns, transitions=None), Normalizer(mean, scale, normalizer.clip), narrow

    def widened(self, narrow: SortPolicy, normalizer: Normalizer) -> SortPolicy:
        """The policy of whole images that sees of them what ``narrow`` was trained on."""
        shape = {name: getattr(narrow.config, name) for name in ("width", "depth", "rho", "mask_chunk")}
        policy = SortPolicy(normalizer.obs_shape, narrow.n_actions, **shape, **self.shape(), normalizer=normalizer)
        # The front end, whose parts have other numbers behind a pool, and the units are the policy's own.
        learned = {
            name: value for name, value in narrow.state_dict().items() if not name.startswith(("front", "normalizer"))
        }
        policy.load_state_dict({**policy.state_dict(), **learned})
        self.put_into(policy)
        return policy.eval().requires_grad_(False)

    def put_into(self, policy: SortPolicy) -> None:
        """Give the policy these centres."""
        (centre,) = (part for part in policy.front if isinstance(part, Centre))
        centre.centres.copy_(torch.from_numpy(self.centres))


def found_ramps(obs: npt.NDArray[Any], normalizer: Normalizer, pool: int = 1) -> Ramps:
    """The ramps for images of bytes (states, ...): across the widest gaps that tell what there is to see, or else wide ones.

    With ``pool`` they are those for images (states, channels, height, width) of the means of blocks, which are all that is seen.

    >>> images = np.array([[0, 7], [0, 7], [200, 7], [200, 7]], np.uint8)
    >>> ramps = found_ramps(images, Normalizer.from_pixels((2,)))
    >>> ramps.pixels.tolist(), (ramps.centres * 255).tolist(), ramps.width * 255
    ([0], [100.0], 64.0)
    """
    if obs.dtype != np.uint8 or not len(obs):
        raise SortRLError(f"Ramps: {len(obs)} observations of {obs.dtype}, expected images of bytes (uint8).")
    if not 1 <= pool <= LARGEST_POOL or (pool > 1 and obs.ndim != 4):
        raise SortRLError(
            f"Ramps: pool is {pool} for observations of shape {obs.shape[1:]}, expected 1, or for images (channels, height, width) "
            f"at most {LARGEST_POOL}."
        )
    smallest, largest = float(normalizer.scale.min()), float(normalizer.scale.max())
    if smallest != largest:
        raise SortRLError(
            f"Ramps: pixels are divided by {smallest:g} to {largest:g}, expected one scale for all of them."
        )
    mean, scale = (part.flatten() for part in _pooled_units(normalizer, pool))
    if pool > 1:
        obs = np.rint(_sums(_some(obs), pool) / pool**2).astype(np.uint8)
    counts = _counts(obs)
    total = _deviations(counts)
    if not total.any():
        raise SortRLError(f"Ramps: {len(obs)} observations that are all the same; collect others.")
    narrowest = _across_gaps(counts, GAPS[-1]).told
    for gap in GAPS:
        found = _across_gaps(counts, gap)
        enough = found.explained >= EXPLAINED and found.told > TOLD * narrowest
        if enough and _apart(obs, found) >= APART:
            kept = _different(obs, counts, found)
            pixels, centres = found.pixels[kept], found.centres[kept]
            # As wide as the narrowest gap: beyond wider ones nothing moves until what they have more is used up.
            return Ramps(pixels, (centres - mean[pixels]) / scale[pixels], 2.0 * gap / float(scale[0]), 1.0, pool)
    spread = np.sqrt(total / counts.sum(1))
    pixels = np.flatnonzero(spread > VARYING * spread.max())
    centres = (counts[pixels] @ np.arange(BYTES)) / counts[pixels].sum(1)
    width = float(np.sqrt((spread[pixels] ** 2).mean())) / float(scale[0])
    return Ramps(pixels, (centres - mean[pixels]) / scale[pixels], width, CLIPPED, pool)


def gap_centres(counts: npt.NDArray[np.int64], gap: float, levels: int, least: float) -> npt.NDArray[np.float64]:
    """Of a pixel with ``counts[v]`` states of value v: the middles between neighbouring values at least ``2 * gap`` apart.

    Values with fewer than ``least`` states do not count. Of more than ``levels`` middles, those that split the states most
    evenly are taken.
    """
    values = np.flatnonzero(counts >= least)
    wide = np.flatnonzero(np.diff(values) >= 2 * gap)
    below = np.cumsum(counts)[values[wide]]
    best = wide[np.argsort(-np.minimum(below, counts.sum() - below), kind="stable")][:levels]
    middles: npt.NDArray[np.float64] = (values[best] + values[best + 1]) / 2
    return middles


def _some(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """States spread over the data."""
    return obs[:: -(-len(obs) // STATES)]


def _sums(obs: npt.NDArray[Any], pool: int) -> npt.NDArray[Any]:
    """Sums over blocks of images (states, channels, height, width), exact; rests at the borders are left out, as in pooling."""
    if pool == 1:
        return obs
    n, channels, height, width = obs.shape
    rows, columns = height // pool, width // pool
    blocks = obs[:, :, : rows * pool, : columns * pool].reshape(n, channels, rows, pool, columns, pool)
    sums: npt.NDArray[Any] = blocks.sum((3, 5), dtype=np.int16)
    return sums


def _pooled_units(normalizer: Normalizer, pool: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and scale of a normaliser, as they are of the means of blocks."""
    shift, unit = (
        (part if pool == 1 else avg_pool2d(part, pool)).numpy() for part in (normalizer.mean, normalizer.scale)
    )
    return shift, unit


def _counts(obs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How often (pixels, 256) each pixel takes each value, in states spread over the data."""
    flat = _some(obs).reshape(-1, int(np.prod(obs.shape[1:])))
    counts = np.empty((flat.shape[1], BYTES), np.int64)
    for begin in range(0, flat.shape[1], 512):
        columns = flat[:, begin : begin + 512].astype(np.int64)
        columns += BYTES * np.arange(columns.shape[1])
        counts[begin : begin + 512] = np.bincount(columns.ravel(), minlength=BYTES * columns.shape[1]).reshape(
            -1, BYTES
        )
    return counts


def _deviations(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Sums (pixels,) of squared deviations from the mean."""
    values = np.arange(BYTES, dtype=np.float64)
    n = np.maximum(counts.sum(-1), 1)
    found: npt.NDArray[np.float64] = np.maximum(counts @ values**2 - (counts @ values) ** 2 / n, 0.0)
    return found


class _Found(NamedTuple):
    """Ramps across gaps, in bytes, and what they show."""

    pixels: npt.NDArray[np.int64]
    centres: npt.NDArray[np.float64]
    explained: float
    """Share of the variance of all pixels that is between the cells into which centres cut their values."""
    told: float
    """Of all pixels that do not show their most frequent value, the share that are in another cell than it: faint things count
    as much as bright ones."""


def _across_gaps(counts: npt.NDArray[np.int64], gap: float) -> _Found:
    pixels: list[int] = []
    centres: list[float] = []
    left, untold, other = 0.0, 0, int(counts.sum() - counts.max(1).sum())
    least = max(1.0, RARE * float(counts[0].sum()))
    for pixel in np.flatnonzero((counts > 0).sum(1) > 1).tolist():
        middles = np.sort(gap_centres(counts[pixel], gap, LEVELS, least))
        cells = np.zeros((len(middles) + 1, BYTES), np.int64)
        cell_of = np.searchsorted(middles, np.arange(BYTES))
        cells[cell_of, np.arange(BYTES)] = counts[pixel]
        left += float(_deviations(cells).sum())
        most = int(counts[pixel].argmax())
        untold += int(cells[cell_of[most]].sum() - counts[pixel, most])
        pixels += [pixel] * len(middles)
        centres += middles.tolist()
    explained, told = 1.0 - left / float(_deviations(counts).sum()), 1.0 - untold / other
    return _Found(np.array(pixels, np.int64), np.array(centres, np.float64), explained, told)


def _apart(obs: npt.NDArray[Any], found: _Found) -> float:
    """Of the states that differ, the share that still do where all that is known is on which side of the ramps they are."""
    states = _some(obs).reshape(-1, obs[0].size)
    sides = (np.packbits(state[found.pixels] > found.centres).tobytes() for state in states)
    return len(set(sides)) / len({state.tobytes() for state in states})


def _different(obs: npt.NDArray[Any], counts: npt.NDArray[np.int64], found: _Found) -> npt.NDArray[np.int64]:
    """Numbers of the ramps to keep: of those that show the same in all states, or its opposite, the one across the widest gap.

    Things move as a whole, so nearly half of the ramps tell nothing new, and each would give a perturbation one more chance.
    """
    states = _some(obs).reshape(-1, int(np.prod(obs.shape[1:])))
    shown: dict[bytes, tuple[float, int]] = {}
    for number, (pixel, centre) in enumerate(zip(found.pixels.tolist(), found.centres.tolist(), strict=True)):
        above = states[:, pixel] > centre
        key = np.packbits(above ^ above[0]).tobytes()
        room = float(np.abs(np.flatnonzero(counts[pixel]) - centre).min())
        if key not in shown or room > shown[key][0]:
            shown[key] = room, number
    return np.array(sorted(number for _, number in shown.values()), np.int64)

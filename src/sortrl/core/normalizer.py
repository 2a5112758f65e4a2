"""The affine map from raw observations to unit space, kept inside every policy so that it cannot be lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError

TABULATED = 1 << 14  # of so many bytes or more, units are looked up


class Normalizer(nn.Module):
    """``unit = clamp((raw - mean) / scale, -clip, clip)``.

    eps, radii and Lipschitz constants live in unit space; ``radius_unit * scale`` states a radius in raw units.
    The mean and scale are stored in float64 and applied in float64, because raw units can be large.

    >>> normalizer = Normalizer(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.5]))
    >>> normalizer([[3.0, 1.0]])
    tensor([[1., 2.]])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: npt.ArrayLike | Tensor, scale: npt.ArrayLike | Tensor, clip: float = math.inf) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(np.asarray(mean), dtype=torch.float64).clone())
        self.register_buffer("scale", torch.as_tensor(np.asarray(scale), dtype=torch.float64).clone())
        self.clip = float(clip)
        if self.mean.shape != self.scale.shape:
            raise SortRLError(
                f"Normalizer: mean has shape {tuple(self.mean.shape)} and scale {tuple(self.scale.shape)}; they must be equal."
            )
        if not (torch.isfinite(self.mean).all() and torch.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise SortRLError("Normalizer: mean and scale must be finite and scale positive.")
        if not self.clip > 0:
            raise SortRLError(f"Normalizer: clip is {clip}, expected a positive number.")

    @classmethod
    def identity(cls, obs_shape: tuple[int, ...]) -> Normalizer:
        """Raw observations are already in the policy's units."""
        return cls(np.zeros(obs_shape), np.ones(obs_shape))

    @classmethod
    def from_pixels(cls, obs_shape: tuple[int, ...]) -> Normalizer:
        """0..255 images to 0..1."""
        return cls(np.zeros(obs_shape), np.full(obs_shape, 255.0))

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return tuple(self.mean.shape)

    def forward(self, raw: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape), any numeric type -> float32 unit space."""
        observations = raw if isinstance(raw, Tensor) else torch.as_tensor(as_array(raw, self.obs_shape))
        if tuple(observations.shape[1:]) != self.obs_shape or observations.ndim == 0:
            raise SortRLError(
                f"Observations have shape {tuple(observations.shape)}, expected (batch, {', '.join(map(str, self.obs_shape))})."
            )
        if observations.dtype == torch.uint8 and observations.numel() > TABULATED and not torch.compiler.is_compiling():
            values = self._of_bytes()
            if values is not None:
                return values.index_select(0, observations.to(values.device).flatten().int()).reshape(
                    observations.shape
                )
        exact = (observations.to(self.mean.device, torch.float64) - self.mean) / self.scale
        unit = exact.clamp(-self.clip, self.clip).float()
        if not (torch.isfinite(exact).all() and torch.isfinite(unit).all()):  # a clip would hide an infinity
            raise SortRLError(
                "Observations contain NaN or infinity; no decision can be certified for them. Check the sensor or the environment."
            )
        return unit

    def _of_bytes(self) -> Tensor | None:
        """The units of all bytes, by the same arithmetic; None where coordinates differ in it."""
        mean, scale = self.mean.flatten()[:1], self.scale.flatten()[:1]
        if not (bool((self.mean == mean).all()) and bool((self.scale == scale).all())):
            return None
        exact = (torch.arange(256, dtype=torch.float64, device=mean.device) - mean) / scale
        values = exact.clamp(-self.clip, self.clip).float()
        return values if bool(torch.isfinite(exact).all() and torch.isfinite(values).all()) else None

    def to_raw(self, unit: Tensor) -> Tensor:
        """Unit space -> raw units, float64 (the inverse, ignoring the clip)."""
        return unit.to(torch.float64) * self.scale + self.mean


def as_array(obs: Any, obs_shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """An observation, or a batch of them, as the user's environment gives it -> as a policy of ``obs_shape`` takes it.

    >>> as_array({"goal": [1.0, 2.0], "here": [0.5]}, (3,))
    array([1. , 2. , 0.5])
    >>> as_array(np.zeros((84, 84, 3)), (3, 84, 84)).shape
    (3, 84, 84)
    """
    if isinstance(obs, Mapping):
        parts = [np.asarray(obs[name]) for name in sorted(obs)]
        if sum(part.size for part in parts) == math.prod(obs_shape):
            return np.concatenate([part.ravel() for part in parts])
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    array = np.asarray(obs)
    if len(obs_shape) == 3 and array.ndim in (3, 4) and array.shape[-3:] != obs_shape:
        height_width_channels = (*obs_shape[1:], obs_shape[0])
        if array.shape[-3:] == height_width_channels:
            return np.moveaxis(array, -1, -3)
    return array


def stored_normalizer(
    values: Mapping[str, Any], fields: Mapping[str, Any], prefix: str, where: str | Path
) -> Normalizer:
    """The normaliser that a file describes: mean and scale among its ``values``, the clip (null: none) in ``fields``."""
    try:
        clip = fields["clip"]
        return Normalizer(values[f"{prefix}mean"], values[f"{prefix}scale"], math.inf if clip is None else float(clip))
    # Lists of unequal length, text, numbers that no float holds.
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise SortRLError(f"{where}: its normalisation lacks or garbles a field ({str(error)[:200]}).") from error

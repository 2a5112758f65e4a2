"""SortPolicy: an l_inf Lipschitz network whose output margin is a certificate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.errors import SortRLError
from sortrl.files import read_tensors, write_tensors
from sortrl.nets.layers import AveragePool, Crop, MeanShift, Scale, SortLinear
from sortrl.normalizer import Normalizer
from sortrl.records import Certificate

FORMAT_VERSION = 1
FILE_NAME = "policy.safetensors"
UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True)
class PolicyConfig:
    """The shape of a :class:`SortPolicy`; enough to build it again."""

    obs_shape: tuple[int, ...]
    n_actions: int
    width: int = 640
    """Units per hidden layer."""
    depth: int = 5
    """Sort layers, the output layer among them."""
    rho: float = 0.3
    """Decay of the mix; the first layer always has 0."""
    scale: float = 1.0
    """Factor on unit-space inputs; the certificate is divided by it."""
    crop: tuple[int, ...] = (0, 0, 0, 0)
    """Image borders to remove: top, bottom, left, right."""
    pool: int = 1
    """Average pooling of images."""
    mask_chunk: int = 128
    """Samples that share one random mask in training."""

    def __post_init__(self) -> None:
        if self.n_actions < 2:
            raise SortRLError(
                f"SortPolicy: {self.n_actions} actions, expected at least 2 (with one action there is nothing to certify)."
            )
        for name in ("width", "depth", "mask_chunk", "pool"):
            if getattr(self, name) < 1:
                raise SortRLError(f"SortPolicy: {name} is {getattr(self, name)}, expected at least 1.")
        if not self.obs_shape or min(self.obs_shape) < 1:
            raise SortRLError(f"SortPolicy: obs_shape is {self.obs_shape}, expected one or more positive sizes.")
        if (self.pool > 1 or any(self.crop)) and len(self.obs_shape) != 3:
            raise SortRLError(
                f"SortPolicy: crop and pool need images (channels, height, width), not observations of shape {self.obs_shape}."
            )


class FrontEnd(Protocol):
    """A sequence of Lipschitz front ends that can be called as one."""

    def __call__(self, unit: Tensor) -> Tensor: ...

    def __iter__(self) -> Iterator[Crop | AveragePool | Scale]: ...


class SortPolicy(nn.Module):
    """A policy that plays the arg-max of scores that are ``lipschitz``-Lipschitz in l_inf.

    Two networks share the weights. :meth:`scores` is the evaluation network: exact sort layers and running means; it is
    what acts and what is certified. :meth:`training_scores` is its smooth, randomly masked relative that is trained.

    >>> policy = SortPolicy((4,), 2, width=16, depth=3)
    >>> action, _ = policy.predict(np.zeros(4))
    >>> cert = policy.certify(np.zeros((5, 4)))
    >>> cert.radius.shape, policy.lipschitz <= 1.0
    ((5,), True)
    """

    p: Tensor

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        n_actions: int,
        width: int = 640,
        depth: int = 5,
        rho: float = 0.3,
        *,
        scale: float = 1.0,
        crop: tuple[int, ...] = (0, 0, 0, 0),
        pool: int = 1,
        mask_chunk: int = 128,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.config = PolicyConfig(
            tuple(obs_shape), int(n_actions), width, depth, rho, scale, tuple(crop), pool, mask_chunk
        )
        self.normalizer = Normalizer.identity(self.obs_shape) if normalizer is None else normalizer
        if self.normalizer.obs_shape != self.obs_shape:
            raise SortRLError(
                f"SortPolicy: observations have shape {self.obs_shape}, but the normalizer {self.normalizer.obs_shape}."
            )
        front: list[Crop | AveragePool | Scale] = []
        if any(crop):
            front.append(Crop(*crop))
        if pool > 1:
            front.append(AveragePool(pool))
        if scale != 1.0:
            front.append(Scale(scale))
        self.front = cast("FrontEnd", nn.Sequential(*front))
        with torch.no_grad():
            fan_in = self.front(torch.zeros(1, *self.obs_shape)).numel()
        sizes = [fan_in] + [width] * (depth - 1) + [self.n_actions]
        # Sorting raw inputs gains nothing, so the first layer is a plain maximum.
        layers = [SortLinear(a, b, rho if index else 0.0) for index, (a, b) in enumerate(itertools.pairwise(sizes))]
        # The casts say what the lists hold, which nn.ModuleList cannot.
        self.layers = cast("Sequence[SortLinear]", nn.ModuleList(layers))
        self.shifts = cast("Sequence[MeanShift]", nn.ModuleList(MeanShift(size) for size in sizes[1:-1]))
        self.bias = nn.Parameter(torch.zeros(self.n_actions))
        self.mu = nn.Parameter(torch.ones(()))  # temperature of the cross-entropy; never part of a margin
        self.register_buffer("p", torch.tensor(8.0, dtype=torch.float64))

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return self.config.obs_shape

    @property
    def n_actions(self) -> int:
        return self.config.n_actions

    @property
    def lipschitz(self) -> float:
        """The l_inf constant of :meth:`scores` with respect to unit-space input: the product over the parts."""
        parts: list[SortLinear | MeanShift] = [*self.layers, *self.shifts]
        return self._front_lipschitz * math.prod(part.lipschitz for part in parts)

    @property
    def _front_lipschitz(self) -> float:
        return math.prod(part.lipschitz for part in self.front)

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, where eps, radii and the Lipschitz constant live."""
        unit: Tensor = self.normalizer(obs)
        return unit

    def scores(self, unit: Tensor) -> Tensor:
        """Scores (batch, n_actions) of the evaluation network; differentiable."""
        return self._through(unit, lambda layer, x: layer(x))

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        """The evaluation network with l_p norms for sort layers: smoother gradients for attacks. Not certified."""
        return self._through(unit, lambda layer, x: layer.smooth(x, p))

    def _through(self, unit: Tensor, apply: Callable[[SortLinear, Tensor], Tensor]) -> Tensor:
        x = self.front(unit).flatten(1)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            x = shift(apply(layer, x))
        return -(apply(self.layers[-1], x) + self.bias)

    def training_scores(self, unit: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scores of the training network: l_p norms with the current ``p``, random masks, batch means.

        A layer's input mask is drawn before the layer below runs, so that dropped outputs are never computed.
        """
        x: Tensor = self.front(unit).flatten(1)
        p, keep = float(self.p), None
        for index, layer in enumerate(self.layers[:-1]):
            next_keep = self._draw_mask(len(x), self.layers[index + 1], generator)
            x = self.shifts[index].centre(layer.smooth(x, p, keep, next_keep), next_keep)
            keep = next_keep
        return -(self.layers[-1].smooth(x, p, keep) + self.bias)

    def exact_training_scores(self, unit: Tensor) -> Tensor:
        """Scores of the evaluation network, but with batch means: for the last steps of a training."""
        x: Tensor = self.front(unit).flatten(1)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            x = shift.centre(layer(x), None)
        scores: Tensor = -(self.layers[-1](x) + self.bias)
        return scores

    def _draw_mask(self, batch: int, layer: SortLinear, generator: torch.Generator | None) -> Tensor | None:
        """Bernoulli(1 - rho) per input of ``layer`` and chunk of the batch; at least one input is always kept."""
        rho, fan_in = layer.rho, layer.weight.shape[1]
        if rho == 0.0:
            return None
        chunks = max(1, batch // self.config.mask_chunk)
        draws = torch.rand(chunks, fan_in, generator=generator).to(self.bias.device)
        keep = draws >= rho
        return keep | (draws == draws.amax(1, keepdim=True))  # keeping the largest draw changes only empty masks

    @torch.no_grad()
    def calibrate(self, unit: Tensor, limit: int = 16384) -> None:
        """Re-estimate the running means with the evaluation network on (up to ``limit``) unit-space states.

        Training means come from the smooth, masked network; call this before the policy is evaluated or saved.
        """
        if len(unit) == 0:
            raise SortRLError("calibrate: no states; pass at least one observation.")
        step = -(-len(unit) // limit)
        x = self.front(unit[::step]).flatten(1)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            y = torch.cat([layer(part) for part in torch.split(x, 1024)])
            shift.running_mean.copy_(y.double().mean(0))
            x = shift(y)

    @torch.no_grad()
    def certify(self, obs: npt.ArrayLike | Tensor) -> Certificate:
        """Certificates for raw observations (batch, *obs_shape), radii in unit space."""
        return self.certify_unit(self.normalize(obs))

    @torch.no_grad()
    def certify_unit(self, unit: Tensor) -> Certificate:
        """Certificates for unit-space inputs: (margin - rounding) / (2 L), 0 for a tie.

        Both evaluations, of the state and of its perturbed twin, are rounded; see :meth:`_rounding_error`.
        """
        x = self.front(unit).flatten(1)
        magnitude = unit.flatten(1).abs().amax(1) * max(1.0, self._front_lipschitz)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            y = layer(x)
            x = shift(y)
            magnitude = torch.maximum(magnitude, torch.maximum(y.amax(1), x.abs().amax(1)))
        y = self.layers[-1](x)
        scores = -(y + self.bias)
        magnitude = torch.maximum(magnitude, torch.maximum(y.amax(1), scores.abs().amax(1)))
        best = scores.topk(2, dim=1)
        margin = (best.values[:, 0].double() - best.values[:, 1].double()).clamp(min=0.0)
        lipschitz = self.lipschitz
        grown = magnitude.double() + margin / 2 * max(1.0, 1.0 / lipschitz)  # at most, for an input within the radius
        slack = self._rounding_error(magnitude.double()) + self._rounding_error(grown)
        radius = ((margin - 2 * slack) / (2 * lipschitz)).clamp(min=0.0)
        return Certificate(best.indices[:, 0].numpy(), radius.numpy(), best.indices[:, 1].numpy())

    def _rounding_error(self, magnitude: Tensor) -> Tensor:
        """A bound on the error of each float32 score when inputs (scaled) and activations are at most ``magnitude``.

        Per layer: one subtraction, K products and K sums on distances of at most magnitude / mix_0, and one shift,
        each with relative error u; layers do not amplify what comes in. The factor 2 covers second-order terms.
        """
        operations = 1.0 + sum(part.roundings for part in self.front)
        for layer in self.layers:
            operations += (2 * len(layer.mix) + 1) / float(layer.mix[0]) + 1
        return 2 * UNIT_ROUNDOFF * operations * magnitude

    @torch.no_grad()
    def predict(
        self,
        observation: npt.ArrayLike,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.int64], Any]:
        """Actions for raw observations, one or a batch, with Stable-Baselines3's signature (always deterministic)."""
        obs = np.asarray(observation)
        single = obs.shape == self.obs_shape
        actions = self.scores(self.normalize(obs[None] if single else obs)).argmax(1).numpy()
        return (actions[0] if single else actions), state

    def save(self, path: str | Path) -> None:
        """Write ``policy.safetensors`` into the directory ``path``: weights and, as metadata, the configuration."""
        clip = self.normalizer.clip
        metadata = {"format": FORMAT_VERSION, "config": asdict(self.config), "clip": None if math.isinf(clip) else clip}
        write_tensors(Path(path) / FILE_NAME, self.state_dict(), metadata)

    @classmethod
    def load(cls, path: str | Path) -> SortPolicy:
        """Read what :meth:`save` wrote, from the directory or the file itself."""
        file = Path(path)
        file = file / FILE_NAME if file.is_dir() else file
        tensors, metadata = read_tensors(file)
        if metadata.get("format") != FORMAT_VERSION:
            raise SortRLError(
                f"{file}: format {metadata.get('format')!r}, this version reads {FORMAT_VERSION}. Update sortrl."
            )
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in metadata["config"].items()}
            config = PolicyConfig(**fields)
            clip = metadata["clip"]
            normalizer = Normalizer(
                tensors["normalizer.mean"], tensors["normalizer.scale"], math.inf if clip is None else clip
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SortRLError(
                f"{file}: incomplete or foreign metadata ({error}). It is not a sortrl policy."
            ) from error
        policy = cls.from_config(config, normalizer)
        try:
            policy.load_state_dict(tensors)
        except RuntimeError as error:
            raise SortRLError(f"{file}: weights do not fit the configuration. {error}") from error
        if not all(torch.isfinite(t).all() for t in policy.state_dict().values() if t.ndim):
            raise SortRLError(f"{file}: weights contain NaN or infinity.")
        policy.eval().requires_grad_(False)
        return policy

    @classmethod
    def from_config(cls, config: PolicyConfig, normalizer: Normalizer | None = None) -> SortPolicy:
        return cls(normalizer=normalizer, **vars(replace(config)))

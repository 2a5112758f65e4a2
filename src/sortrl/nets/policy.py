"""SortPolicy: an l_inf Lipschitz network whose output margin is a certificate."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.errors import SortRLError
from sortrl.files import read_tensors, write_tensors
from sortrl.nets.bounds import ErrorBound, FrontEnd, decide_one, error_bound, margin_radius, traced_scores
from sortrl.nets.layers import AveragePool, Crop, MeanShift, Scale, SortConv, SortLinear
from sortrl.normalizer import Normalizer
from sortrl.records import Certificate, Decision

FORMAT_VERSION = 1
FILE_NAME = "policy.safetensors"


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
    conv: tuple[tuple[int, int, int], ...] = ()
    """Sort layers over the patches of an image, before those that see all of it: (channels, kernel, stride) each."""

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
        if (self.pool > 1 or any(self.crop) or self.conv) and len(self.obs_shape) != 3:
            raise SortRLError(
                f"SortPolicy: crop, pool and conv need images (channels, height, width), not observations of shape {self.obs_shape}."
            )
        if any(len(layer) != 3 for layer in self.conv):
            raise SortRLError(f"SortPolicy: conv is {self.conv}, expected (channels, kernel, stride) for each layer.")


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
        conv: tuple[tuple[int, int, int], ...] = (),
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.config = PolicyConfig(
            tuple(obs_shape), int(n_actions), width, depth, rho, scale, tuple(crop), pool, mask_chunk, tuple(conv)
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
            seen = tuple(self.front(torch.zeros(1, *self.obs_shape)).shape[1:])
        layers: list[SortLinear] = []
        for channels, kernel, stride in self.config.conv:
            patches = SortConv((seen[0], seen[1], seen[2]), channels, kernel, stride)
            layers.append(patches)
            seen = patches.out_shape
        sizes = [math.prod(seen)] + [width] * (depth - 1) + [self.n_actions]
        # Sorting raw inputs gains nothing, so the first layer is a plain maximum.
        layers += [
            SortLinear(a, b, rho if layers or index else 0.0) for index, (a, b) in enumerate(itertools.pairwise(sizes))
        ]
        # The casts say what the lists hold, which nn.ModuleList cannot.
        self.layers = cast("Sequence[SortLinear]", nn.ModuleList(layers))
        self.shifts = cast("Sequence[MeanShift]", nn.ModuleList(MeanShift(layer.out_size) for layer in layers[:-1]))
        self.bias = nn.Parameter(torch.zeros(self.n_actions))
        self.mu = nn.Parameter(torch.ones(()))  # temperature of the cross-entropy; never part of a margin
        self.register_buffer("p", torch.tensor(8.0, dtype=torch.float64))
        self._bound: tuple[list[tuple[int, int]], ErrorBound, list[Tensor]] | None = None

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

        No float32 input within the radius, its border included, changes the arg-max of the scores as they are computed:
        every rounding, of the state and of its perturbed twin, is accounted for (docs/certificates.md).
        """
        if tuple(unit.shape[1:]) != self.obs_shape or unit.ndim == 0 or not bool(torch.isfinite(unit).all()):
            raise SortRLError(
                f"certify: inputs of shape {tuple(unit.shape)}, expected (batch, {', '.join(map(str, self.obs_shape))}) "
                "without NaN or infinity; no decision can be certified for anything else."
            )
        return Certificate(*self._decide(unit))

    def _decide(self, unit: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Action, radius and runner-up of finite inputs; of equal scores the first action comes first."""
        scores, magnitudes = traced_scores(self, unit)
        falling = -scores.cpu().numpy().astype(np.float64)
        order = falling.argsort(1, kind="stable")
        falling.sort(1)
        if not math.isfinite(falling.sum()):
            raise _overflow(unit)
        margin = falling[:, 1] - falling[:, 0]
        return order[:, 0], margin_radius(self.error_bound(), magnitudes.cpu().numpy(), margin), order[:, 1]

    def error_bound(self) -> ErrorBound:
        """Lipschitz constant and rounding errors: what certificates need of the fixed parts of the network.

        Found anew when a part or a tensor behind it was replaced or written to: a stale bound would be an unsound one.
        """
        tensors = [tensor for part in (*self.front, *self.layers) for tensor in part._buffers.values()]
        state = [(id(tensor), -1 if tensor.is_inference() else tensor._version) for tensor in tensors]
        if self._bound is None or self._bound[0] != state:
            self._bound = state, error_bound(self), tensors  # kept, so that no other tensor gets their addresses
        return self._bound[1]

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

    @torch.no_grad()
    def predict_certified(self, observation: npt.ArrayLike) -> Decision:
        """Actions for raw observations, one or a batch, each with its certificate: the cost of one :meth:`predict`.

        >>> decision = SortPolicy((4,), 2, width=16, depth=3).predict_certified(np.zeros(4))
        >>> float(decision.radius) >= 0, int(decision.action) + int(decision.runner_up)
        (True, 1)
        """
        obs = np.asarray(observation)
        if obs.shape == self.obs_shape:
            unit = self.normalize(obs[None])
            action, radius, runner_up, margin = decide_one(self, self.error_bound(), unit)
            if not math.isfinite(margin):
                raise _overflow(unit)
            return Decision(np.int64(action), np.float64(radius), np.int64(runner_up))
        return Decision(*self._decide(self.normalize(obs)))

    def as_classifier(self) -> nn.Module:
        """A frozen copy as a plain module, unit-space inputs (batch, *obs_shape) to scores, for libraries of attacks.

        For example ``foolbox.PyTorchModel(policy.as_classifier(), bounds=(lo, hi))``, or ``PyTorchClassifier`` of the
        Adversarial Robustness Toolbox. A copy: such libraries differentiate parameters and set training mode.

        >>> SortPolicy((4,), 2, width=16, depth=3).as_classifier()(torch.zeros(5, 4)).shape
        torch.Size([5, 2])
        """
        return _Classifier(copy.deepcopy(self)).eval().requires_grad_(False)

    def export_onnx(self, path: str | Path) -> None:
        """Write the evaluation network as ONNX: raw observation in; action, scores and certified radius out.

        See :func:`sortrl.nets.export.export_onnx`.
        """
        from sortrl.nets.export import export_onnx  # it knows this class, and few users need it

        export_onnx(self, path)

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
            config = PolicyConfig(**{name: _tuples(value) for name, value in metadata["config"].items()})
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


class _Classifier(nn.Module):
    """The evaluation network of a policy behind ``forward``."""

    def __init__(self, policy: SortPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, unit: Tensor) -> Tensor:
        return self.policy.scores(unit)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _overflow(unit: Tensor) -> SortRLError:
    return SortRLError(f"certify: scores overflow for inputs of up to {float(unit.abs().max()):.3g}; scale them.")

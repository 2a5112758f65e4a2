"""SortPolicy: an l_inf Lipschitz network whose output margin is a certificate."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl import ops
from sortrl.core import parallel
from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.normalizer import Normalizer, as_array
from sortrl.core.records import Decision
from sortrl.nets.base import CertifiedPolicy, Decided, ranked
from sortrl.nets.float_bounds import (
    RADIUS_DOWN,
    ROWS_AT_ONCE,
    ErrorBound,
    FrontEnd,
    FrontPart,
    box_around,
    error_bound,
    margin_radius,
    proven,
    score_bounds,
    stages,
    traced_scores,
)
from sortrl.nets.front import AveragePool, BoundedConv, Centre, Crop, Pixels, Ramp, Scale
from sortrl.nets.frozen import Copies, EvaluationNetwork, require_single
from sortrl.nets.layers import MeanShift, SortConv, SortLinear
from sortrl.nets.packed import packed, without_place
from sortrl.ops import cpu
from sortrl.ops.backend import backend_for

REACH = 1.0  # behind ramps, radii are not sought beyond this; pixels are between 0 and 1
BISECTIONS = 10
JUST_ABOVE = 1.0 + 1e-6  # times eps: what is proven there is also above eps in float32
WORTH_CUTTING = 512  # inputs of a first layer for which it pays to ask which of them count
Module = TypeVar("Module", bound=nn.Module)


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
    bounded_conv: tuple[tuple[int, int, int], ...] = ()
    """Convolutions with bounded weights, before all sort layers: (channels, kernel, stride) each."""
    pixels: tuple[int, ...] = ()
    """What the network sees of the observation as crop and pool leave it: places in it, flattened. None given: all of it."""
    ramp_width: float = 0.0
    """Width of the ramps through which that is seen, each around a centre of its own (:class:`sortrl.nets.front.Ramp`); a place
    may then be seen several times. 0: no ramps."""
    ramp_limit: float = 1.0
    """Where they end."""

    def __post_init__(self) -> None:
        if self.n_actions < 2:
            raise SortRLError(
                f"SortPolicy: {self.n_actions} actions, expected at least 2 (with one action there is nothing to certify)."
            )
        for name in ("width", "depth", "mask_chunk", "pool"):
            if getattr(self, name) < 1:
                raise SortRLError(f"SortPolicy: {name} is {getattr(self, name)}, expected at least 1.")
        whole = (self.n_actions, self.width, self.depth, self.mask_chunk, self.pool, *self.obs_shape, *self.crop)
        whole += tuple(itertools.chain.from_iterable(self.conv + self.bounded_conv))
        if not all(isinstance(size, int) for size in whole) or len(self.crop) != 4 or min(self.crop) < 0:
            raise SortRLError(f"SortPolicy: every size must be a whole number, and crop four of them, got {self}.")
        if not self.obs_shape or min(self.obs_shape) < 1:
            raise SortRLError(f"SortPolicy: obs_shape is {self.obs_shape}, expected one or more positive sizes.")
        if (self.pool > 1 or any(self.crop) or self.conv or self.bounded_conv) and len(self.obs_shape) != 3:
            raise SortRLError(
                f"SortPolicy: crop, pool and conv need images (channels, height, width), not observations of shape {self.obs_shape}."
            )
        if self.pixels and (self.conv or self.bounded_conv):
            raise SortRLError("SortPolicy: pixels leave no image, so conv and bounded_conv cannot follow. Choose one.")
        if self.ramp_width and (self.conv or self.bounded_conv or self.scale != 1.0):
            raise SortRLError(
                "SortPolicy: behind ramps, which leave no image, there are neither conv, bounded_conv nor scale."
            )
        for name in ("conv", "bounded_conv"):
            if any(len(layer) != 3 for layer in getattr(self, name)):
                raise SortRLError(
                    f"SortPolicy: {name} is {getattr(self, name)}, expected (channels, kernel, stride) for each layer."
                )


class SortEvaluation(EvaluationNetwork):
    """The sort layers of a policy as they are evaluated: a :class:`sortrl.nets.float_bounds.Network` of private tensors."""

    def __init__(self, policy: SortPolicy, copies: Copies) -> None:
        copies.watch(policy)
        self._copies = copies
        self.front: tuple[FrontPart, ...] = tuple(copies(cast("nn.Sequential", policy.front)))  # type: ignore[arg-type]
        self.layers: tuple[SortLinear, ...] = tuple(copies(cast("nn.ModuleList", policy.layers)))  # type: ignore[arg-type]
        self.shifts: tuple[MeanShift, ...] = tuple(copies(cast("nn.ModuleList", policy.shifts)))  # type: ignore[arg-type]
        self.bias = copies.tensor(policy, "bias")
        self._normalizer = policy.normalizer  # not a copy: units are not part of the network

    @cached_property
    def _packed(self) -> Any:
        """The network for single observations, in one call of the kernels; None where there is none."""
        kernels, units = cpu.select().module, self._normalizer
        single = self._copies.types() == {torch.float32} and units.mean.dtype == torch.float64
        if kernels is None or not single or without_place(self) is not None:
            return None
        return kernels.PackedPolicy(packed(self, self.bound, units))

    def decide_one(self, observation: npt.NDArray[Any]) -> tuple[int, float, int] | None:
        """Action, radius (that of the margin) and runner-up for a raw observation, to the bit those of :meth:`decide`.

        None where the kernels cannot serve, also where the observation is wrong: what to say is known elsewhere.
        """
        if backend_for(self.bias)[0] != "cpu" or self._packed is None:
            return None
        units = self._normalizer
        decided: tuple[int, float, int] | None = self._packed.decide(
            observation, units.mean, units.scale, units.clip, torch.get_num_threads()
        )
        return decided

    @cached_property
    def bound(self) -> ErrorBound:
        require_single(self._copies)
        return error_bound(self)

    @cached_property
    def lipschitz(self) -> float:
        """The product over the parts."""
        return math.prod(stage.lipschitz for stage in stages(self))

    def scores(self, unit: Tensor) -> Tensor:
        x = unit
        for part in self.front:
            x = part(x)
        return self._through(x, lambda layer, x: layer(x))

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        x = unit
        for part in self.front:
            x = part.surrogate(x) if isinstance(part, Ramp) else part(x)
        return self._through(x, lambda layer, x: layer.smooth(x, p))

    def _through(self, x: Tensor, apply: Callable[[SortLinear, Tensor], Tensor]) -> Tensor:
        x = x.flatten(1)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            x = shift(apply(layer, x))
        return -(apply(self.layers[-1], x) + self.bias)

    def traced(self, unit: Tensor) -> tuple[Tensor, Tensor]:
        """The scores, and the largest number of every stage, per state."""
        return traced_scores(self, unit, self.bound.front)

    def decide(self, unit: Tensor) -> Decided:
        """The radius is (margin - rounding) / (2 L); behind ramps, what boxes prove beyond that."""
        action, radius, runner_up = self._decide_by_margin(unit)
        if self.has_ramps:
            radius = self._box_radius(unit, torch.from_numpy(action), torch.from_numpy(radius)).numpy()
        return action, radius, runner_up

    def decide_at(self, unit: Tensor, eps: Tensor) -> Decided:
        """Behind ramps one box does: a tenth of the time."""
        action, radius, runner_up = self._decide_by_margin(unit)
        if self.has_ramps and (left := np.flatnonzero(radius <= eps.numpy())).size:
            beyond = JUST_ABOVE * eps[left]
            holding = self._proven_within(unit[left], beyond, torch.from_numpy(action[left])).numpy()
            radius[left[holding]] = beyond.numpy()[holding]
        return action, radius, runner_up

    def _decide_by_margin(self, unit: Tensor) -> Decided:
        scores, magnitudes = self.traced(unit)
        action, runner_up, margin = ranked(scores, unit)
        return action, margin_radius(self.bound, magnitudes.cpu().numpy(), margin), runner_up

    @cached_property
    def has_ramps(self) -> bool:
        return any(isinstance(part, Ramp) for part in self.front)

    def _box_radius(self, unit: Tensor, action: Tensor, least: Tensor) -> Tensor:
        """The largest radius (batch,) for which intervals prove the action, by bisection; what is returned was proven.

        A ramp is monotone, so the corners of a box of inputs give the exact box of what ramps make of it, each feature with a
        movement of its own: none where a ramp stays saturated. The margin only knows the fastest movement of all.
        """
        good, bad = least.clamp(max=REACH), torch.full_like(least, REACH)
        for _ in range(BISECTIONS):
            # Geometric while the bracket is wide, because radii differ by orders of magnitude.
            middle = torch.where(bad > 4 * good, torch.sqrt(bad * good.clamp(min=1e-4)), (good + bad) / 2)
            holding = self._proven_within(unit, middle, action)
            good, bad = torch.where(holding, middle, good), torch.where(holding, bad, middle)
        return torch.maximum(good, least)

    def _proven_within(self, unit: Tensor, radius: Tensor, action: Tensor) -> Tensor:
        """Whether (batch,) intervals prove the action within that radius (batch,), float64."""
        # The box is one of a radius that is larger by more than what float64 loses when distances are measured in it.
        eps = (radius / RADIUS_DOWN).reshape(-1, *(1 for _ in unit.shape[1:]))
        parts = zip(*(torch.split(x, ROWS_AT_ONCE) for x in (unit, eps, action)), strict=True)
        return torch.cat([self.proven(*box_around(x, e, None, None), a) for x, e, a in parts])

    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        """Score differences move by at most 2 L eps plus rounding: an action further behind than that cannot be forced."""
        scores, magnitudes = self.traced(unit)
        values = scores.numpy().astype(np.float64)
        behind = values.max(1, keepdims=True) - values
        possible: npt.NDArray[np.bool_] = margin_radius(self.bound, magnitudes.numpy()[:, None], behind) <= eps_unit
        if self.has_ramps:
            boxes = [box_around(rows, eps_unit / RADIUS_DOWN, None, None) for rows in torch.split(unit, ROWS_AT_ONCE)]
            ranges = [score_bounds(self, lo, hi, self.bound) for lo, hi in boxes]
            possible &= torch.cat([high >= low.amax(1, keepdim=True) for low, high in ranges]).numpy()
        return possible

    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        return proven(self, lo, hi, action, self.bound)

    def near(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, SortEvaluation] | None:
        """The network for inputs between ``lo`` and ``hi`` alone: which numbers of an input it needs, and the rest of it.

        Of a wide image few pixels can be the maximum of a unit of the first layer while it moves a little; without the others
        scores and gradients are the same to the bit. None where that does not pay: the first layer is narrow, sees patches or
        sorts, a front end computes with several numbers at once, or most of them count.
        """
        first, front = self.layers[0], self.front
        wide = first.weight.shape[1] >= WORTH_CUTTING and type(first) is SortLinear and len(first.mix) == 1
        if not wide or any(isinstance(part, (AveragePool, BoundedConv)) for part in front):
            return None
        places = torch.arange(lo[0].numel()).reshape(1, *lo.shape[1:])
        for part in front:
            lo, hi = part(lo), part(hi)
            places = part(places) if isinstance(part, (Crop, Pixels)) else places
        kept = ops.max_reach(lo.flatten(1), hi.flatten(1), first.weight).nonzero().flatten()
        if 2 * len(kept) > first.weight.shape[1]:
            return None
        columns, picked = torch.unique(places.flatten()[kept], return_inverse=True)
        cut = copy.copy(self)
        cut.layers = (_twin(first, weight=first.weight[:, kept]), *self.layers[1:])
        cut.front = (
            _twin(Pixels((0,), 1), indices=picked),
            *(_cut(part, kept, tuple(lo.shape[1:])) for part in front if not isinstance(part, (Crop, Pixels))),
        )
        return columns, cut


def _cut(part: FrontPart, kept: Tensor, shape: tuple[int, ...]) -> FrontPart:
    """A front end that computes number by number, for some of them."""
    if isinstance(part, Centre):
        return _twin(part, centres=part.centres[kept])
    if isinstance(part, Scale):
        return _twin(part, factor=part.factor.expand(shape).flatten()[kept])
    return part


def _twin(module: Module, **tensors: Tensor) -> Module:
    """The same module with other tensors."""
    twin = copy.copy(module)
    twin.__dict__.update({name: tensor.contiguous() for name, tensor in tensors.items()})
    return twin


class SortPolicy(CertifiedPolicy):
    """A policy that plays the arg-max of scores that are ``lipschitz``-Lipschitz in l_inf.

    Two networks share the weights. :meth:`scores` is the evaluation network: exact sort layers and running means; it is
    what acts and what is certified. :meth:`training_scores` is its smooth, randomly masked relative that is trained.

    >>> policy = SortPolicy((4,), 2, width=16, depth=3)
    >>> action, _ = policy.predict(np.zeros(4))
    >>> cert = policy.certify(np.zeros((5, 4)))
    >>> cert.radius.shape, policy.lipschitz <= 1.0
    ((5,), True)
    """

    kind = "sort"
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
        bounded_conv: tuple[tuple[int, int, int], ...] = (),
        pixels: tuple[int, ...] = (),
        ramp_width: float = 0.0,
        ramp_limit: float = 1.0,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.config = PolicyConfig(
            tuple(obs_shape),
            int(n_actions),
            width,
            depth,
            rho,
            scale,
            tuple(crop),
            pool,
            mask_chunk,
            tuple(conv),
            tuple(bounded_conv),
            tuple(pixels),
            ramp_width,
            ramp_limit,
        )
        self.normalizer = Normalizer.identity(self.obs_shape) if normalizer is None else normalizer
        if self.normalizer.obs_shape != self.obs_shape:
            raise SortRLError(
                f"SortPolicy: observations have shape {self.obs_shape}, but the normalizer {self.normalizer.obs_shape}."
            )
        front: list[FrontPart] = []
        if any(crop):
            front.append(Crop(*crop))
        if pool > 1:
            front.append(AveragePool(pool))
        with torch.no_grad():
            seen = tuple(nn.Sequential(*front)(torch.zeros(1, *self.obs_shape)).shape[1:])
        if self.config.pixels:
            front.append(Pixels(self.config.pixels, math.prod(seen), doubles=ramp_width != 0.0))
            seen = (len(self.config.pixels),)
        if ramp_width != 0.0:
            if not self.config.pixels:
                front.append(Pixels(range(math.prod(seen)), math.prod(seen)))
                seen = (math.prod(seen),)
            front += [Centre(seen[0]), Ramp(ramp_width, ramp_limit)]
        for channels, kernel, stride in self.config.bounded_conv:
            bounded = BoundedConv((seen[0], seen[1], seen[2]), channels, kernel, stride)
            front.append(bounded)
            seen = bounded.out_shape
        if scale != 1.0:
            front.append(Scale(scale))
        self.front = cast("FrontEnd", nn.Sequential(*front))
        layers: list[SortLinear] = []
        for channels, kernel, stride in self.config.conv:
            patches = SortConv((seen[0], seen[1], seen[2]), channels, kernel, stride)
            layers.append(patches)
            seen = patches.out_shape
        sizes = [math.prod(seen)] + [width] * (depth - 1) + [self.n_actions]
        parameters = sum(a * b for a, b in itertools.pairwise(sizes))
        require(
            f"A policy with {parameters} parameters", 4 * parameters, "lower width or depth, or crop or pool the images"
        )
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

    @property
    def trunk(self) -> SortPolicy:
        """The sort layers, which here are everything."""
        return self

    def training_scores(self, unit: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scores of the training network: l_p norms with the current ``p``, random masks, batch means.

        A layer's input mask is drawn before the layer below runs, so that dropped outputs are never computed.
        """
        x = self._trained_front(unit)
        p, keep = float(self.p), None
        for index, layer in enumerate(self.layers[:-1]):
            next_keep = self._draw_mask(len(x), self.layers[index + 1], generator)
            x = self.shifts[index].centre(layer.smooth(x, p, keep, next_keep), next_keep)
            keep = next_keep
        return -(self.layers[-1].smooth(x, p, keep) + self.bias)

    def exact_training_scores(self, unit: Tensor) -> Tensor:
        """Scores of the evaluation network, but with batch means: for the last steps of a training."""
        x = self._trained_front(unit)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            x = shift.centre(layer(x), None)
        scores: Tensor = -(self.layers[-1](x) + self.bias)
        return scores

    def settled_training_scores(self, unit: Tensor) -> Tensor:
        """Scores of the evaluation network with its running means as they are: what is computed for a state then depends on no other
        state of the batch, which numbers that are to be met exactly need. Call :meth:`calibrate` before, and not after."""
        x = self._trained_front(unit)
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            x = layer(x) - shift.running_mean
        scores: Tensor = -(self.layers[-1](x) + self.bias)
        return scores

    def _trained_front(self, unit: Tensor) -> Tensor:
        """The front ends, with the weights of convolutions divided by their sums on the way."""
        x = unit
        for part in self.front:
            x = part.trained(x) if isinstance(part, BoundedConv) else part(x)
        return x.flatten(1)

    def _draw_mask(self, batch: int, layer: SortLinear, generator: torch.Generator | None) -> Tensor | None:
        """Bernoulli(1 - rho) per input of ``layer`` and chunk of the batch; at least one input is always kept."""
        rho, fan_in = layer.rho, layer.weight.shape[1]
        if rho == 0.0:
            return None
        draws = torch.rand(self.mask_chunks(parallel.whole(batch)), fan_in, generator=generator).to(self.bias.device)
        keep = draws >= rho
        return keep | (draws == draws.amax(1, keepdim=True))  # keeping the largest draw changes only empty masks

    def mask_chunks(self, batch: int) -> int:
        """Into how many equal parts, each with masks of its own, a batch is divided in training."""
        return max(1, batch // int(self.config.mask_chunk))

    def explain(self) -> dict[str, str]:
        if any(isinstance(part, Ramp) for part in self.front):
            return {
                "network": f"SortNet, {self.config.depth} layers of {self.config.width} on pixels seen through ramps",
                "proof": "Intervals bound what the ramps and the sort layers behind them make of every observation within "
                "the radius.",
            }
        return {
            "network": f"SortNet, {self.config.depth} layers of {self.config.width}",
            "proof": "The radius is half the gap between the best score and the next, divided by the network's l∞ Lipschitz "
            f"constant ({self.lipschitz:.6g}).",
        }

    @torch.no_grad()
    def calibrate(self, unit: Tensor, limit: int = 16384) -> None:
        """Settle convolutions, and estimate the running means anew with the evaluation network on (up to ``limit``) states.

        Training means come from the smooth, masked network; call this before the policy is evaluated or saved.
        """
        if len(unit) == 0:
            raise SortRLError("calibrate: no states; pass at least one observation.")
        for part in self.front:
            if isinstance(part, BoundedConv):
                part.settle()
        step = -(-len(unit) // limit)
        x = torch.cat([self.front(part).flatten(1) for part in torch.split(unit[::step], 1024)])
        for layer, shift in zip(self.layers, self.shifts, strict=False):
            y = torch.cat([layer(part) for part in torch.split(x, 1024)])
            shift.running_mean.copy_(y.double().mean(0))
            x = shift(y)

    def _network(self, copies: Copies) -> EvaluationNetwork:
        return SortEvaluation(self, copies)

    def error_bound(self) -> ErrorBound:
        """Lipschitz constant and rounding errors: what certificates need of the fixed parts of the network."""
        return self.sort_evaluation(thorough=True).bound

    def sort_evaluation(self, thorough: bool = False) -> SortEvaluation:
        """:meth:`evaluation`, whose kind is known."""
        network = self.evaluation(thorough)
        assert isinstance(network, SortEvaluation)
        return network

    @torch.no_grad()
    def near(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, SortEvaluation] | None:
        """Places in a flattened unit-space input, and a network of scores for these places alone that agrees with
        :meth:`scores` to the bit for all inputs of the boxes [lo, hi]; None where nothing would be saved."""
        return self.sort_evaluation().near(lo, hi)

    @torch.no_grad()
    def predict(
        self,
        observation: npt.ArrayLike,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.int64], Any]:
        """Actions for raw observations, one or a batch, with Stable-Baselines3's signature (always deterministic)."""
        obs = as_array(observation, self.obs_shape)
        decided = self.sort_evaluation().decide_one(obs) if obs.shape == self.obs_shape else None
        if decided is None:
            return super().predict(obs, state, episode_start, deterministic)
        return np.int64(decided[0]), state  # type: ignore[return-value]  # as an array of actions gives it

    @torch.no_grad()
    def predict_certified(self, observation: npt.ArrayLike) -> Decision:
        """Actions for raw observations, one or a batch, each with its certificate: the cost of one :meth:`predict`.

        Behind ramps the boxes that prove the radius cost some ten times as much.
        """
        obs = as_array(observation, self.obs_shape)
        network = self.sort_evaluation()
        decided = network.decide_one(obs) if obs.shape == self.obs_shape and not network.has_ramps else None
        if decided is None:
            return super().predict_certified(obs)
        action, radius, runner_up = decided
        return Decision(np.int64(action), np.float64(radius), np.int64(runner_up))

    def export_onnx(self, path: str | Path) -> None:
        """Write the evaluation network as ONNX: raw observation in; action, scores and certified radius out.

        See :func:`sortrl.nets.onnx.export_onnx`.
        """
        from sortrl.nets.onnx import export_onnx  # it knows this class, and few users need it

        export_onnx(self, path)

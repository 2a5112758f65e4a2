"""ContinuousPolicy: a SortNet that answers with numbers, which provably move by at most L times as far as the observation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.normalizer import Normalizer, as_array
from sortrl.core.records import ActionBounds
from sortrl.nets.base import load_policy, save_policy
from sortrl.nets.float_bounds import UNIT_ROUNDOFF, ErrorBound
from sortrl.nets.sort import SortPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

# The bounds are computed in float64, from a few dozen positive numbers.
UP = 1.0 + 1e-9
# An answer is put together from two scores by four float64 operations: 16 times what they can lose, at both of two states.
TOGETHER = 2.0**-46


@dataclass(frozen=True)
class ContinuousConfig:
    """The shape of a :class:`ContinuousPolicy`; enough to build it again."""

    obs_shape: tuple[int, ...]
    low: tuple[float, ...]
    """Least value of each number of an action, in the action's own units."""
    high: tuple[float, ...]
    slope: tuple[float, ...]
    """What one unit of score is worth in each number of the action: the Lipschitz constant is this one, times that of the scores."""
    width: int = 128
    """Units per hidden layer."""
    depth: int = 5
    """Sort layers, the output layer among them."""
    rho: float = 0.0
    """Decay of the sorted mix; the first layer always has 0."""

    def __post_init__(self) -> None:
        numbers = (self.low, self.high, self.slope)
        if not self.low or len({len(part) for part in numbers}) > 1:
            raise SortRLError(
                f"ContinuousPolicy: low, high and slope have {', '.join(str(len(part)) for part in numbers)} numbers, expected "
                "equally many, at least one."
            )
        if len(self.obs_shape) != 1:
            raise SortRLError(f"ContinuousPolicy: obs_shape is {self.obs_shape}, expected a vector, such as (3,).")
        finite = all(isinstance(n, (int, float)) and math.isfinite(n) for part in numbers for n in part)
        if not finite or not all(a < b for a, b in zip(self.low, self.high, strict=True)) or min(self.slope) <= 0:
            raise SortRLError(
                f"ContinuousPolicy: actions between {self.low} and {self.high} with slopes {self.slope}; expected finite numbers, "
                "each low below its high, and positive slopes."
            )


class ContinuousPolicy(nn.Module):
    """A policy for continuous actions: each number of an action is half the difference between two scores, times a slope.

    A sort network of two scores per number is ``L``-Lipschitz in l_inf, so that half their difference is, too. Within eps of an
    observation (l_inf, unit space) number k therefore moves by at most ``slope[k] * L * eps``, plus what float32 rounds.
    Clipping to the action's range makes that no more.

    >>> policy = ContinuousPolicy((3,), low=(-2.0,), high=(2.0,), slope=(4.0,), width=16, depth=3)
    >>> action, _ = policy.predict(np.zeros(3))
    >>> bounds = policy.certify(np.zeros((5, 3)), eps=0.1)
    >>> action.shape, bounds.action.shape, bool((bounds.moves <= 4.0 * 0.1 + 1e-4).all())
    ((1,), (5, 1), True)
    """

    kind = "continuous"

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        low: tuple[float, ...],
        high: tuple[float, ...],
        slope: tuple[float, ...],
        width: int = 128,
        depth: int = 5,
        rho: float = 0.0,
        *,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        numbers = [tuple(map(float, part)) for part in (low, high, slope)]
        self.config = ContinuousConfig(tuple(obs_shape), numbers[0], numbers[1], numbers[2], width, depth, rho)
        self.trunk = SortPolicy(obs_shape, 2 * len(self.config.low), width, depth, rho, normalizer=normalizer)

    @property
    def obs_shape(self) -> tuple[int, ...]:
        return self.config.obs_shape

    @property
    def numbers(self) -> int:
        """How many numbers an action has."""
        return len(self.config.low)

    @property
    def normalizer(self) -> Normalizer:
        return self.trunk.normalizer

    @property
    def lipschitz(self) -> npt.NDArray[np.float64]:
        """Per number of the action: how far it moves at most (in its own units) per unit of the observation, rounded up."""
        return self._steepness(self.trunk.lipschitz)

    @property
    def parameter_count(self) -> int:
        return self.trunk.parameter_count

    def describe(self) -> dict[str, Any]:
        """The configuration, for JSON."""
        return asdict(self.config)

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, where eps lives."""
        return self.trunk.normalize(obs)

    def from_scores(self, scores: Tensor) -> Tensor:
        """Scores (batch, 2 * numbers) -> actions (batch, numbers) before they are clipped, float64."""
        pairs = scores.double().reshape(len(scores), self.numbers, 2)
        middle, slope = self._middle_and_slope()
        actions: Tensor = middle + 0.5 * slope * (pairs[..., 0] - pairs[..., 1])
        return actions

    def unclipped(self, unit: Tensor) -> Tensor:
        """Actions (batch, numbers) before they are clipped, differentiable: where a gradient is to be had everywhere."""
        return self.from_scores(self.trunk.scores(unit))

    def actions(self, unit: Tensor) -> Tensor:
        """What is played (batch, numbers), float32, in the action's own units."""
        return self._clipped(self.unclipped(unit))

    @torch.no_grad()
    def predict(
        self,
        observation: npt.ArrayLike,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        """Actions for raw observations, one or a batch, with Stable-Baselines3's signature (always deterministic)."""
        obs = as_array(observation, self.obs_shape)
        single = obs.shape == self.obs_shape
        scores = self.trunk.evaluation().scores(self.normalize(obs[None] if single else obs))
        actions = self._clipped(self.from_scores(scores)).numpy()
        return (actions[0] if single else actions), state

    def predict_certified(self, observation: npt.ArrayLike, eps: float) -> ActionBounds:
        """The action for a raw observation, or a batch, with bounds on what it would be anywhere within ``eps`` (unit space)."""
        obs = as_array(observation, self.obs_shape)
        found = self.certify(obs[None] if obs.shape == self.obs_shape else obs, eps)
        return ActionBounds(found.action[0], found.low[0], found.high[0]) if obs.shape == self.obs_shape else found

    def certify(self, obs: npt.ArrayLike | Tensor, eps: float) -> ActionBounds:
        """Bounds on the actions within ``eps`` (unit space) of raw observations (batch, *obs_shape)."""
        return self.certify_unit(self.normalize(obs), eps)

    @torch.no_grad()
    def certify_unit(self, unit: Tensor, eps: float) -> ActionBounds:
        """Bounds on the actions, as they are computed, for all float32 inputs within ``eps`` of unit-space ones."""
        if tuple(unit.shape[1:]) != self.obs_shape or unit.ndim == 0 or not bool(torch.isfinite(unit).all()):
            raise SortRLError(
                f"certify: inputs of shape {tuple(unit.shape)}, expected (batch, {', '.join(map(str, self.obs_shape))}) "
                "without NaN or infinity; no action can be certified for anything else."
            )
        if not 0 <= eps < math.inf:
            raise SortRLError(f"certify: eps is {eps}, expected a finite number >= 0 in the policy's input units.")
        network = self.trunk.sort_evaluation(thorough=True)
        scores, magnitudes = network.traced(unit)
        action = self._clipped(self.from_scores(scores)).numpy()
        moves = self._moves(network.bound, magnitudes.numpy(), eps)
        low, high = (np.array(part) for part in (self.config.low, self.config.high))
        # In float32 the ends of the range may lie a little outside of it.
        low, high = (np.minimum(low, low.astype(np.float32)), np.maximum(high, high.astype(np.float32)))
        return ActionBounds(action, np.maximum(low, action - moves), np.minimum(high, action + moves))

    def _moves(self, bound: ErrorBound, magnitudes: npt.NDArray[np.float64], eps: float) -> npt.NDArray[np.float64]:
        """How far (batch, numbers) an action as computed moves within eps.

        Half a difference of scores moves by L eps exactly computed, and each of the two scores is off by at most ``error`` at either
        state. Then it is multiplied, shifted and clipped in float64, and rounded to float32.
        """
        error = magnitudes @ np.array(bound.per_magnitude) + bound.per_reach * eps + bound.constant
        largest = magnitudes.max(1) + bound.peak * eps
        _, slope = self._middle_and_slope()
        ends = np.maximum(np.abs(self.config.low), np.abs(self.config.high))
        steep, lost = self._steepness(bound.lipschitz), 2.0 * slope.numpy() * error[:, None]
        together = TOGETHER * (ends + slope.numpy() * largest[:, None]) + 4.0 * UNIT_ROUNDOFF * ends
        moves: npt.NDArray[np.float64] = (steep * eps + lost + together) * UP
        # Where numbers might overflow, the range of the action is all that is known.
        return np.where(bound.in_range(magnitudes.max(1), eps)[:, None], moves, np.inf)

    def _steepness(self, lipschitz: float) -> npt.NDArray[np.float64]:
        constants: npt.NDArray[np.float64] = np.nextafter(np.array(self.config.slope) * lipschitz * UP, np.inf)
        return constants

    def _middle_and_slope(self) -> tuple[Tensor, Tensor]:
        low, high, slope = (
            torch.tensor(part, dtype=torch.float64) for part in (self.config.low, self.config.high, self.config.slope)
        )
        return (low + high) / 2, slope

    def _clipped(self, actions: Tensor) -> Tensor:
        if not bool(torch.isfinite(actions).all()):
            raise SortRLError("Scores overflow: the observation is too large for this policy. Check its units.")
        low, high = (torch.tensor(part, dtype=torch.float64) for part in (self.config.low, self.config.high))
        return torch.minimum(torch.maximum(actions, low), high).float()

    def explain(self) -> dict[str, str]:
        return {
            "network": f"SortNet, {self.config.depth} layers of {self.config.width}, two scores per number of the action",
            "proof": "Within ε of an observation a number of the action moves by at most L ε: half the difference of two scores is as "
            "Lipschitz as they are, and the slope that turns it into an action is part of L.",
        }

    def save(self, path: str | Path) -> None:
        """Write ``policy.safetensors`` into the directory ``path``: weights and, as metadata, the configuration."""
        save_policy(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote, from the directory or the file itself."""
        policy = load_policy(path, {cls.kind: cls})
        assert isinstance(policy, cls)
        return policy

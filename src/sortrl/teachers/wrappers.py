"""Teachers behind a wrapper: label smoothing, a fixed action near the start states, quantised pixels, sampled actions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.envs import EnvSlots
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

SAMPLES = 64


class Rescored:
    """A teacher whose scores are being changed, as attacks know a policy: its own inputs and units, the scores of now."""

    def __init__(self, teacher: Teacher, scores: Callable[[Tensor], Tensor]) -> None:
        self.scores, self.normalize = scores, teacher.normalize
        self.obs_shape, self.n_actions, self.predict = teacher.obs_shape, teacher.n_actions, teacher.predict


class SmoothedBody(nn.Module):
    """Scores averaged over fixed Gaussian displacements of the input, each taken with its opposite."""

    noise: Tensor

    def __init__(self, body: nn.Module, obs_shape: tuple[int, ...], sigma: float, logits: bool, seed: int = 0) -> None:
        super().__init__()
        self.body, self.logits = body, logits
        half = torch.randn(SAMPLES // 2, *obs_shape, generator=torch.Generator().manual_seed(seed)) * sigma
        self.register_buffer("noise", torch.cat([half, -half]))

    def forward(self, unit: Tensor) -> Tensor:
        near = (unit[:, None] + self.noise).flatten(0, 1)
        scores = self.body(near).unflatten(0, (len(unit), SAMPLES))
        if self.logits:  # an actor-critic is averaged in probability, as if it had sampled the displacement too
            return torch.logsumexp(scores.log_softmax(2), 1)
        mean: Tensor = scores.mean(1)
        return mean


def smoothed(teacher: Teacher, sigma: float) -> Teacher:
    """The teacher averaged over Gaussian displacements of ``sigma`` (unit space) around what it sees.

    An expert often keeps its return when it is smoothed, while its decision regions lose their thin parts: a student
    with wide margins imitates the smoothed expert far more closely.

    >>> from sortrl.teachers import load_teacher
    >>> expert = load_teacher(lambda obs: (obs[:, 2] > 0).astype(int), env_id="CartPole-v1")
    >>> unit = torch.tensor([[0.0, 0.0, 0.05, 0.0]])
    >>> expert.scores(unit)[0, 1].item(), smoothed(expert, 0.1).scores(unit)[0, 1].item() < 1.0
    (1.0, True)
    """
    if not 0 < sigma < float("inf"):
        raise SortRLError(f"smoothed: sigma is {sigma}, expected a positive number in the teacher's input units.")
    body = SmoothedBody(teacher.body, teacher.obs_shape, sigma, teacher.is_stochastic)
    name = f"{teacher.name}, smoothed by {sigma:g}"
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm)


STARTS = 64
LEAD = 10.0  # of logits: any other action would be sampled once in twenty thousand times


class StartingBody(nn.Module):
    """Scores with one action first wherever the input is less than ``radius`` from a box, in l_inf."""

    low: Tensor
    high: Tensor

    def __init__(self, body: nn.Module, low: Tensor, high: Tensor, radius: float, action: int) -> None:
        super().__init__()
        self.body, self.radius, self.action = body, radius, action
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, unit: Tensor) -> Tensor:
        scores: Tensor = self.body(unit)
        outside = torch.maximum(self.low - unit, unit - self.high).flatten(1).amax(1)
        first = scores.clone()
        first[:, self.action] = scores.amax(1) + LEAD
        return torch.where((outside < self.radius)[:, None], first, scores)


def decided_at_start(teacher: Teacher, env_id: str, radius: float) -> Teacher:
    """The teacher, with one and the same action wherever it is less than ``radius`` (unit space) from where episodes begin.

    That is the action to which it gives most weight there, on average. A swing that begins at rest begins on the switching surface
    of most experts: either push will do, and an adversary that sees this can choose every push, so that nothing ever moves.
    With the surface moved away by more than it can reach, the first push is made in any case, and the task goes on from there.

    >>> from sortrl.teachers import load_teacher
    >>> expert = load_teacher(lambda obs: (obs[:, 1] > 0).astype(int), env_id="MountainCar-v0")
    >>> unit = torch.tensor([[-0.5, 0.02], [-0.5, 0.2]])  # hardly moving, and moving
    >>> expert.scores(unit).argmax(1).tolist(), decided_at_start(expert, "MountainCar-v0", 0.1).scores(unit).argmax(1).tolist()
    ([1, 1], [0, 1])
    """
    if not 0 < radius < float("inf"):
        raise SortRLError(
            f"decided_at_start: radius is {radius}, expected a positive number in the teacher's input units."
        )
    with EnvSlots(env_id, 1) as slots:
        check_fit(teacher, slots.info)
        starts = np.stack([slots.reset(0, seed).copy() for seed in range(STARTS)])
    unit = teacher.normalize(starts)
    with torch.no_grad():
        scores = teacher.scores(unit)
    weight = (scores.softmax(1) if teacher.is_stochastic else scores).mean(0)
    body = StartingBody(teacher.body, unit.amin(0), unit.amax(0), radius, int(weight.argmax()))
    name = f"{teacher.name}, decided within {radius:g} of the start"
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm)


class QuantizedBody(nn.Module):
    """A network that sees pixels (0 to 1) rounded to a few levels.

    Rounding has no gradient. An attack is given that of the network at the rounded image, as if the rounding were not there:
    otherwise it would fail for want of a direction, which proves nothing.
    """

    def __init__(self, body: nn.Module, levels: int) -> None:
        super().__init__()
        self.body, self.levels = body, levels

    def forward(self, unit: Tensor) -> Tensor:
        steps = self.levels - 1
        rounded = (unit.clamp(0.0, 1.0) * steps).round() / steps
        scores: Tensor = self.body(unit + (rounded - unit).detach())
        return scores


def quantized(teacher: Teacher, levels: int) -> Teacher:
    """The teacher, seeing pixels rounded to ``levels`` brightnesses.

    >>> import torch
    >>> from sortrl.core.normalizer import Normalizer
    >>> brightness = Teacher(nn.Flatten(), Normalizer.from_pixels((1, 1, 2)), 2)
    >>> quantized(brightness, 2).scores(torch.tensor([[[[0.3, 0.8]]]])).tolist()
    [[0.0, 1.0]]
    """
    if not isinstance(levels, int) or not 2 <= levels <= 256:
        raise SortRLError(f"quantized: levels is {levels!r}, expected a whole number from 2 to 256.")
    if len(teacher.obs_shape) != 3:
        raise SortRLError(f"quantized: {teacher.name} sees {teacher.obs_shape}, expected images.")
    body, name = QuantizedBody(teacher.body, levels), f"{teacher.name}, {levels} brightnesses"
    return Teacher(body, teacher.normalizer, teacher.n_actions, name, teacher.algorithm)


class SampledBody(nn.Module):
    """Logits plus Gumbel noise, new in every call: their arg-max is a sample of the softmax."""

    def __init__(self, body: nn.Module, seed: int) -> None:
        super().__init__()
        self.body, self.generator = body, torch.Generator().manual_seed(seed)

    def forward(self, unit: Tensor) -> Tensor:
        logits: Tensor = self.body(unit)
        noise = torch.empty(logits.shape).exponential_(generator=self.generator)
        return logits - noise.log().to(logits)


def sampled(teacher: Teacher, seed: int = 0) -> Teacher:
    """The actor-critic with its actions sampled where others play the arg-max of the scores.

    The same seed gives the same actions if the same states are asked for in the same batches. Under attack, an action
    is sampled at the perturbed state; whether it was *changed* by the attack cannot be told apart from chance.

    >>> from sortrl.teachers import Architecture
    >>> from sortrl.core.normalizer import Normalizer
    >>> architecture = Architecture((4,), 2, (8,), "Tanh")
    >>> agent = Teacher(architecture.build(), Normalizer.identity((4,)), 2, algorithm="ppo", architecture=architecture)
    >>> sorted(set(sampled(agent).scores(torch.zeros(64, 4)).argmax(1).tolist()))
    [0, 1]
    """
    if not teacher.is_stochastic:
        raise SortRLError(f"sampled: the scores of {teacher.name} ({teacher.algorithm}) are not logits of a policy.")
    body = SampledBody(teacher.body, seed)
    return Teacher(body, teacher.normalizer, teacher.n_actions, f"{teacher.name}, sampled", teacher.algorithm)

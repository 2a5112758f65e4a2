"""A teacher that answers for a neighbourhood: easier for a Lipschitz student, which cannot follow sharp turns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.teachers.teacher import Teacher

SAMPLES = 64


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

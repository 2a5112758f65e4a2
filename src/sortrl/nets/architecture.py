"""Which network a teacher is: a small description that can be written as JSON and built again without a pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "Tanh": nn.Tanh,
    "ReLU": nn.ReLU,
    "LeakyReLU": nn.LeakyReLU,
    "ELU": nn.ELU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Sigmoid": nn.Sigmoid,
    "Softplus": nn.Softplus,
}


class MeanQuantiles(nn.Module):
    """QR-DQN's outputs (batch, n_quantiles * n_actions) -> their means (batch, n_actions), the action values."""

    def __init__(self, n_quantiles: int, n_actions: int) -> None:
        super().__init__()
        self.n_quantiles, self.n_actions = n_quantiles, n_actions

    def forward(self, quantiles: Tensor) -> Tensor:
        return quantiles.view(-1, self.n_quantiles, self.n_actions).mean(dim=1)


class Residual(nn.Module):
    """``x + conv(relu(conv(relu(x))))``, the block of IMPALA's CNN."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.model = nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.model(x)
        return result


Merge = Literal["sum", "max"]


class MergeActions(nn.Module):
    """Logits of all actions -> logits of groups of equivalent ones.

    "sum": the probabilities of a group add up, so that sampled play is that of the agent. "max": the most likely of a
    group stands for it, so that greedy play is that of the agent. Both cannot be had: a large group of unlikely actions
    can be the likeliest group.
    """

    def __init__(self, groups: tuple[tuple[int, ...], ...], merge: Merge) -> None:
        super().__init__()
        self.groups, self.merge = [list(group) for group in groups], merge

    def forward(self, logits: Tensor) -> Tensor:
        reduce = torch.logsumexp if self.merge == "sum" else torch.amax
        return torch.stack([reduce(logits[:, group], 1) for group in self.groups], 1)


@dataclass(frozen=True)
class Architecture:
    """An MLP over flat observations, or over the features of a convolutional network for images.

    That is a NatureCNN (Mnih et al., 2015; other ``channels`` than its own can be given), the residual one of IMPALA
    (Espeholt et al., 2018) or a network with ``channels`` of its own in which every layer is normalised,
    as learning without a target network needs (``norm_cnn``; Gallici et al., 2024). ``hidden`` are the widths between
    the input (or the CNN's features) and the last layer. ``n_quantiles`` is 0 unless the last layer predicts that many
    quantiles of each action value. ``action_groups`` are the equivalent outputs that make up each action, () where every
    output is an action; ``merge`` says how (:class:`MergeActions`).

    >>> Architecture(obs_shape=(4,), n_actions=2, hidden=(8,), activation="Tanh").build()
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=4, out_features=8, bias=True)
      (2): Tanh()
      (3): Linear(in_features=8, out_features=2, bias=True)
    )
    """

    obs_shape: tuple[int, ...]
    n_actions: int
    hidden: tuple[int, ...]
    activation: str
    trunk: Literal["mlp", "nature_cnn", "norm_cnn", "impala"] = "mlp"
    cnn_features: int = 512
    n_quantiles: int = 0
    channels: tuple[int, ...] = ()
    action_groups: tuple[tuple[int, ...], ...] = ()
    merge: Merge = "sum"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise SortRLError(
                f"Activation {str(self.activation)[:40]!r} is not known; expected one of {', '.join(ACTIVATIONS)}."
            )
        if self.trunk not in ("mlp", "nature_cnn", "norm_cnn", "impala"):
            raise SortRLError(
                f"Trunk {str(self.trunk)[:40]!r} is not known; expected 'mlp', 'nature_cnn', 'norm_cnn' or 'impala'."
            )
        sizes = (*self.obs_shape, self.n_actions, *self.hidden, self.cnn_features, *self.channels)
        whole = all(type(size) is int and size > 0 for size in sizes) and type(self.n_quantiles) is int
        if not self.obs_shape or not whole or self.n_quantiles < 0:
            raise SortRLError(f"Architecture: every size must be a positive integer, got {str(self)[:300]}.")
        if self.trunk != "mlp" and len(self.obs_shape) != 3:
            raise SortRLError(f"A CNN sees images (channels, height, width), but obs_shape is {self.obs_shape}.")
        numbers = {"mlp": (0,), "nature_cnn": (0, 3), "impala": (3,)}.get(self.trunk, range(1, 100))
        if len(self.channels) not in numbers:
            raise SortRLError(f"Architecture: these channels do not belong to a {self.trunk}, got {str(self)[:300]}.")
        outputs = [output for group in self.action_groups for output in group]
        split = set(outputs) == set(range(len(outputs))) and len(self.action_groups) == self.n_actions
        if self.merge not in ("sum", "max") or (self.action_groups and not split):
            raise SortRLError(
                f"Architecture: {str(self.action_groups)[:200]}, merged by {str(self.merge)[:40]!r}, do not split the "
                f"outputs into {self.n_actions} actions."
            )

    def build(self) -> nn.Sequential:
        """The network with fresh parameters, in the order in which Stable-Baselines3 stores them."""
        trunks = {"mlp": self._flat, "nature_cnn": self._cnn, "norm_cnn": self._norm_cnn, "impala": self._impala}
        layers, width = trunks[self.trunk]()
        for size in self.hidden:
            norm = [nn.LayerNorm(size)] if self.trunk == "norm_cnn" else []
            layers += [nn.Linear(width, size), *norm, ACTIVATIONS[self.activation]()]
            width = size
        outputs = sum(map(len, self.action_groups)) or self.n_actions
        layers.append(nn.Linear(width, outputs * max(1, self.n_quantiles)))
        if self.n_quantiles:
            layers.append(MeanQuantiles(self.n_quantiles, self.n_actions))
        if self.action_groups:
            layers.append(MergeActions(self.action_groups, self.merge))
        network = nn.Sequential(*layers)
        if self.trunk == "impala":  # twice as fast on CPUs; the strided convolutions of a NatureCNN gain nothing
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    def build_with(self, tensors: Mapping[str, Tensor], where: str) -> nn.Sequential:
        """The network with given parameters, which must fit and be finite; ``where`` is said in errors.

        Shapes are compared before any memory is spent on what a file claims.
        """
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        try:
            if 2 * len(self.hidden) > len(tensors):
                raise ValueError(f"{len(tensors)} tensors for {len(self.hidden)} hidden layers")
            with torch.device("meta"):
                expected = {name: tuple(tensor.shape) for name, tensor in self.build().state_dict().items()}
            if found != expected:
                raise ValueError(f"tensors {found}, expected {expected}")
            network = self.build()
            network.load_state_dict(tensors)
        # torch's words for sizes that no memory can hold are as many as its errors.
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise SortRLError(
                f"{where} does not fit its own description ({str(error)[:500]}). Save it again."
            ) from error
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            raise SortRLError(f"{where}: its weights contain NaN or infinity; the training diverged.")
        return network

    def _flat(self) -> tuple[list[nn.Module], int]:
        return [nn.Flatten()], math.prod(self.obs_shape)

    def _cnn(self) -> tuple[list[nn.Module], int]:
        channels, height, width = self.obs_shape
        layers: list[nn.Module] = []
        for out, kernel, stride in zip(self.channels or (32, 64, 64), (8, 4, 3), (4, 2, 1), strict=True):
            layers += [nn.Conv2d(channels, out, kernel, stride), nn.ReLU()]
            channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if height < 1 or width < 1:
            raise SortRLError(f"Images of shape {self.obs_shape} are too small for a NatureCNN (36 x 36 at least).")
        return [
            *layers,
            nn.Flatten(),
            nn.Linear(channels * height * width, self.cnn_features),
            nn.ReLU(),
        ], self.cnn_features

    def _impala(self) -> tuple[list[nn.Module], int]:
        channels, height, width = self.obs_shape
        layers: list[nn.Module] = []
        for out in self.channels:
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.MaxPool2d(3, 2, 1), Residual(out), Residual(out)]
            channels, height, width = out, (height + 1) // 2, (width + 1) // 2
        linear = nn.Linear(channels * height * width, self.cnn_features)
        return [*layers, nn.Flatten(), nn.ReLU(), linear, nn.ReLU()], self.cnn_features

    def _norm_cnn(self) -> tuple[list[nn.Module], int]:
        """NatureCNN's windows where the image is large enough for them, else windows of 3 x 3."""
        channels, height, width = self.obs_shape
        large = min(height, width) >= 36
        windows = ((8, 4), (4, 2), (3, 1)) if large else ((3, 1),) * len(self.channels)
        layers: list[nn.Module] = []
        for out, (kernel, stride) in zip(self.channels, windows, strict=False):
            # One group is layer norm with a weight per channel instead of one per pixel.
            layers += [nn.Conv2d(channels, out, kernel, stride), nn.GroupNorm(1, out), ACTIVATIONS[self.activation]()]
            channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if len(self.channels) > len(windows) or height < 1 or width < 1:
            raise SortRLError(f"Images of shape {self.obs_shape} are too small for {len(self.channels)} convolutions.")
        return [*layers, nn.Flatten()], channels * height * width

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, fields: Any) -> Architecture:
        try:
            return cls(**{name: _tuples(value) for name, value in fields.items()})
        except (TypeError, AttributeError) as error:
            raise SortRLError(f"Not the description of a network: {str(fields)[:200]} ({str(error)[:200]}).") from error


def _tuples(value: Any) -> Any:
    """JSON knows lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

"""Which network a teacher is: a small description that can be written as JSON and built again without a pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sortrl.errors import SortRLError

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


@dataclass(frozen=True)
class Architecture:
    """An MLP over flat observations, or over the features of a convolutional network for images.

    That is a NatureCNN (Mnih et al., 2015) or a network with ``channels`` of its own in which every layer is normalised,
    as learning without a target network needs (``norm_cnn``; Gallici et al., 2024). ``hidden`` are the widths between
    the input (or the CNN's features) and the last layer. ``n_quantiles`` is 0 unless the last layer predicts that many
    quantiles of each action value.

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
    trunk: Literal["mlp", "nature_cnn", "norm_cnn"] = "mlp"
    cnn_features: int = 512
    n_quantiles: int = 0
    channels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise SortRLError(
                f"Activation {str(self.activation)[:40]!r} is not known; expected one of {', '.join(ACTIVATIONS)}."
            )
        if self.trunk not in ("mlp", "nature_cnn", "norm_cnn"):
            raise SortRLError(
                f"Trunk {str(self.trunk)[:40]!r} is not known; expected 'mlp', 'nature_cnn' or 'norm_cnn'."
            )
        sizes = (*self.obs_shape, self.n_actions, *self.hidden, self.cnn_features, *self.channels)
        whole = all(type(size) is int and size > 0 for size in sizes) and type(self.n_quantiles) is int
        if not self.obs_shape or not whole or self.n_quantiles < 0:
            raise SortRLError(f"Architecture: every size must be a positive integer, got {str(self)[:300]}.")
        if self.trunk != "mlp" and len(self.obs_shape) != 3:
            raise SortRLError(f"A CNN sees images (channels, height, width), but obs_shape is {self.obs_shape}.")
        if (self.trunk == "norm_cnn") != bool(self.channels):
            raise SortRLError(f"Architecture: channels belong to a norm_cnn and are its own, got {str(self)[:300]}.")

    def build(self) -> nn.Sequential:
        """The network with fresh parameters, in the order in which Stable-Baselines3 stores them."""
        trunks = {"mlp": self._flat, "nature_cnn": self._cnn, "norm_cnn": self._norm_cnn}
        layers, width = trunks[self.trunk]()
        for size in self.hidden:
            norm = [nn.LayerNorm(size)] if self.trunk == "norm_cnn" else []
            layers += [nn.Linear(width, size), *norm, ACTIVATIONS[self.activation]()]
            width = size
        layers.append(nn.Linear(width, self.n_actions * max(1, self.n_quantiles)))
        if self.n_quantiles:
            layers.append(MeanQuantiles(self.n_quantiles, self.n_actions))
        return nn.Sequential(*layers)

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
        for out, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
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
            known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            return cls(**known)
        except (TypeError, AttributeError) as error:
            raise SortRLError(f"Not the description of a network: {str(fields)[:200]} ({str(error)[:200]}).") from error

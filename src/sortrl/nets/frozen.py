"""The evaluation network of a policy: private copies of its tensors, for play and certificates alike.

Weights can be written to in ways that nobody can see: through ``.data``, through NumPy views, by other processes. A constant
that was computed from them may then be too small. So a policy never evaluates its own tensors: it copies them, computes every
constant from the copies, and both plays and certifies with those. A change that is noticed makes new copies; one that is not
changes neither the play nor the certificates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError

if TYPE_CHECKING:
    from sortrl.nets.base import Decided

SMALLEST_NORMAL = 2.0**-126  # of float32: what is smaller may be flushed to zero, or not
Module = TypeVar("Module", bound=nn.Module)


class EvaluationNetwork(ABC):
    """What a policy plays and certifies with. Its tensors are nobody else's, so constants are computed once and kept."""

    @property
    @abstractmethod
    def lipschitz(self) -> float:
        """An l_inf constant of :meth:`scores`."""

    @abstractmethod
    def scores(self, unit: Tensor) -> Tensor:
        """Scores (batch, n_actions), float32; differentiable with respect to the input."""

    @abstractmethod
    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        """With l_p norms for sort layers."""

    @abstractmethod
    def decide(self, unit: Tensor) -> Decided:
        """Action, radius and runner-up of finite inputs; of equal scores the first action comes first."""

    def decide_at(self, unit: Tensor, eps: Tensor) -> Decided:
        """:meth:`decide`, with radii that need only tell whether they are above ``eps`` (batch,): they may be smaller than those."""
        return self.decide(unit)

    @abstractmethod
    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        """Which actions (batch, n_actions) an input within ``eps_unit`` might make the policy choose."""

    @abstractmethod
    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        """Whether (batch,) intervals prove ``action`` on the boxes [lo, hi]."""


class _Copied(NamedTuple):
    """A tensor, where it was found, what was made of it, and what shows that it is still the same."""

    store: dict[str, Any]
    name: str
    tensor: Tensor
    copy: Tensor
    double: bool
    version: int
    """-1 for tensors of inference mode, which do not count how often they were written to."""
    address: int
    item: Callable[[int], Any] | None
    """Reads a number of the tensor; the memory is kept, so that no other tensor gets its address."""
    place: int
    value: Any


class Copies:
    """Copies modules, and tells later whether they still are what was copied.

    A module with ``evaluated_in_double`` is copied to float64, which is exact, numbers below 2^-126 as 0: whether those are
    flushed, when they are widened, depends on the settings of a thread.

    >>> layer = nn.Linear(2, 1)
    >>> copies = Copies()
    >>> twin = copies(layer)
    >>> copies.unchanged()
    True
    >>> _ = layer.weight.data.mul_(2.0)
    >>> copies.unchanged(), bool((twin.weight == layer.weight).any())
    (False, False)
    """

    def __init__(self) -> None:
        self._tensors: list[_Copied] = []
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, module: Module) -> Module:
        """A twin with private tensors, without hooks: it computes what the class says, and nothing else."""
        return _twin(module, self._copied, False, self.watch)

    def tensor(self, module: nn.Module, name: str) -> Tensor:
        """A private copy of a tensor that belongs to ``module`` itself."""
        store = module._parameters if name in module._parameters else module._buffers
        return self._copied(store, name, False)

    def watch(self, module: nn.Module) -> None:
        """Replacing a part of the module is a change."""
        if module._modules:
            self._children.append((module._modules, dict(module._modules)))

    def _copied(self, store: dict[str, Any], name: str, double: bool) -> Tensor:
        tensor: Tensor = store[name]
        # Outside inference mode, whose tensors cannot be differentiated with.
        with torch.inference_mode(False), torch.no_grad():
            copy = _made(tensor, double)
            flat = tensor.detach().flatten() if tensor.is_contiguous() else None
            item, place, value = None, 0, None
            if flat is not None and flat.device.type == "cpu" and flat.numel() and flat.dtype != torch.bfloat16:
                # The largest number: whoever scales the tensor, or takes a step of training, changes it.
                place = int(copy.flatten().abs().argmax())
                item = flat.numpy().item
                value = item(place)
        version = -1 if tensor.is_inference() else tensor._version
        self._tensors.append(_Copied(store, name, tensor, copy, double, version, tensor.data_ptr(), item, place, value))
        return copy

    def unchanged(self) -> bool:
        """Whether nothing shows that a tensor or a part was replaced or written to. Cheap: it is asked at every step."""
        for store, name, tensor, copy, double, version, address, item, place, value in self._tensors:
            if store.get(name) is not tensor or tensor.data_ptr() != address:
                return False
            # Fused optimisers write without counting, so what may be trained is compared.
            if version < 0 or tensor.requires_grad:
                if not torch.equal(_made(tensor, double), copy):
                    return False
            elif tensor._version != version:
                return False
            if item is not None and item(place) != value:
                return False
        return all(children == known for children, known in self._children)

    def same(self) -> bool:
        """Whether the tensors hold exactly what was copied. It reads all of them."""
        return self.unchanged() and all(
            torch.equal(_made(found.tensor.detach(), found.double), found.copy) for found in self._tensors
        )

    def trainable(self) -> bool:
        """Whether gradients with respect to what was copied are wanted."""
        return any(found.tensor.requires_grad for found in self._tensors)

    def types(self) -> set[torch.dtype]:
        """Of the numbers that were copied."""
        return {found.tensor.dtype for found in self._tensors if found.tensor.is_floating_point()}


class Wires(Copies):
    """Makes twins that compute with copies, as the evaluation network does, and pass gradients on to what was copied."""

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self._copy_of = {(id(found.store), found.name): found for found in copies._tensors}

    def _copied(self, store: dict[str, Any], name: str, double: bool) -> Tensor:
        found = self._copy_of[id(store), name]
        if not found.tensor.requires_grad:
            return found.copy
        wired: Tensor = _Wire.apply(found.tensor, found.copy)  # type: ignore[no-untyped-call]
        return wired


class _Wire(torch.autograd.Function):
    """The copy forwards; backwards the gradient goes to the tensor that was copied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def require_single(copies: Copies) -> None:
    """The analysis of rounding is that of float32."""
    others = copies.types() - {torch.float32}
    if others:
        raise SortRLError(
            f"certify: weights are {', '.join(sorted(map(str, others)))}, expected torch.float32, whose rounding the "
            "certificates account for. Convert the policy with .float()."
        )


def _made(tensor: Tensor, double: bool) -> Tensor:
    if not (double and tensor.is_floating_point()):
        return tensor.detach().clone()
    wide = tensor.detach().double()
    return torch.where(wide.abs() < SMALLEST_NORMAL, torch.zeros_like(wide), wide)


def _twin(
    module: Module,
    copied: Callable[[dict[str, Any], str, bool], Tensor],
    double: bool,
    watch: Callable[[nn.Module], None],
) -> Module:
    twin = object.__new__(type(module))
    nn.Module.__init__(twin)
    twin.__dict__.update({name: value for name, value in module.__dict__.items() if name not in twin.__dict__})
    twin.training = False
    double = double or getattr(module, "evaluated_in_double", False)
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            # A plain attribute: found faster than nn.Module finds a parameter, and known to no optimiser.
            twin.__dict__[name] = None if tensor is None else copied(store, name, double)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, copied, double, watch)
    watch(module)
    return twin

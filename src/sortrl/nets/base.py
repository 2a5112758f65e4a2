"""What every policy with certificates has in common: raw observations in, actions and proven radii out."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer, as_array, stored_normalizer
from sortrl.core.records import Certificate, Decision
from sortrl.nets.frozen import Copies, EvaluationNetwork, Wires

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since Python 3.11

FORMAT_VERSION = 1
FILE_NAME = "policy.safetensors"
Decided = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]


class CertifiedPolicy(nn.Module, ABC):
    """A policy that plays the arg-max of its scores and can prove within which radius that does not change.

    A subclass has the network that is trained, and says in :meth:`_network` how its :class:`EvaluationNetwork` is made: that
    has private copies of all tensors, and is what plays and what is certified (:mod:`sortrl.nets.frozen`).
    """

    kind: str
    """Which subclass a file is of."""
    normalizer: Normalizer
    config: Any
    """A dataclass with ``obs_shape``, ``n_actions`` and what else it takes to build the policy again."""

    @property
    def obs_shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.config.obs_shape  # a tuple already: this is asked at every step
        return shape

    @property
    def n_actions(self) -> int:
        n_actions: int = self.config.n_actions
        return n_actions

    _frozen: tuple[EvaluationNetwork, Copies] | None = None

    @abstractmethod
    def _network(self, copies: Copies) -> EvaluationNetwork:
        """The evaluation network, made of nothing but what ``copies`` gives for the policy's parts."""

    @abstractmethod
    def calibrate(self, unit: Tensor) -> None:
        """Re-estimate the running means on unit-space states."""

    def evaluation(self, thorough: bool = False) -> EvaluationNetwork:
        """The evaluation network; copied anew when the policy was changed.

        Noticed are: parts and tensors that were replaced, writing that torch counts or that changes the largest number of a
        tensor, and any change of what is still to be trained (``requires_grad``); with ``thorough``, all changes, at the price
        of reading all weights. Until a change is noticed, play and certificates are both those of before.
        """
        return self._current(thorough)[0]

    def _current(self, thorough: bool = False) -> tuple[EvaluationNetwork, Copies]:
        frozen = self._frozen
        if frozen is None or not (frozen[1].same() if thorough else frozen[1].unchanged()):
            copies = Copies()
            frozen = self._frozen = self._network(copies), copies
        return frozen

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which must not have the evaluation network of another policy."""
        return {**self.__dict__, "_frozen": None}

    def train(self, mode: bool = True) -> Self:
        self._frozen = None  # training begins or ends
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._frozen = None  # other types, other devices
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _differentiable(self) -> EvaluationNetwork:
        """The evaluation network, which passes gradients on to the policy's parameters where they are wanted."""
        network, copies = self._current()
        if torch.is_grad_enabled() and copies.trainable():
            return self._network(Wires(copies))
        return network

    @property
    def lipschitz(self) -> float:
        """An l_inf constant of :meth:`scores` with respect to unit-space input."""
        return self.evaluation(thorough=True).lipschitz

    def scores(self, unit: Tensor) -> Tensor:
        """Scores (batch, n_actions) of the evaluation network; differentiable."""
        return self._differentiable().scores(unit)

    def surrogate_scores(self, unit: Tensor, p: float) -> Tensor:
        """The evaluation network with l_p norms for sort layers: smoother gradients for attacks. Not certified."""
        return self._differentiable().surrogate_scores(unit, p)

    @torch.no_grad()
    def proven(self, lo: Tensor, hi: Tensor, action: Tensor) -> Tensor:
        """Whether (batch,) intervals prove that every input of the box [lo, hi] is answered with ``action`` (batch,)."""
        return self.evaluation().proven(lo, hi, action)

    @torch.no_grad()
    def reachable(self, unit: Tensor, eps_unit: float) -> npt.NDArray[np.bool_]:
        """Which actions (batch, n_actions) an input within ``eps_unit`` of each state might make the policy choose.

        The others provably cannot be forced; these perhaps cannot either: it is what is possible at most.
        """
        return self.evaluation(thorough=True).reachable(unit, eps_unit)

    def describe(self) -> dict[str, Any]:
        """The configuration, for JSON."""
        return asdict(self.config)

    @abstractmethod
    def explain(self) -> dict[str, str]:
        """For reports, in a few words each: ``network``, what the policy is made of, and ``proof``, why its radii hold."""

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def normalize(self, obs: npt.ArrayLike | Tensor) -> Tensor:
        """Raw observations (batch, *obs_shape) -> unit space, where eps, radii and the Lipschitz constant live."""
        unit: Tensor = self.normalizer(obs)
        return unit

    @torch.no_grad()
    def certify(self, obs: npt.ArrayLike | Tensor) -> Certificate:
        """Certificates for raw observations (batch, *obs_shape), radii in unit space."""
        return self.certify_unit(self.normalize(obs))

    @torch.no_grad()
    def certify_unit(self, unit: Tensor, at: Tensor | None = None) -> Certificate:
        """Certificates for unit-space inputs; the radius of a tie is 0. Who only asks whether radii are above an eps gives it as
        ``at`` (batch,): what is returned tells that, and may be smaller than the radius, which can take ten times as long.

        No float32 input within the radius, its border included, changes the arg-max of the scores as they are computed:
        every rounding, of the state and of its perturbed twin, is accounted for (docs/certificates.md).
        """
        if tuple(unit.shape[1:]) != self.obs_shape or unit.ndim == 0 or not bool(torch.isfinite(unit).all()):
            raise SortRLError(
                f"certify: inputs of shape {tuple(unit.shape)}, expected (batch, {', '.join(map(str, self.obs_shape))}) "
                "without NaN or infinity; no decision can be certified for anything else."
            )
        network = self.evaluation(thorough=True)
        return Certificate(*(network.decide(unit) if at is None else network.decide_at(unit, at.double())))

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
        single = obs.shape == self.obs_shape
        actions = self.evaluation().scores(self.normalize(obs[None] if single else obs)).argmax(1).numpy()
        return (actions[0] if single else actions), state

    @torch.no_grad()
    def predict_certified(self, observation: npt.ArrayLike) -> Decision:
        """Actions for raw observations, one or a batch, each with its certificate.

        >>> from sortrl import SortPolicy
        >>> decision = SortPolicy((4,), 2, width=16, depth=3).predict_certified(np.zeros(4))
        >>> float(decision.radius) >= 0, int(decision.action) + int(decision.runner_up)
        (True, 1)
        """
        obs = as_array(observation, self.obs_shape)
        single = obs.shape == self.obs_shape
        action, radius, runner_up = self.evaluation().decide(self.normalize(obs[None] if single else obs))
        return Decision(action[0], radius[0], runner_up[0]) if single else Decision(action, radius, runner_up)

    def as_classifier(self) -> nn.Module:
        """A frozen copy as a plain module, unit-space inputs (batch, *obs_shape) to scores, for libraries of attacks.

        For example ``foolbox.PyTorchModel(policy.as_classifier(), bounds=(lo, hi))``, or ``PyTorchClassifier`` of the
        Adversarial Robustness Toolbox. A copy: such libraries differentiate parameters and set training mode.

        >>> from sortrl import SortPolicy
        >>> SortPolicy((4,), 2, width=16, depth=3).as_classifier()(torch.zeros(5, 4)).shape
        torch.Size([5, 2])
        """
        return _Classifier(copy.deepcopy(self)).eval().requires_grad_(False)

    def save(self, path: str | Path) -> None:
        """Write ``policy.safetensors`` into the directory ``path``: weights and, as metadata, the configuration."""
        save_policy(self, path)

    def push_to_hub(self, repository: str, run: str | Path | None = None, private: bool = False) -> str:
        """Upload the policy to the Hugging Face Hub (``sortrl[hub]``), as ``"user/name"``, with a model card.

        Args:
            repository: ``"user/name"``; it is made if it does not exist.
            run: directory of the run that made the policy. Its results then stand on the card, and its ``run.json`` is uploaded, so
                that ``sortrl evaluate hf:user/name`` knows the task.
            private: of a repository that does not exist yet.

        Returns:
            The name to load exactly this policy by: ``"hf:user/name@commit"``.
        """
        from sortrl.nets.hub import push_policy  # few users need it

        return push_policy(self, repository, run, private)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote, from the directory or the file itself."""
        policy = load_policy(path, {cls.kind: cls})
        assert isinstance(policy, cls)
        return policy


class _Classifier(nn.Module):
    """The evaluation network of a policy behind ``forward``."""

    def __init__(self, policy: CertifiedPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, unit: Tensor) -> Tensor:
        return self.policy.scores(unit)


def save_policy(policy: Any, path: str | Path) -> None:
    """Write ``policy.safetensors`` into the directory ``path``: weights and, as metadata, the configuration."""
    clip = policy.normalizer.clip
    metadata = {"format": FORMAT_VERSION, "kind": policy.kind, "config": policy.describe()}
    metadata["clip"] = None if math.isinf(clip) else clip
    write_tensors(Path(path) / FILE_NAME, policy.state_dict(), metadata)


def load_policy(path: str | Path, kinds: dict[str, Any]) -> Any:
    """Read what :func:`save_policy` wrote, from the directory or the file itself; ``kinds`` builds each kind."""
    file = Path(path)
    if file.suffix == ".zip":
        raise SortRLError(
            f"{file} is an agent, not a policy with certificates. Make one of it with sortrl.robustify({str(file)!r}, env=...), or read "
            f"the agent itself with sortrl.load_teacher({str(file)!r})."
        )
    file = file / FILE_NAME if file.is_dir() else file
    tensors, metadata = read_tensors(file)
    if metadata.get("format") != FORMAT_VERSION:
        raise SortRLError(
            f"{file}: format {metadata.get('format')!r}, this version reads {FORMAT_VERSION}. Update sortrl."
        )
    kind = metadata.get("kind", "sort")  # files of before there were other kinds do not say
    if not isinstance(kind, str) or kind not in kinds:
        raise SortRLError(f"{file}: a policy of kind {kind!r}, expected {' or '.join(map(repr, kinds))}.")
    normalizer = stored_normalizer(tensors, metadata, _prefix(tensors), file)
    try:
        config = {name: _tuples(value) for name, value in metadata["config"].items()}
        _check_shapes(kinds[kind], config, normalizer, tensors)
        policy = kinds[kind](normalizer=normalizer, **config)
        policy.load_state_dict(tensors)
    except SortRLError as error:
        raise SortRLError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise SortRLError(f"{file}: incomplete or foreign ({str(error)[:300]}). It is not a sortrl policy.") from error
    numbers = [tensor for name, tensor in tensors.items() if name.rpartition(".")[2] != "p"]  # p may be infinite
    if not all(bool(torch.isfinite(tensor).all()) for tensor in numbers):
        raise SortRLError(f"{file}: weights contain NaN or infinity.")
    factors = [tensor for name, tensor in tensors.items() if name.endswith(".factor")]
    if not all(bool((factor > 0).all()) for factor in factors):
        raise SortRLError(f"{file}: the factor on its inputs is not positive.")
    policy.eval().requires_grad_(False)
    return policy


def _prefix(tensors: Mapping[str, Tensor]) -> str:
    """Where the normaliser is: at the top, or in the part of the network that sees the observation."""
    return next((name for name in tensors if name.endswith("normalizer.mean")), "mean").removesuffix("mean")


def _check_shapes(kind: Any, config: dict[str, Any], normalizer: Normalizer, tensors: Mapping[str, Tensor]) -> None:
    """Compare tensors with the configuration on the meta device, before any memory is spent on what a file claims."""
    layers = int(config.get("depth", 1)) + sum(len(config.get(name, ())) for name in ("conv", "bounded_conv", "hidden"))
    if layers > len(tensors) or normalizer.obs_shape != config["obs_shape"]:
        raise SortRLError(
            f"weights do not fit the configuration. {len(tensors)} tensors and observations {normalizer.obs_shape} for "
            f"{layers} layers and observations {str(config['obs_shape'])[:60]}."
        )
    with torch.device("meta"):
        expected = kind(normalizer=normalizer, **config).state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        found, wanted = (tuple(some[name].shape) if name in some else "nothing" for some in (tensors, expected))
        if found != wanted:
            raise SortRLError(f"weights do not fit the configuration. {name} is {found}, expected {wanted}.")


def ranked(
    scores: Tensor, unit: Tensor
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The best action, the next one and the margin between them, per state; of equal scores the first comes first."""
    falling = -scores.cpu().numpy().astype(np.float64)
    order = falling.argsort(1, kind="stable")
    falling.sort(1)
    if not math.isfinite(falling.sum()):
        raise overflow(unit)
    return order[:, 0], order[:, 1], falling[:, 1] - falling[:, 0]


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def overflow(unit: Tensor) -> SortRLError:
    return SortRLError(f"certify: scores overflow for inputs of up to {float(unit.abs().max()):.3g}; scale them.")

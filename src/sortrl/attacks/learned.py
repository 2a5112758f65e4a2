"""An adversary that is itself learned: it attacks the return, not single actions (SA-RL and PA-AD style)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.attacks.base import Attack, Target
from sortrl.attacks.values import Aimed
from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.normalizer import Normalizer
from sortrl.core.records import Policy
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import describe, greedy_returns
from sortrl.nets.architecture import Architecture

if TYPE_CHECKING:
    from sortrl.attacks.siege import Siege  # Stable-Baselines3 is slow to import

FILE_NAME = "adversary.safetensors"
FORMAT = "sortrl-adversary-1"
Progress = Callable[[dict[str, Any]], None]

# PPO. Noise that depends on the state and is kept for a whole rollout (gSDE) explores far better than fresh noise at each
# step, which averages out: it is a bias kept up, or a swing, that topples a controller.
SLOTS, ROLLOUT, BATCH, EPOCHS = 32, 128, 512, 6
LEARNING_RATE, GAMMA, FIRST_LOG_STD = 1e-3, 0.998, -0.5  # to topple a controller takes hundreds of steps
HIDDEN = (64, 64)
JUDGEMENTS, TRIALS = 8, 16  # how often the training stops to see what its adversary does, and on how many episodes
FEATURE_CLIP = 10.0


@dataclass(frozen=True)
class Outputs(Attack):
    """What an adversary's network says about a batch of states, as an attack.

    A director (PA-AD, Sun et al., 2022) says which action it wants, by the largest of its outputs, and ``inner`` finds the
    input. Otherwise (SA-RL, Zhang et al., 2021) the outputs are the perturbation itself: ``eps tanh(output)``.
    """

    outputs: Tensor
    director: bool
    inner: Aimed
    name = "outputs of an adversary"

    def search(self, target: Target) -> Tensor:
        if self.director:
            return self.inner.at(self.outputs.argmax(1)).search(target)
        return target.unit + target.eps * torch.tanh(self.outputs[target.rows]).view(target.unit.shape)


@dataclass(frozen=True, eq=False)
class LearnedAdversary(Attack):
    """A network trained to lower the return of one victim at one eps, played without noise. See :func:`train_adversary`.

    Used on another policy or eps it is still a valid attack, but not the one that was trained.
    """

    network: nn.Module
    scale: Normalizer
    architecture: Architecture
    env_id: str
    eps_unit: float
    director: bool
    inner: Aimed

    @property
    def name(self) -> str:
        return "learned-director" if self.director else "learned"

    @property
    def needs_gradient(self) -> bool:
        return self.director

    def search(self, target: Target) -> Tensor:
        seen = features(target.unit, target.counter.scores(target.unit))
        outputs = self.network(self.scale(seen))
        if len(target) != target.batch:  # as a member of an ensemble: outputs are looked up by place in the batch
            outputs = torch.zeros(target.batch, outputs.shape[1]).index_copy(0, target.rows, outputs)
        return Outputs(outputs, self.director, self.inner).search(target)

    def save(self, directory: str | Path) -> None:
        """Write ``adversary.safetensors`` into ``directory``: tensors and a JSON description, no pickle."""
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        tensors |= {"scale.mean": self.scale.mean, "scale.scale": self.scale.scale}
        metadata = {
            "format": FORMAT,
            "architecture": self.architecture.to_json(),
            "env_id": self.env_id,
            "eps_unit": self.eps_unit,
            "director": self.director,
            "inner": {"steps": self.inner.steps, "step_share": self.inner.step_share, "p": self.inner.surrogate_p},
        }
        write_tensors(Path(directory) / FILE_NAME, tensors, metadata)

    @classmethod
    def load(cls, directory: str | Path) -> LearnedAdversary:
        """Read what :meth:`save` wrote."""
        path = Path(directory) / FILE_NAME
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise SortRLError(
                f"{path}: format {metadata.get('format')!r}, expected {FORMAT!r}. It is not an adversary."
            )
        try:
            architecture, inner = Architecture.from_json(metadata["architecture"]), metadata["inner"]
            scale = Normalizer(tensors["scale.mean"], tensors["scale.scale"], FEATURE_CLIP)
            weights = {n.removeprefix("network."): tensor for n, tensor in tensors.items() if n.startswith("network.")}
            return cls(
                _frozen(architecture.build_with(weights, str(path))),
                scale,
                architecture,
                str(metadata["env_id"]),
                float(metadata["eps_unit"]),
                bool(metadata["director"]),
                Aimed(int(inner["steps"]), float(inner["step_share"]), inner["p"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SortRLError(f"{path}: incomplete or foreign ({error}). Train the adversary again.") from error


def train_adversary(
    policy: Policy,
    env_id: str,
    eps: float,
    steps: int = 200_000,
    seed: int = 0,
    directory: str | Path | None = None,
    progress: Progress | None = None,
    *,
    director: bool = True,
    inner: Aimed | None = None,
) -> LearnedAdversary:
    """Train an adversary by PPO to lower the return of ``policy``, which stays as it is.

    Its world is the environment with the victim in it: it sees the victim's unit-space observation and clean scores, and
    its reward is minus the environment's. A ``director`` names the action the victim is to take and leaves the input to
    ``inner`` (as PA-AD does; for a greedy victim nothing but the action matters, so no strategy is lost). Without, it
    makes the perturbation itself, one output per input (as SA-RL does), and needs no gradient of the victim. The most
    harmful adversary met on the way is returned, judged without noise on episodes of its own, and saved if ``directory``
    is given. ``progress`` is called after each rollout with ``step``, ``total`` and the victim's recent ``return``.
    """
    if not 0 < eps < float("inf") or steps < 1:
        raise SortRLError(
            f"train_adversary: eps={eps}, steps={steps}; expected a finite eps > 0 and at least one step."
        )
    from stable_baselines3 import PPO  # slow to import, and only needed while training
    from stable_baselines3.common.vec_env import VecNormalize

    from sortrl.attacks.siege import Siege

    info = describe(env_id)
    plan = _Plan(info.env_id, float(eps), director, inner or Aimed(steps=2, step_share=0.6))
    outputs = info.n_actions if director else info.obs_size
    trials = np.random.default_rng([seed, 5]).integers(2**31, size=TRIALS).tolist()
    with one_thread(), generators_restored():
        siege = Siege(policy, env_id, eps, SLOTS, seed, outputs, features, plan.strike)
        env = VecNormalize(siege, gamma=GAMMA, clip_obs=FEATURE_CLIP)
        model = PPO(
            "MlpPolicy",
            env,
            learning_rate=LEARNING_RATE,
            n_steps=ROLLOUT,
            batch_size=BATCH,
            n_epochs=EPOCHS,
            gamma=GAMMA,
            use_sde=True,
            policy_kwargs={"net_arch": list(HIDDEN), "log_std_init": FIRST_LOG_STD},
            seed=seed,
            device="cpu",
        )
        best, lowest = plan.adversary(model), float("inf")
        rollouts = max(1, steps // (SLOTS * ROLLOUT))

        def judge(*_: Any) -> bool:
            """Called at each step: now and then, keep the adversary as it stands if none before did more harm."""
            nonlocal best, lowest
            done, within = divmod(model.num_timesteps, SLOTS * ROLLOUT)
            if within == 0 and (done % max(1, rollouts // JUDGEMENTS) == 0 or done >= rollouts):
                adversary = plan.adversary(model)
                score = float(greedy_returns(_Besieged(policy, adversary, siege), env_id, trials).mean())
                if score < lowest:
                    best, lowest = adversary, score
            if within == 0 and progress is not None and siege.finished:
                progress({"step": model.num_timesteps, "total": steps, "return": float(np.mean(siege.finished))})
            return True

        try:
            model.learn(steps, callback=judge)
        finally:
            siege.close()
    if directory is not None:
        best.save(directory)
    return best


@dataclass(frozen=True)
class _Plan:
    """What the outputs of the network under training are used for."""

    env_id: str
    eps_unit: float
    director: bool
    inner: Aimed

    def strike(self, outputs: Tensor) -> Outputs:
        return Outputs(outputs, self.director, self.inner)

    def adversary(self, model: Any) -> LearnedAdversary:
        """The actor as it stands, with the statistics that scale its inputs."""
        actor = [*model.policy.mlp_extractor.policy_net.parameters(), *model.policy.action_net.parameters()]
        seen = model.env.obs_rms
        architecture = Architecture((len(seen.mean),), len(actor[-1]), HIDDEN, "Tanh")
        network = architecture.build()
        with torch.no_grad():
            for parameter, trained in zip(network.parameters(), actor, strict=True):
                parameter.copy_(trained)
        scale = Normalizer(seen.mean, np.sqrt(seen.var + model.env.epsilon), FEATURE_CLIP)
        return LearnedAdversary(
            _frozen(network), scale, architecture, self.env_id, self.eps_unit, self.director, self.inner
        )


class _Besieged:
    """The victim as its own environment knows it while the adversary alters what it sees."""

    def __init__(self, victim: Policy, adversary: Attack, siege: Siege) -> None:
        self.victim, self.adversary, self.siege = victim, adversary, siege

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        siege = self.siege
        unit = self.victim.normalize(obs)
        return self.adversary(self.victim, unit, siege.eps_unit, siege.low, siege.high).action, None


def features(unit: Tensor, scores: Tensor) -> Tensor:
    """What an adversary sees of a state: the victim's input, and its scores up to a common shift."""
    return torch.cat([unit.flatten(1), scores - scores.mean(1, keepdim=True)], dim=1)


def _frozen(network: nn.Module) -> nn.Module:
    return network.eval().requires_grad_(False)

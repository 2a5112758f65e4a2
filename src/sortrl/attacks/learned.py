"""Learned adversaries: a network trained by RL to lower the victim's return (SA-RL and PA-AD style)."""

from __future__ import annotations

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
from sortrl.core.progress import Progress
from sortrl.core.records import Policy
from sortrl.core.seeding import generators_restored, one_thread
from sortrl.envs import describe, greedy_returns
from sortrl.nets.architecture import Architecture

if TYPE_CHECKING:
    from sortrl.attacks.adversary_env import AdversaryEnv  # Stable-Baselines3 is slow to import

FILE_NAME = "adversary.safetensors"
FORMAT = "sortrl-adversary-1"

# PPO. Noise that depends on the state and is kept for a whole rollout (gSDE) explores far better than fresh noise at each
# step, which averages out: a sustained bias or an oscillation is what makes a controller fail.
SLOTS, ROLLOUT, BATCH, EPOCHS = 32, 128, 512, 6
LEARNING_RATE, GAMMA, FIRST_LOG_STD = 1e-3, 0.998, -0.5  # a controller fails only after hundreds of perturbed steps
HIDDEN = (64, 64)
JUDGEMENTS, TRIALS = 8, 16  # evaluations of the adversary during its training, and episodes of each
FEATURE_CLIP = 10.0


@dataclass(frozen=True)
class Outputs(Attack):
    """The outputs of an adversary's network for a batch of states, as an attack.

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

    Its environment contains the victim: it observes the victim's unit-space observation and clean scores, and
    its reward is minus the environment's. A ``director`` names the action the victim is to take and leaves the input to
    ``inner`` (as PA-AD does; for a greedy victim nothing but the action matters, so no strategy is lost). Without, it
    makes the perturbation itself, one output per input (as SA-RL does), and needs no gradient of the victim. The checkpoint
    with the lowest victim return, evaluated without exploration noise on separate episodes, is returned, and saved if ``directory``
    is given. ``progress`` is called after each rollout with ``step``, ``total`` and the victim's recent ``return``.
    """
    if not 0 < eps < float("inf") or steps < 1:
        raise SortRLError(
            f"train_adversary: eps={eps}, steps={steps}; expected a finite eps > 0 and at least one step."
        )
    from stable_baselines3 import PPO  # slow to import, and only needed while training
    from stable_baselines3.common.vec_env import VecNormalize

    from sortrl.attacks.adversary_env import AdversaryEnv

    info = describe(env_id)
    plan = _Plan(info.env_id, float(eps), director, inner or Aimed(steps=2, step_share=0.6))
    outputs = info.n_actions if director else info.obs_size
    trials = np.random.default_rng([seed, 5]).integers(2**31, size=TRIALS).tolist()
    with one_thread(), generators_restored():
        victims = AdversaryEnv(policy, env_id, eps, SLOTS, seed, outputs, features, plan.strike)
        env = VecNormalize(victims, gamma=GAMMA, clip_obs=FEATURE_CLIP)
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
            """Callback of each step: at regular intervals, evaluate the adversary and keep it if it is the best so far."""
            nonlocal best, lowest
            done, within = divmod(model.num_timesteps, SLOTS * ROLLOUT)
            if within == 0 and (done % max(1, rollouts // JUDGEMENTS) == 0 or done >= rollouts):
                adversary = plan.adversary(model)
                score = float(greedy_returns(_Attacked(policy, adversary, victims), env_id, trials).mean())
                if score < lowest:
                    best, lowest = adversary, score
            if within == 0 and progress is not None and victims.finished:
                progress({"step": model.num_timesteps, "total": steps, "return": float(np.mean(victims.finished))})
            return True

        try:
            model.learn(steps, callback=judge)
        finally:
            victims.close()
    if directory is not None:
        best.save(directory)
    return best


@dataclass(frozen=True)
class _Plan:
    """How the outputs of the network in training become an attack, and the network an adversary."""

    env_id: str
    eps_unit: float
    director: bool
    inner: Aimed

    def strike(self, outputs: Tensor) -> Outputs:
        return Outputs(outputs, self.director, self.inner)

    def adversary(self, model: Any) -> LearnedAdversary:
        """The current actor, with the statistics that normalise its inputs."""
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


class _Attacked:
    """The victim with the adversary on its observations: ``predict`` takes clean ones."""

    def __init__(self, victim: Policy, adversary: Attack, env: AdversaryEnv) -> None:
        self.victim, self.adversary, self.env = victim, adversary, env

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        unit = self.victim.normalize(obs)
        return self.adversary(self.victim, unit, self.env.eps_unit, self.env.low, self.env.high).action, None


def features(unit: Tensor, scores: Tensor) -> Tensor:
    """What an adversary sees of a state: the victim's input, and its scores up to a common shift."""
    return torch.cat([unit.flatten(1), scores - scores.mean(1, keepdim=True)], dim=1)


def _frozen(network: nn.Module) -> nn.Module:
    return network.eval().requires_grad_(False)

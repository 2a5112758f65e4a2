"""Returns, clean and under attack: a fixed list of seeded episodes, all played side by side to their end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sortrl.attacks import Aimed, Attack
from sortrl.attacks.valid import valid_range
from sortrl.envs import EnvSlots
from sortrl.errors import SortRLError
from sortrl.nets import CertifiedPolicy
from sortrl.records import EvalResult, Policy
from sortrl.timing import Timing

__all__ = ["episode_seeds", "evaluate", "valid_range"]

Progress = Callable[[dict[str, Any]], None]
SEEDS_PER_RUN = 1_000_000  # episodes of different run seeds never coincide


@dataclass(frozen=True)
class _Answer:
    """What is done in a state: the action, the radius at it, and whether an attack was tried and changed it."""

    action: int
    radius: float | None
    attacked: bool
    changed: bool
    repeats: bool
    """Whether the same observation would be answered in the same way again: nothing was drawn at random."""


@dataclass
class _Episode:
    """One episode under way."""

    seed: int
    obs: npt.NDArray[Any]
    answer: _Answer | None = None
    """To ``obs``, once it is known."""
    total: float = 0.0
    radii: list[float] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    changed: int = 0
    attacked: int = 0

    def __post_init__(self) -> None:
        self.obs = self.obs.copy()  # the environment may write into its own

    def play(self, answer: _Answer) -> None:
        """Note what is about to be done."""
        self.actions.append(answer.action)
        self.attacked += answer.attacked
        self.changed += answer.changed
        if answer.radius is not None:
            self.radii.append(answer.radius)

    def see(self, obs: npt.NDArray[Any]) -> None:
        """The next observation. A game that stands still asks the same question again, and gets the same answer."""
        if self.answer is not None and not (self.answer.repeats and np.array_equal(obs, self.obs)):
            self.answer = None
        self.obs = obs.copy()


def episode_seeds(seed: int, episodes: int) -> tuple[int, ...]:
    """The seeds of the episodes of an evaluation: the same for every policy, so that comparisons are paired."""
    if not 0 <= seed < 2000 or not 1 <= episodes <= SEEDS_PER_RUN:
        raise SortRLError(
            f"evaluate: seed is {seed} and episodes {episodes}, expected 0 <= seed < 2000 and at least one episode."
        )
    return tuple(seed * SEEDS_PER_RUN + index for index in range(episodes))


def evaluate(
    policy: Policy,
    env: str,
    attack: Attack | None = None,
    eps: float = 0.0,
    episodes: int = 20,
    seed: int = 0,
    *,
    when: Timing | None = None,
    slots: int = 64,
    name: str | None = None,
    skip_certified: bool = True,
    progress: Progress | None = None,
) -> EvalResult:
    """Play ``episodes`` greedy episodes, each observation perturbed by ``attack`` within ``eps`` (unit space).

    The list of episodes is fixed and each is played to its end: nothing favours short ones. With ``skip_certified`` the
    attack is not run on states that are certified at eps, where it provably cannot change the action; the returns are
    the same, sooner. So are they where an observation comes twice in a row and nothing random is involved: the answer is
    the same, and is not computed again. ``when`` limits the attack to moments of its choice (:mod:`sortrl.timing`); default: every step.

    >>> from sortrl.teachers import load_teacher
    >>> pushes_right = load_teacher(lambda obs: np.ones(len(obs), dtype=int), env_id="CartPole-v1")
    >>> evaluate(pushes_right, "CartPole-v1", episodes=3).mean < 20
    True
    """
    if not 0 <= eps < float("inf"):
        raise SortRLError(f"evaluate: eps is {eps}, expected a finite number >= 0 in the policy's input units.")
    seeds = episode_seeds(seed, episodes)
    choose = None if when is None else when.begin(policy, env)
    player = _Player(policy, attack, eps, skip_certified, choose, seed)
    finished: dict[int, _Episode] = {}
    started = time.monotonic()
    with EnvSlots(env, min(slots, episodes)) as envs:
        player.low, player.high = valid_range(policy, envs.info)
        waiting = list(seeds)[::-1]
        playing = {slot: _Episode(s, envs.reset(slot, s)) for slot in range(len(envs)) for s in [waiting.pop()]}
        while playing:
            player.answer([episode for episode in playing.values() if episode.answer is None])
            answers = [episode.answer for episode in playing.values() if episode.answer is not None]
            envs.begin(playing, np.array([answer.action for answer in answers]))
            for (slot, episode), answer in zip(list(playing.items()), answers, strict=True):
                episode.play(answer)
                obs, reward, done = envs.step(slot, answer.action)
                episode.see(obs)
                episode.total += reward
                if done:
                    finished[episode.seed] = playing.pop(slot)
                    if waiting:
                        following = waiting.pop()
                        playing[slot] = _Episode(following, envs.reset(slot, following))
                    if progress is not None:
                        progress({"episodes": len(finished), "total": episodes})
    ordered = [finished[s] for s in seeds]
    lengths = np.array([len(episode.actions) for episode in ordered])
    certified = isinstance(policy, CertifiedPolicy)
    return EvalResult(
        env_id=env,
        policy=str(name or getattr(policy, "name", type(policy).__name__)),
        attack="none" if attack is None else attack.name,
        eps_unit=float(eps),
        seeds=seeds,
        returns=np.array([episode.total for episode in ordered]),
        lengths=lengths,
        changed_share=sum(episode.changed for episode in ordered) / int(lengths.sum()),
        radii=np.concatenate([episode.radii for episode in ordered]) if certified else None,
        queries=player.queries,
        gradients=player.gradients,
        seconds=time.monotonic() - started,
        attacked_share=sum(episode.attacked for episode in ordered) / int(lengths.sum()),
        timing="every step" if when is None else when.name,
        attack_parameters=_parameters(attack) | ({"when": _parameters(when)} if when is not None else {}),
    )


class _Player:
    """Policy and attack together: what is done in which state."""

    def __init__(
        self, policy: Policy, attack: Attack | None, eps: float, skip_certified: bool, choose: Any, seed: int
    ) -> None:
        self.policy, self.eps, self.skip_certified, self.choose = policy, eps, skip_certified, choose
        self.attack = attack if eps > 0 else None
        self.generator = torch.Generator().manual_seed(seed)
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.queries = self.gradients = 0
        # A callable, or an agent that samples, may answer the same question in another way; a known network does not.
        known = isinstance(policy, CertifiedPolicy) or getattr(policy, "architecture", None) is not None
        self.repeats = known and choose is None

    def answer(self, episodes: list[_Episode]) -> None:
        """Decide what to do in the states that ``episodes`` are in."""
        if not episodes:
            return
        unit = self.policy.normalize(np.stack([episode.obs for episode in episodes]))
        actions, radii = _decide(self.policy, unit)
        exposed, attack = np.arange(len(unit)), self.attack
        if radii is not None and self.skip_certified:
            exposed = np.flatnonzero(radii <= self.eps)
        if attack is None:
            exposed = exposed[:0]
        elif self.choose is not None and len(exposed):
            picked, aims = self.choose(unit[torch.from_numpy(exposed)], [episodes[place] for place in exposed])
            exposed, attack = exposed[picked], _aimed(attack, aims)
        attacked, changed = np.zeros(len(unit), bool), np.zeros(len(unit), bool)
        drawn = self.generator.get_state()
        if attack is not None and len(exposed):
            result = attack(self.policy, unit[torch.from_numpy(exposed)], self.eps, self.low, self.high, self.generator)
            actions[exposed], attacked[exposed], changed[exposed] = result.action, True, result.changed
            self.queries, self.gradients = self.queries + result.queries, self.gradients + result.gradients
        repeats = self.repeats and torch.equal(drawn, self.generator.get_state())
        for place, episode in enumerate(episodes):
            radius = None if radii is None else float(radii[place])
            episode.answer = _Answer(int(actions[place]), radius, bool(attacked[place]), bool(changed[place]), repeats)


def _parameters(value: Any) -> dict[str, Any]:
    """The fields of an attack or a timing as JSON; a policy or a network among them is named, not written out."""

    def plain(item: Any) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, tuple):
            return [plain(part) for part in item]
        if is_dataclass(item):
            return {"kind": type(item).__name__, **_parameters(item)}
        return str(getattr(item, "name", type(item).__name__))

    return {} if value is None else {part.name: plain(getattr(value, part.name)) for part in fields(value)}


def _aimed(attack: Attack, aims: npt.NDArray[np.int64] | None) -> Attack:
    """The attack to run: aimed where the timing names actions, which only a targeted attack can do."""
    if aims is None:
        return attack
    if not isinstance(attack, Aimed):
        raise SortRLError(f"This timing aims at one action per state, which {attack.name} cannot. Use attacks.Aimed().")
    return attack.at(aims)


@torch.no_grad()
def _decide(policy: Policy, unit: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
    """Actions and, where the policy has certificates, radii."""
    if isinstance(policy, CertifiedPolicy):
        certificate = policy.certify_unit(unit)
        return certificate.action.astype(np.int64), certificate.radius.astype(np.float64)
    return policy.scores(unit).argmax(1).numpy(), None

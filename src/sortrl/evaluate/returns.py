"""Returns, clean and under attack: a fixed list of seeded episodes, all played side by side to their end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sortrl.attacks import Aimed, Attack, by_name
from sortrl.attacks.schedule import Timing
from sortrl.attacks.valid import valid_range
from sortrl.core.errors import SortRLError
from sortrl.core.progress import Progress, bar
from sortrl.core.records import EvalResult, Policy
from sortrl.envs import EnvSlots, Episode, env_id_of, play_episodes
from sortrl.nets import CertifiedPolicy
from sortrl.teachers.load.load import Source, load_teacher

__all__ = ["episode_seeds", "evaluate", "evaluate_curve", "valid_range"]

SEEDS_PER_RUN = 1_000_000  # episodes of different run seeds never coincide
SMALL = 1 << 24  # weights x states below which one thread is faster than two


@dataclass(frozen=True)
class _Answer:
    """The decision in a state: action, certified radius, whether an attack was run and whether it changed the action."""

    action: int
    radius: float | None
    attacked: bool
    changed: bool
    repeats: bool
    """Whether the decision is deterministic, so that it can be reused when the observation recurs."""


class _Episode(Episode):
    """One episode under way at one eps."""

    def __init__(self, number: int, seed: int, obs: npt.NDArray[Any], eps: float) -> None:
        super().__init__(number, seed, obs)
        self.eps = eps
        self.answer: _Answer | None = None  # the decision for ``obs``, once it is known
        self.known: dict[bytes, _Answer] = {}  # deterministic decisions of this episode, by observation
        self.radii: list[float] = []
        self.actions: list[int] = []
        self.changed = self.attacked = 0
        self.queries = self.gradients = 0.0

    def decide(self) -> int:
        """Record the decision and return its action."""
        answer = self.answer
        assert answer is not None
        if answer.repeats:
            self.known[_key(self.obs)] = answer
        self.actions.append(answer.action)
        self.attacked += answer.attacked
        self.changed += answer.changed
        if answer.radius is not None:
            self.radii.append(answer.radius)
        return answer.action

    def see(self, obs: npt.NDArray[Any], reward: float) -> None:
        """Take the next observation; if it occurred before in this episode, reuse the decision."""
        super().see(obs, reward)
        self.answer = self.known.get(_key(obs))


def _key(obs: npt.NDArray[Any]) -> bytes:
    """Hash of an observation."""
    return hashlib.blake2b(obs.tobytes(), digest_size=16).digest()


def episode_seeds(seed: int, episodes: int) -> tuple[int, ...]:
    """The seeds of the episodes of an evaluation: the same for every policy, so that comparisons are paired."""
    if not 0 <= seed < 2000 or not 1 <= episodes <= SEEDS_PER_RUN:
        raise SortRLError(
            f"evaluate: seed is {seed} and episodes {episodes}, expected 0 <= seed < 2000 and at least one episode."
        )
    return tuple(seed * SEEDS_PER_RUN + index for index in range(episodes))


def evaluate(
    policy: Policy | Source,
    env: Any,
    attack: Attack | str | None = None,
    eps: float = 0.0,
    episodes: int = 20,
    seed: int = 0,
    *,
    when: Timing | None = None,
    slots: int = 64,
    name: str | None = None,
    skip_certified: bool = True,
    certify: bool | Sequence[float] = True,
    progress: Progress | None = None,
) -> EvalResult:
    """Play ``episodes`` greedy episodes, each observation perturbed by ``attack`` within ``eps`` (unit space).

    The list of episodes is fixed and each is played to its end, so that short episodes are not favoured. With ``skip_certified`` the
    attack is not run on states that are certified at eps, where it provably cannot change the action; the returns are
    the same. Decisions for observations that recur within an episode are reused where nothing random is involved.
    ``when`` limits the attack to steps that it chooses (:mod:`sortrl.attacks.schedule`). Without ``certify`` certificates are
    neither used nor recorded, which spares their time where only returns are asked for; with a few eps, rising, radii of clean play
    are only compared with those, and the largest that is certified is recorded.

    ``policy`` is one of sortrl's, or whatever :func:`sortrl.load_teacher` takes: a Stable-Baselines3 model or zip, a torch module, a
    callable. ``env`` is what ``robustify`` takes as env, and ``attack`` may be a name ("pgd-10"; :func:`sortrl.attacks.by_name`).

    >>> evaluate(lambda obs: np.ones(len(obs), dtype=int), "CartPole-v1", "noise", eps=0.1, episodes=3).mean < 20
    True
    """
    return evaluate_curve(
        policy,
        env,
        attack,
        (eps,),
        episodes,
        seed,
        when=when,
        slots=slots,
        name=name,
        skip_certified=skip_certified,
        certify=certify,
        progress=progress,
    )[0]


def evaluate_curve(
    policy: Policy | Source,
    env: Any,
    attack: Attack | str | None,
    eps_grid: Sequence[float],
    episodes: int = 20,
    seed: int = 0,
    *,
    when: Timing | None = None,
    slots: int = 64,
    name: str | None = None,
    skip_certified: bool = True,
    certify: bool | Sequence[float] = True,
    progress: Progress | None = None,
) -> list[EvalResult]:
    """:func:`evaluate` at several eps, one result each. The episodes of all of them are played side by side: a larger
    batch hardly costs a small network more time.

    Costs (queries, gradients, seconds) are divided among the results by attacked states.
    """
    if not eps_grid or len({*eps_grid}) < len(eps_grid) or not all(0 <= eps < float("inf") for eps in eps_grid):
        raise SortRLError(
            f"evaluate: eps is {', '.join(map(str, eps_grid)) or 'missing'}, expected a finite number >= 0 in the policy's "
            "input units, or several that differ."
        )
    env = env_id_of(env)
    policy = policy if isinstance(policy, Policy) else load_teacher(policy, env)
    attack = by_name(attack) if isinstance(attack, str) else attack
    seeds = episode_seeds(seed, episodes)
    total = len(seeds) * len(eps_grid)
    slots = min(slots, total)
    choose = None if when is None else when.begin(policy, env)
    certify = certify if isinstance(policy, CertifiedPolicy) else False
    player = _Player(policy, attack, skip_certified, certify, choose, seed)
    finished = 0

    def act(episodes: list[_Episode]) -> list[int]:
        player.answer([episode for episode in episodes if episode.answer is None])
        return [episode.decide() for episode in episodes]

    def ended(_: _Episode) -> None:
        nonlocal finished
        finished += 1
        report({"episodes": finished, "total": total})

    started = time.monotonic()
    shown = bar(f"Playing {env}") if progress is None else nullcontext(progress)
    with EnvSlots(env, slots) as envs, _threads_for(policy, slots), shown as report:
        player.low, player.high = valid_range(policy, envs.info)
        played = play_episodes(
            envs,
            [one for _ in eps_grid for one in seeds],
            act,
            lambda number, one, obs: _Episode(number, one, obs, eps_grid[number // len(seeds)]),
            ended,
        )
    seconds = time.monotonic() - started
    steps = sum(episode.steps for episode in played)
    points = [played[start : start + len(seeds)] for start in range(0, total, len(seeds))]
    label = str(name or getattr(policy, "name", type(policy).__name__))
    return [_result(certify is not False, env, attack, when, label, point, seconds / steps) for point in points]


def _result(
    certified: bool,
    env: str,
    attack: Attack | None,
    when: Timing | None,
    name: str,
    episodes: list[_Episode],
    seconds_per_step: float,
) -> EvalResult:
    """The record of one point; where eps is 0, nothing was attacked."""
    attack = attack if episodes[0].eps > 0 else None
    lengths = np.array([episode.steps for episode in episodes])
    steps = int(lengths.sum())
    return EvalResult(
        env_id=env,
        policy=name,
        attack="none" if attack is None else attack.name,
        eps_unit=float(episodes[0].eps),
        seeds=tuple(episode.seed for episode in episodes),
        returns=np.array([episode.total for episode in episodes]),
        lengths=lengths,
        changed_share=sum(episode.changed for episode in episodes) / steps,
        radii=np.concatenate([episode.radii for episode in episodes]) if certified else None,
        queries=round(sum(episode.queries for episode in episodes)),
        gradients=round(sum(episode.gradients for episode in episodes)),
        seconds=seconds_per_step * steps,
        attacked_share=sum(episode.attacked for episode in episodes) / steps,
        timing="every step" if when is None else when.name,
        attack_parameters=_parameters(attack) | ({"when": _parameters(when)} if when is not None else {}),
    )


@contextmanager
def _threads_for(policy: Policy, states: int) -> Iterator[None]:
    """One thread for a network so small that more threads would slow it down."""
    threads = torch.get_num_threads()
    if isinstance(policy, nn.Module) and len(policy.obs_shape) == 1:
        weights = sum(weight.numel() for weight in policy.parameters())
        torch.set_num_threads(1 if weights * states < SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Player:
    """The policy and the attack on it: decides in batches of states."""

    def __init__(
        self, policy: Policy, attack: Attack | None, skip_certified: bool, certify: Any, choose: Any, seed: int
    ) -> None:
        self.policy, self.attack, self.skip_certified, self.choose = policy, attack, skip_certified, choose
        self.certify: bool | Sequence[float] = certify
        self.generator = torch.Generator().manual_seed(seed)
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        # A callable, or an agent that samples, may be random; a known network is deterministic.
        known = isinstance(policy, CertifiedPolicy) or getattr(policy, "architecture", None) is not None
        self.repeats = known and choose is None

    def answer(self, episodes: list[_Episode]) -> None:
        """Decide for the current states of ``episodes``."""
        if not episodes:
            return
        unit = self.policy.normalize(np.stack([episode.obs for episode in episodes]))
        eps, attack = np.array([episode.eps for episode in episodes]), self.attack
        actions, radii = _decide(self.policy, unit, eps, self.certify)
        within_reach = eps > 0 if radii is None or not self.skip_certified else (eps > 0) & (radii <= eps)
        exposed = np.flatnonzero(within_reach)
        if attack is None:
            exposed = exposed[:0]
        elif self.choose is not None and len(exposed):
            picked, aims = self.choose(unit[torch.from_numpy(exposed)], [episodes[place] for place in exposed])
            exposed, attack = exposed[picked], _aimed(attack, aims)
        attacked, changed = np.zeros(len(unit), bool), np.zeros(len(unit), bool)
        drawn = self.generator.get_state()
        if attack is not None and len(exposed):
            budgets = torch.from_numpy(eps[exposed])
            result = attack(self.policy, unit[torch.from_numpy(exposed)], budgets, self.low, self.high, self.generator)
            actions[exposed], attacked[exposed], changed[exposed] = result.action, True, result.changed
            for index in exposed:
                episodes[index].queries += result.queries / len(exposed)
                episodes[index].gradients += result.gradients / len(exposed)
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

    if value is None:
        return {}
    if not is_dataclass(value):  # an attack of somebody's own
        return {name: plain(item) for name, item in vars(value).items() if not name.startswith("_")}
    return {part.name: plain(getattr(value, part.name)) for part in fields(value)}


def _aimed(attack: Attack, aims: npt.NDArray[np.int64] | None) -> Attack:
    """The attack to run: aimed where the timing names actions, which only a targeted attack can do."""
    if aims is None:
        return attack
    if not isinstance(attack, Aimed):
        raise SortRLError(f"This timing aims at one action per state, which {attack.name} cannot. Use attacks.Aimed().")
    return attack.at(aims)


@torch.no_grad()
def _decide(
    policy: Policy, unit: Tensor, eps: npt.NDArray[np.float64], certify: bool | Sequence[float]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64] | None]:
    """Actions and, if asked for, certified radii: of states to be attacked at ``eps`` only whether they are above it."""
    if certify is False:
        return policy.scores(unit).argmax(1).numpy(), None
    action, radius = np.zeros(len(unit), np.int64), np.zeros(len(unit))
    assert isinstance(policy, CertifiedPolicy)
    for part, attacked in ((np.flatnonzero(eps == 0), False), (np.flatnonzero(eps > 0), True)):
        if not len(part):
            continue
        states = unit[torch.from_numpy(part)]
        if attacked or certify is True:
            at = torch.from_numpy(eps[part]) if attacked else None
            certificate = policy.certify_unit(states, at)
            action[part], radius[part] = certificate.action, certificate.radius
        else:
            action[part], radius[part] = _compared(policy, states, np.asarray(certify, np.float64))
    return action, radius


def _compared(
    policy: CertifiedPolicy, unit: Tensor, levels: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Actions, and the largest of the rising ``levels`` at which each is certified, by halving; or less than the first."""
    proven, failed = np.full(len(unit), -1), np.full(len(unit), len(levels))
    radius = np.zeros(len(unit))
    action = np.zeros(len(unit), np.int64)
    while (failed - proven).max() > 1:
        middle = np.clip((proven + failed) // 2, 0, len(levels) - 1)
        certificate = policy.certify_unit(unit, torch.from_numpy(levels[middle]))
        action, radius = certificate.action.astype(np.int64), np.maximum(radius, certificate.radius)
        holds = certificate.radius > levels[middle]
        proven, failed = np.where(holds, middle, proven), np.where(holds, failed, middle)
    return action, radius

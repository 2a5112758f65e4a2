"""States to learn from, each with the teacher's answer: from the teacher's own episodes or a student's (DAgger)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sortrl.core.errors import SortRLError
from sortrl.core.limits import require
from sortrl.core.records import Demonstrations, Transitions
from sortrl.data.starts import Starts
from sortrl.envs import EnvInfo, EnvSlots, describe
from sortrl.teachers.load.load import check_fit
from sortrl.teachers.teacher import Teacher

Progress = Callable[[dict[str, Any]], None]
_DRAWS = 24  # starts to choose from; one costs about as much as ten steps


class Actor(Protocol):
    """Who chooses the actions: a student, or anything with the Stable-Baselines3 ``predict``."""

    def predict(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]: ...


@dataclass(frozen=True)
class CollectConfig:
    """Which states to visit. The labels are always the teacher's greedy actions on clean observations."""

    states: int = 50_000
    """Number of states to collect."""
    exploration: float = 0.5
    """Share of the episodes in which actions are sampled (from the softmax of an actor-critic's scores) instead of
    greedy. A greedy agent sees few distinct states; a student that errs a little meets others."""
    temperature: float = 1.0
    """Softness of that sampling: above 1 explores more."""
    random_actions: float = 0.05
    """In exploring episodes, share of the steps with a uniformly random action. It is the only exploration of teachers
    whose scores are not logits (DQN, QR-DQN, callables)."""
    sticky: float = 0.0
    """In exploring episodes, share of the steps on which the action of the step before is played again, whatever was chosen."""
    eps_unit: float = 0.0
    """Act on observations perturbed by uniform noise, in the teacher's normalised units; each episode draws its own
    noise level between 0 and this. It covers the states that a disturbed agent reaches."""
    beta: float = 0.0
    """With an actor (DAgger): share of the steps on which the teacher acts in its place."""
    focus: float = 0.0
    """Share of the states, the last ones, that are spent on the starts that went worst so far; for tasks with few starts of
    which the best episodes are wanted (:mod:`sortrl.baselines.memory.remember`)."""
    spread: bool = False
    """Before that, begin episodes where the fewest began so far, for the same purpose; needs an environment that numbers its
    starts (Atari)."""
    slots: int = 32
    """Episodes played side by side. Fewer are used when `states` is too small for them to reach their end."""

    def __post_init__(self) -> None:
        for name in ("exploration", "random_actions", "sticky", "beta", "focus"):
            if not 0 <= getattr(self, name) <= 1:
                raise SortRLError(f"CollectConfig: {name} is {getattr(self, name)}, expected a share between 0 and 1.")
        for name in ("states", "slots"):
            if getattr(self, name) < 1:
                raise SortRLError(f"CollectConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if not self.temperature > 0 or not 0 <= self.eps_unit < float("inf"):
            raise SortRLError(
                f"CollectConfig: temperature is {self.temperature}, expected above 0; "
                f"eps_unit is {self.eps_unit}, expected 0 or more."
            )


def collect(
    teacher: Teacher,
    env_id: str,
    config: CollectConfig | None = None,
    seed: int = 0,
    actor: Actor | None = None,
    progress: Progress | None = None,
) -> Demonstrations:
    """Play episodes and record the teacher's greedy answer to every state met.

    Without an ``actor`` the teacher plays, exploring as the configuration says. With one (DAgger) the actor plays, so
    that the states are those the student itself reaches. The same seed gives the same data bit for bit; episodes of
    different seeds are different. ``progress`` is called with ``step`` and ``total``.

    >>> from sortrl.teachers import load_teacher
    >>> teacher = load_teacher(lambda obs: (obs[:, 2] + obs[:, 3] > 0).astype(int), env_id="CartPole-v1")
    >>> demos = collect(teacher, "CartPole-v1", CollectConfig(states=200))
    >>> len(demos), demos.obs.shape, bool((demos.actions == demos.logits.argmax(1)).all())
    (200, (200, 4), True)
    """
    config = config or CollectConfig()
    info = describe(env_id)
    check_fit(teacher, info)
    # Every state is held twice while the parts are joined: observation, scores, and about 40 bytes of numbers.
    per_state = info.obs_size * info.obs_dtype.itemsize + 4 * info.n_actions + 40
    require(f"{config.states} states of {info.env_id}", 2 * config.states * per_state, "collect fewer states")
    # Side-by-side episodes that are all cut early would show only their beginnings.
    n_slots = min(config.slots, max(1, config.states // (2 * info.max_steps))) if info.max_steps else config.slots
    with EnvSlots(env_id, min(n_slots, config.states)) as slots:
        recorder = _Recorder(teacher, info, slots, config, seed)
        while recorder.n_states < config.states:
            recorder.play(actor)
            if progress is not None:
                progress({"step": recorder.n_states, "total": config.states})
        return recorder.finish(info.env_id)


class _Recorder:
    """The episodes under way and the steps recorded so far."""

    def __init__(self, teacher: Teacher, info: EnvInfo, slots: EnvSlots, config: CollectConfig, seed: int) -> None:
        self.teacher, self.info, self.slots, self.config, self.seed = teacher, info, slots, config, seed
        self.rng = np.random.default_rng([seed, 1])
        self.scale = teacher.normalizer.scale.cpu().numpy()
        self.n_episodes = 0
        self.n_states = 0
        n = len(slots)
        self.obs = np.zeros((n, *info.obs_shape), info.obs_dtype)
        self.episode = np.zeros(n, np.int64)
        self.exploring = np.zeros(n, bool)
        self.eps_unit = np.zeros(n)
        self.before = np.full(n, -1)  # the actions of the last step; none at the start of an episode
        self.starts, self.start_of, self.total = Starts(), [b""] * n, np.zeros(n)
        self.numbers: list[int] = []  # of the episodes' starts
        # Filled row by row: a hundred thousand images are held once, and twice only while they are put in order.
        kinds: dict[str, type[np.generic]] = {
            "labels": np.int64,
            "episodes": np.int64,
            "played": np.int64,
            "rewards": np.float32,
        }
        kinds |= {"terminated": np.bool_, "truncated": np.bool_}
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(config.states, kind) for name, kind in kinds.items()
        }
        self.columns["obs"] = np.zeros((config.states, *info.obs_shape), info.obs_dtype)
        self.columns["logits"] = np.zeros((config.states, info.n_actions), np.float32)
        self.final_obs: dict[int, npt.NDArray[Any]] = {}
        for slot in range(n):
            self.start(slot)

    def start(self, slot: int) -> None:
        """Begin the next episode, whose seed depends only on the seed of the collection and the episode's number; or, in
        the part that is focused, a start that went badly."""
        episode = self.n_episodes
        self.n_episodes += 1
        # Hashed, so that no episode of a collection is also one of an evaluation, which counts up from its own seed.
        env_seed = int(np.random.SeedSequence([self.seed, 2, episode]).generate_state(1)[0] >> 1)
        if self.n_states > (1.0 - self.config.focus) * self.config.states:
            env_seed = self.starts.worst()
        elif self.config.spread:
            env_seed = self._least_tried(slot, episode)
        self.obs[slot] = self.slots.reset(slot, env_seed)
        self.start_of[slot], self.total[slot] = self._begun(slot, env_seed), 0.0
        self.episode[slot], self.before[slot] = episode, -1
        self.exploring[slot] = self.rng.random() < self.config.exploration
        self.eps_unit[slot] = self.rng.random() * self.config.eps_unit

    def _least_tried(self, slot: int, episode: int) -> int:
        """Of a few seeds the one whose start was tried least often; where starts have no numbers, the first."""
        draws = np.random.SeedSequence([self.seed, 4, episode]).generate_state(_DRAWS) >> 1
        tries = []
        for env_seed in draws:
            self.slots.reset(slot, int(env_seed))
            tries.append(self.numbers.count(int(self.slots.starts[slot])))
            if tries[-1] == 0 or self.slots.starts[slot] < 0:
                break
        return int(draws[int(np.argmin(tries))])

    def _begun(self, slot: int, env_seed: int) -> bytes:
        self.numbers.append(int(self.slots.starts[slot]))
        return self.starts.begin(self.obs[slot], env_seed, self.numbers[-1])

    def play(self, actor: Actor | None) -> None:
        """One step of every slot (of as many as are still needed)."""
        n = min(len(self.slots), self.config.states - self.n_states)
        now = {name: column[self.n_states : self.n_states + n] for name, column in self.columns.items()}
        now["obs"][:], now["episodes"][:] = self.obs[:n], self.episode[:n]
        logits = now["logits"][:] = self.scores(self.obs)[:n]
        now["labels"][:] = logits.argmax(axis=1)
        played = now["played"][:] = self.before[:n] = self.choose(logits, actor)
        self.slots.begin(range(n), played)
        for slot in range(n):
            self.obs[slot], now["rewards"][slot], done = self.slots.step(slot, int(played[slot]))
            now["terminated"][slot], now["truncated"][slot] = self.slots.terminated[slot], self.slots.truncated[slot]
            self.total[slot] += now["rewards"][slot]
            if done:
                self.final_obs[int(self.episode[slot])] = self.obs[slot].copy()
                self.starts.end(self.start_of[slot], float(self.total[slot]))
                self.start(slot)
        self.n_states += n

    def scores(self, obs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            result: npt.NDArray[np.float32] = self.teacher.scores(self.teacher.normalize(obs)).float().cpu().numpy()
        return result

    def choose(self, logits: npt.NDArray[Any], actor: Actor | None) -> npt.NDArray[np.int64]:
        """The actions to play, which need not be the labels."""
        config, n, n_actions = self.config, len(logits), self.info.n_actions
        draws, random_actions = self.rng.random((2, n)), self.rng.integers(n_actions, size=n)
        view = self.obs
        if config.eps_unit > 0:
            view = self.disturbed()
            logits = self.scores(view)[:n]  # of what the acting teacher sees; the labels stay those of the clean state
        greedy = sampled = logits.argmax(axis=1)
        if actor is not None:
            answer, _ = actor.predict(view)
            greedy = sampled = np.where(draws[0] < config.beta, greedy, np.asarray(answer)[:n])
        elif self.teacher.is_stochastic:
            # The arg-max of logits plus Gumbel noise is a sample of their softmax.
            sampled = (logits / config.temperature + self.rng.gumbel(size=logits.shape)).argmax(axis=1)
        sampled = np.where(draws[1] < config.random_actions, random_actions, sampled)
        if config.sticky > 0:  # nothing is drawn otherwise: collections of before stay what they were
            sampled = np.where((self.rng.random(n) < config.sticky) & (self.before[:n] >= 0), self.before[:n], sampled)
        chosen: npt.NDArray[np.int64] = np.where(self.exploring[:n], sampled, greedy).astype(np.int64)
        return chosen

    def disturbed(self) -> npt.NDArray[Any]:
        """The observations with each episode's noise, kept inside the valid range (where they were inside)."""
        sizes = self.eps_unit.reshape(-1, *[1] * len(self.info.obs_shape)) * self.scale
        noisy = self.obs + self.rng.uniform(-1.0, 1.0, self.obs.shape) * sizes
        low, high = np.minimum(self.info.valid_low, self.obs), np.maximum(self.info.valid_high, self.obs)
        noisy = np.clip(noisy, low, high)
        integral = np.issubdtype(self.obs.dtype, np.integer)
        view: npt.NDArray[Any] = (np.rint(noisy) if integral else noisy).astype(self.obs.dtype)
        return view

    def finish(self, env_id: str) -> Demonstrations:
        """Everything recorded, ordered by episode and time. Episodes that were cut here count as truncated."""
        order = np.argsort(self.columns["episodes"], kind="stable")
        for name in self.columns:
            self.columns[name] = self.columns[name][order]
        episodes, terminated = self.columns["episodes"], self.columns["terminated"]
        for slot, episode in enumerate(self.episode):
            self.final_obs.setdefault(int(episode), self.obs[slot].copy())
        last = np.append(episodes[1:] != episodes[:-1], True)
        truncated = self.columns["truncated"] | (last & ~terminated)
        final_obs = np.stack([self.final_obs[int(episode)] for episode in episodes[last]])
        # Episodes started by the last step have no states; numbering skips them by itself.
        played, rewards = self.columns["played"], self.columns["rewards"]
        starts = np.array([self.numbers[int(episode)] for episode in episodes[last]], np.int64)
        transitions = Transitions(played, rewards, terminated, truncated, final_obs, starts)
        obs, labels, logits = self.columns["obs"], self.columns["labels"], self.columns["logits"]
        return Demonstrations(env_id, obs, labels, logits, episodes, transitions)

"""How to train a teacher: its hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sortrl.core.errors import SortRLError

Algorithm = Literal["ppo", "dqn", "pqn"]


@dataclass(frozen=True)
class TeacherConfig:
    """Hyper-parameters of a teacher's training. Fields marked PPO or DQN matter for that algorithm alone."""

    algorithms: ClassVar[tuple[Algorithm, ...]] = ("ppo", "dqn")

    algorithm: Algorithm = "ppo"
    """PPO learns a policy; DQN learns action values."""
    total_steps: int = 500_000
    """Environment steps at most."""
    target_return: float | None = None
    """Stop once the greedy agent reaches this mean return, confirmed on fresh episodes. None: use all the steps."""
    eval_every: int = 25_000
    """Steps between greedy evaluations, which also are the points a killed training resumes from."""
    eval_episodes: int = 20
    """Episodes of each evaluation."""
    confirm_episodes: int = 100
    """Fresh episodes on which a promising agent must hold its return before the training stops."""
    n_envs: int = 8
    """Environments played side by side."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""
    normalize_obs: bool = True
    """Standardise observations by their running mean and variance; eps is then in units of a standard deviation."""
    normalize_reward: bool = False
    """Scale rewards by the running deviation of the return (training only)."""
    learning_rate: float = 3e-4
    """Step size of Adam."""
    linear_decay: bool = False
    """Let the step size (and PPO's clip range) fall linearly to zero over `total_steps`."""
    gamma: float = 0.99
    """Discount factor."""
    batch_size: int = 64
    """Samples per gradient step."""
    n_steps: int = 256
    """PPO: steps of each environment between updates."""
    n_epochs: int = 4
    """PPO: passes over the data of each update."""
    gae_lambda: float = 0.95
    """PPO: trade-off of bias and variance in the advantage estimate."""
    ent_coef: float = 0.0
    """PPO: weight of the entropy bonus."""
    clip_range: float = 0.2
    """PPO: how far the new policy may move from the old one."""
    buffer_size: int = 50_000
    """DQN: transitions kept for replay."""
    learning_starts: int = 1_000
    """DQN: steps before the first update."""
    train_freq: int = 16
    """DQN: steps of each environment between updates."""
    gradient_steps: int = 8
    """DQN: gradient steps per update."""
    target_update_interval: int = 600
    """DQN: environment steps between copies to the target network."""
    exploration_fraction: float = 0.2
    """DQN: part of the training over which random actions become rarer."""
    exploration_final_eps: float = 0.05
    """DQN: share of random actions after that."""

    def __post_init__(self) -> None:
        if self.algorithm not in self.algorithms:
            expected = " or ".join(map(repr, self.algorithms))
            raise SortRLError(f"{type(self).__name__}: algorithm is {self.algorithm!r}, expected {expected}.")
        run = ("total_steps", "eval_every", "eval_episodes", "confirm_episodes", "n_envs", "batch_size", "n_steps")
        updates = ("n_epochs", "buffer_size", "train_freq", "gradient_steps", "target_update_interval")
        for name in (*run, *updates):
            if getattr(self, name) < 1:
                raise SortRLError(f"TeacherConfig: {name} is {getattr(self, name)}, expected at least 1.")
        if not self.learning_rate > 0 or not self.clip_range > 0:
            raise SortRLError("TeacherConfig: learning_rate and clip_range must be positive.")
        for name in ("gamma", "gae_lambda", "exploration_fraction", "exploration_final_eps"):
            if not 0 <= getattr(self, name) <= 1:
                raise SortRLError(f"TeacherConfig: {name} is {getattr(self, name)}, expected between 0 and 1.")
        if self.algorithm == "ppo" and self.n_envs * self.n_steps < 2:
            raise SortRLError("TeacherConfig: PPO needs at least two samples per update; raise n_steps or n_envs.")


@dataclass(frozen=True)
class PQNConfig(TeacherConfig):
    """Parallel Q-learning on images (Gallici et al., 2024). Of the fields of PPO and DQN it uses `n_steps`, `n_epochs` and
    the two of exploration."""

    algorithms: ClassVar[tuple[Algorithm, ...]] = ("pqn",)

    algorithm: Algorithm = "pqn"
    total_steps: int = 5_000_000
    eval_every: int = 262_144
    eval_episodes: int = 10
    confirm_episodes: int = 20
    n_envs: int = 64
    n_steps: int = 32
    n_epochs: int = 2
    batch_size: int = 128
    learning_rate: float = 2.5e-4
    linear_decay: bool = True
    exploration_fraction: float = 0.05
    exploration_final_eps: float = 0.01
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of the convolutions."""
    hidden: tuple[int, ...] = (256,)
    q_lambda: float = 0.65
    """Weight of longer returns: 0 looks one step ahead, 1 to the end of the episode."""
    longest_run: int = 1
    """Random actions come in runs of one action. Half of them have length 1, a third more than 2, a tenth more than 9, and so
    on up to this: exploring in one direction finds rewards that lie many steps away."""
    clip_reward: bool = False
    """Learn from the signs of rewards."""
    reward_unit: float = 1.0
    """Rewards that are not clipped are divided by this."""
    episodic_life: bool = False
    """Count a lost life as the end of the episode."""
    half: bool = False
    """Compute all layers but the last in bfloat16 while training: a third faster on CPUs that have it, slower on others."""
    patience: int = 0
    """Count so many steps without a reward as the end of the game, in training and in grades (0: never)."""
    retry: float = 0.0
    """Probability that a lost game goes back by 100 to 200 steps instead of starting anew (Atari)."""
    sticky: float = 0.0
    """Share of the games that have sticky actions (Atari)."""
    stagger: int = 0
    """Random actions, at most, before the first step: games of equal length would else move in step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.n_envs * self.n_steps) % self.batch_size:
            raise SortRLError(
                f"PQNConfig: {self.n_envs} games of {self.n_steps} steps cannot be cut into batches of {self.batch_size}."
            )
        if not 0 <= self.q_lambda <= 1:
            raise SortRLError(f"PQNConfig: q_lambda is {self.q_lambda}, expected between 0 and 1.")
        for name in ("retry", "sticky"):
            if not 0 <= getattr(self, name) <= 1:
                raise SortRLError(f"PQNConfig: {name} is {getattr(self, name)}, expected between 0 and 1.")
        if self.patience < 0:
            raise SortRLError(f"PQNConfig: patience is {self.patience}, expected 0 or more steps.")
        if self.longest_run < 1 or self.stagger < 0 or not 0 < self.reward_unit < float("inf"):
            raise SortRLError("PQNConfig: longest_run must be at least 1, stagger 0 or more and reward_unit positive.")


@dataclass(frozen=True)
class ImagePPOConfig(TeacherConfig):
    """PPO on images, with the published settings for ProcGen (Cobbe et al., 2020) but for the network, which is small enough
    to be trained on one core, and for smaller batches, which make more of few steps."""

    algorithms: ClassVar[tuple[Algorithm, ...]] = ("ppo",)

    eval_every: int = 131_072
    eval_episodes: int = 40
    confirm_episodes: int = 200
    n_envs: int = 64
    n_steps: int = 256
    batch_size: int = 1024
    n_epochs: int = 3
    gamma: float = 0.999
    ent_coef: float = 0.01
    learning_rate: float = 5e-4
    normalize_obs: bool = False
    normalize_reward: bool = True
    hidden: tuple[int, ...] = ()
    channels: tuple[int, ...] = (16, 32, 32)
    """Channels of the three convolutions."""
    cnn_features: int = 256
    """Width of the layer between the convolutions and the hidden layers."""

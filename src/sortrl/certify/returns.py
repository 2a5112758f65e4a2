"""What an episode is worth at least, whatever is done to the observations: a search over every action that can be forced."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from sortrl.core.errors import SortRLError
from sortrl.envs import EnvInfo, Simulator, describe
from sortrl.nets import CertifiedPolicy

# The least reward of any step, from the tasks' definitions: it bounds what was not searched. Never guessed.
REWARD_FLOORS = {"CartPole-v0": 1.0, "CartPole-v1": 1.0, "Acrobot-v1": -1.0, "MountainCar-v0": -1.0}
NODES_AT_ONCE = 32  # states that share a forward pass


@dataclass(frozen=True)
class CertifiedReturn:
    """What is proven about the return of one episode when every observation may move by up to ``eps_unit`` in l_inf.

    ``exact``: every step is certified, so that the return is ``lower`` under any attack. Otherwise the first ``prefix``
    steps are, and the return is at least ``lower`` (None: nothing is proven, because no least reward is known and the
    search was cut short). ``complete``: all that can be forced was searched, with ``nodes`` steps of the simulator.
    """

    eps_unit: float
    seed: int
    exact: bool
    lower: float | None
    prefix: int
    nodes: int
    complete: bool


def certified_return(
    policy: CertifiedPolicy,
    env: str,
    eps: float,
    seed: int,
    *,
    budget: int = 2000,
    reward_floor: float | None = None,
) -> CertifiedReturn:
    """Bound the return of the episode that ``seed`` names, from below, at ``eps`` (unit space).

    Where a decision is not certified, every action that could be forced is played in a copy of the environment. The
    branch with the least possible return is always continued first, so that the bound rises as the search goes on; after
    ``budget`` simulated steps the least possible return among the open branches is the bound. What an open branch is
    worth at least follows from ``reward_floor``, the least reward of a step (known for CartPole, Acrobot, MountainCar).

    >>> from sortrl.nets import SortPolicy
    >>> policy = SortPolicy((4,), 2, width=16, depth=3)
    >>> certified_return(policy, "CartPole-v1", eps=0.0, seed=0).exact
    True
    """
    if not 0 <= eps < math.inf or budget < 1:
        raise SortRLError(
            f"certified_return: eps is {eps} and budget {budget}, expected a finite eps >= 0 in the policy's input units "
            "and a budget of at least 1 step."
        )
    info = describe(env)
    floor = REWARD_FLOORS.get(info.env_id) if reward_floor is None else reward_floor
    search = _Search(info, floor)
    search.open(Simulator(info.env_id, seed))
    while search.nodes < budget and (states := search.take(min(NODES_AT_ONCE, budget - search.nodes))):
        reachable = policy.reachable(policy.normalize(np.stack([state.obs for state in states])), eps)
        for state, actions in zip(states, reachable, strict=True):
            search.branch(state, [int(action) for action in np.flatnonzero(actions)])
    return search.result(float(eps), seed)


class _Search:
    """Open branches, ordered by what they are worth at least, and the least return of a finished one."""

    def __init__(self, info: EnvInfo, floor: float | None) -> None:
        self.info, self.floor = info, floor
        self.nodes = 0
        self.worst = math.inf
        self.prefix: int | None = None
        self.longest = 0
        self._open: list[tuple[float, int, int, Simulator]] = []
        self._count = itertools.count()

    def open(self, state: Simulator) -> None:
        if state.done:
            self.worst = min(self.worst, state.total)
            state.close()
        else:  # among equals the deepest, which ends soonest
            heapq.heappush(self._open, (self._least(state), -state.length, next(self._count), state))

    def _least(self, state: Simulator) -> float:
        """What an unfinished episode returns at least: one step follows for sure, at most those up to the time limit."""
        if self.floor is None or (self.floor < 0 and self.info.max_steps is None):
            return -math.inf
        steps = 1 if self.floor >= 0 else (self.info.max_steps or 0) - state.length
        return state.total + self.floor * steps

    def take(self, most: int) -> list[Simulator]:
        """The open branches with the least bounds; none when no open branch can be worse than what was found."""
        taken: list[Simulator] = []
        while len(taken) < most and self._open and self._open[0][0] < self.worst:
            taken.append(heapq.heappop(self._open)[-1])
        return taken

    def branch(self, state: Simulator, actions: list[int]) -> None:
        """Play each action; the last one in ``state`` itself, the others in copies."""
        if len(actions) > 1 and self.prefix is None:
            self.prefix = (
                state.length
            )  # one path leads to the first branching, so the first one met is the first in time
        twins = [*(state.fork() for _ in actions[1:]), state]
        for twin, action in zip(twins, actions, strict=True):
            _, reward, _ = twin.step(action)
            self.nodes += 1
            self.longest = max(self.longest, twin.length)
            if self.floor is not None and reward < self.floor:
                raise SortRLError(
                    f"{self.info.env_id} paid {reward} for a step, less than the declared least reward {self.floor}. "
                    "Pass the true one as reward_floor."
                )
            self.open(twin)

    def result(self, eps_unit: float, seed: int) -> CertifiedReturn:
        least = min([self.worst, *(entry[0] for entry in self._open)])
        complete = not self._open or self._open[0][0] >= self.worst
        for *_, state in self._open:
            state.close()
        return CertifiedReturn(
            eps_unit=eps_unit,
            seed=seed,
            exact=complete and self.prefix is None,
            lower=None if math.isinf(least) else least,
            prefix=self.longest if self.prefix is None else self.prefix,
            nodes=self.nodes,
            complete=complete,
        )

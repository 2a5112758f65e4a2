"""``sortrl certify``: what is proven about a policy on a fixed list of episodes, beside what an attack achieves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sortrl.attacks import Attack
from sortrl.certify import certificate_summary, certified_shares, fully_certified_episodes
from sortrl.certify.returns import CertifiedReturn, certified_return
from sortrl.core.errors import SortRLError
from sortrl.core.records import EvalResult
from sortrl.evaluate.returns import Progress, episode_seeds, evaluate
from sortrl.evaluate.watch import Episode, least_certain, pictures, play
from sortrl.nets import CertifiedPolicy
from sortrl.report.certificate import CertificateFigure, ReturnPoint, Scene, save_certificate

FIGURE = "certificate.png"


@dataclass(frozen=True)
class Returns:
    """The same episodes at one eps: what is proven about each, and what they returned under attack (None: not tried)."""

    eps_unit: float
    proven: tuple[CertifiedReturn, ...]
    attacked: EvalResult | None

    @property
    def lower(self) -> float | None:
        """The mean of the proven returns; None if nothing is proven about one of the episodes."""
        bounds = [episode.lower for episode in self.proven if episode.lower is not None]
        return float(np.mean(bounds)) if len(bounds) == len(self.proven) else None

    @property
    def exact_share(self) -> float:
        return float(np.mean([episode.exact for episode in self.proven]))

    def to_json(self) -> dict[str, Any]:
        keys = ("seed", "exact", "lower", "prefix", "nodes", "complete")
        return {
            "eps": self.eps_unit,
            "lower_mean": self.lower,
            "exact_share": self.exact_share,
            "episodes": [{key: getattr(episode, key) for key in keys} for episode in self.proven],
            "attacked": None if self.attacked is None else self.attacked.to_json(),
        }


@dataclass(frozen=True)
class Certification:
    """Everything that ``sortrl certify`` shows."""

    clean: EvalResult
    eps_units: tuple[float, ...]
    attack: str
    returns: tuple[Returns, ...]
    episode: Episode

    @property
    def shares(self) -> list[float]:
        return certified_shares(self.clean, self.eps_units)

    @property
    def whole_episodes(self) -> list[float]:
        return [fully_certified_episodes(self.clean, eps) for eps in self.eps_units]

    @property
    def median_radius(self) -> float:
        return float(np.median(np.asarray(self.clean.radii)))

    @property
    def least_certain(self) -> list[int]:
        return least_certain(self.episode)

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean.to_json(),
            **certificate_summary(self.clean, max(self.eps_units)),
            "at": list(self.eps_units),
            "episodes_certified": self.whole_episodes,
            "returns": [row.to_json() for row in self.returns],
            "least_certain": [
                {"step": step, "radius": float(self.episode.radii[step]), "action": int(self.episode.actions[step])}
                for step in self.least_certain
            ],
        }

    def save_figure(self, path: Path) -> str | None:
        """Draw certified share, radii, returns and the least certain states of the first episode.

        Returns why the states are not on it, where the environment cannot be drawn.
        """
        summary = certificate_summary(self.clean, max(self.eps_units))
        points = tuple(
            ReturnPoint(
                row.eps_unit,
                None if row.attacked is None else row.attacked.mean,
                0.0 if row.attacked is None else row.attacked.sem,
                row.lower,
            )
            for row in self.returns
        )
        compared = self.clean.returns[: len(self.returns[0].proven)]
        missing, shown = None, list[npt.NDArray[np.uint8]]()
        try:
            shown, _ = pictures(self.episode, self.least_certain)
        except SortRLError as error:
            missing = str(error)
        content = CertificateFigure(
            title=f"{self.clean.env_id}: what is certified"
            + (f"; below, the least certain states of episode {self.episode.seed}" if shown else ""),
            eps=tuple(summary["eps"]),
            share=tuple(summary["share"]),
            edges=tuple(summary["histogram"]["edges"]),
            counts=tuple(map(float, summary["histogram"]["counts"])),
            attack=self.attack,
            clean=float(compared.mean()),
            returns=points,
            scenes=tuple(
                Scene(
                    picture, f"step {step}: action {self.episode.actions[step]}, radius {self.episode.radii[step]:.2g}"
                )
                for picture, step in zip(shown, self.least_certain, strict=False)  # all of them or none
            ),
        )
        save_certificate(content, path)
        return missing


def certification(
    policy: CertifiedPolicy,
    env: str,
    eps_units: Sequence[float],
    episodes: int = 30,
    seed: int = 0,
    *,
    attack: Attack | None = None,
    return_episodes: int = 10,
    budget: int = 1000,
    progress: Progress | None = None,
) -> Certification:
    """Play ``episodes`` clean episodes; bound and attack the returns of the first ``return_episodes`` of them."""
    if not eps_units or return_episodes < 1:
        raise SortRLError(
            f"certify: eps is {tuple(eps_units)} and return_episodes {return_episodes}; name at least one eps and one episode."
        )
    clean = evaluate(policy, env, episodes=episodes, seed=seed, name="student", progress=progress)
    compared = min(return_episodes, episodes)
    rows = []
    for index, eps in enumerate(eps_units):
        proven = tuple(certified_return(policy, env, eps, s, budget=budget) for s in episode_seeds(seed, compared))
        attacked = None
        if attack is not None:
            attacked = evaluate(policy, env, attack, eps, compared, seed, name="student")
        rows.append(Returns(float(eps), proven, attacked))
        if progress is not None:
            progress({"step": index + 1, "total": len(eps_units)})
    return Certification(
        clean=clean,
        eps_units=tuple(map(float, eps_units)),
        attack="none" if attack is None else attack.name,
        returns=tuple(rows),
        episode=play(policy, env, max(eps_units), seed=clean.seeds[0]),
    )

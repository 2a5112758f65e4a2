"""What the tasks with images share."""

from __future__ import annotations

from typing import Any

from sortrl.data.collect import CollectConfig

# Sort layers on pixels that are seen through ramps (docs/training.md says what each setting brought).
SEEN_THROUGH_RAMPS: dict[str, Any] = {
    "ramps": True,
    "noise": 0.0,  # it would fill the gaps between the values that a pixel takes
    "width": 256,
    "depth": 3,
    "rho": 0.0,
    "batch": 256,
    "learning_rate": 0.08,
    "scalar_learning_rate": 0.002,
    "mu_start": 2.0,
    "lambda_end": 1.0,
    "warm_share": 0.5,
    "p_end": 64.0,
    "final_share": 0.1,
    "exact_share": 0.0,
    "soft_targets": 0.5,
    "soft_temperature": None,
}
# Of video games, with eps in k/255.
VIDEO_GAMES: dict[str, Any] = {
    **SEEN_THROUGH_RAMPS,
    "dagger_rounds": 3,
    "dagger_states": 30_000,  # together as many as the teacher's own
    "steps": 2500,
    "theta_factor": 10.0,  # margins for 10/255 are widened
    "eps_grid": tuple(k / 255 for k in (0, 1, 2, 3, 5)),  # those of the tables, and the one that is trained for
    "suite": (),  # the tables have attacks enough
}
# As printed for video games: sort layers on the pixels, two linear layers behind them, 100,000 states of the teacher's own play.
PRINTED: dict[str, Any] = {
    "collect": CollectConfig(states=100_000, exploration=0.0, slots=64),
    "width": 1280,
    "depth": 6,
    "head": (256, 256),
    "theta_factor": 2.2,
}

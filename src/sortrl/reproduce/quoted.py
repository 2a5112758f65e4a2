"""Figures of the paper's tables (mean, standard error), to stand beside those measured here. None were measured by us."""

from __future__ import annotations

Figures = tuple[tuple[float, float], ...]

# Tables 2 and 4, ProcGen: game, levels, agent -> at eps 0, 1, 3, 5 / 255 (PGD-10), or 10, 20, 40 / 255 (PGD-30).
TABLE2: dict[tuple[str, str, str], Figures] = {
    ("Jumper", "train", "PPO"): ((8.69, 0.11), (6.61, 0.15), (4.50, 0.16), (3.42, 0.15)),
    ("Jumper", "eval", "PPO"): ((4.22, 0.16), (3.90, 0.15), (3.10, 0.15), (3.15, 0.15)),
    ("Jumper", "train", "RADIAL-PPO"): ((6.59, 0.15), (6.70, 0.15), (6.55, 0.15), (6.83, 0.15)),
    ("Jumper", "eval", "RADIAL-PPO"): ((3.85, 0.15), (3.93, 0.15), (3.75, 0.15), (3.59, 0.15)),
    ("Jumper", "train", "SortRL-PPO"): ((9.10, 0.28), (9.10, 0.29), (9.10, 0.29), (9.10, 0.29)),
    ("Jumper", "eval", "SortRL-PPO"): ((4.65, 0.39), (4.63, 0.39), (4.68, 0.39), (4.65, 0.39)),
    ("Coinrun", "train", "PPO"): ((8.31, 0.12), (6.36, 0.15), (4.19, 0.16), (3.32, 0.15)),
    ("Coinrun", "eval", "PPO"): ((6.65, 0.15), (5.22, 0.16), (3.58, 0.15), (3.36, 0.15)),
    ("Coinrun", "train", "RADIAL-PPO"): ((7.12, 0.14), (7.10, 0.14), (7.19, 0.14), (7.34, 0.14)),
    ("Coinrun", "eval", "RADIAL-PPO"): ((6.66, 0.15), (6.71, 0.15), (6.71, 0.15), (6.67, 0.15)),
    ("Coinrun", "train", "SortRL-PPO"): ((8.40, 0.37), (8.51, 0.36), (8.60, 0.35), (8.41, 0.37)),
    ("Coinrun", "eval", "SortRL-PPO"): ((7.33, 0.44), (7.70, 0.42), (7.23, 0.45), (7.20, 0.41)),
}
TABLE4: dict[tuple[str, str, str], Figures] = {
    ("Jumper", "train", "PPO"): ((3.42, 0.15), (3.61, 0.15), (2.94, 0.14)),
    ("Jumper", "eval", "PPO"): ((2.81, 0.14), (2.62, 0.14), (2.50, 0.14)),
    ("Jumper", "train", "RADIAL-PPO"): ((5.43, 0.16), (2.45, 0.14), (1.44, 0.11)),
    ("Jumper", "eval", "RADIAL-PPO"): ((3.03, 0.14), (2.04, 0.13), (1.44, 0.11)),
    ("Jumper", "train", "BCL-MOS(V)-AT"): ((8.15, 0.12), (8.40, 0.12), (7.84, 0.13)),
    ("Jumper", "eval", "BCL-MOS(V)-AT"): ((4.64, 0.16), (4.65, 0.16), (4.41, 0.16)),
    ("Jumper", "train", "BCL-MOS(R)-AT"): ((8.29, 0.12), (8.40, 0.12), (6.93, 0.15)),
    ("Jumper", "eval", "BCL-MOS(R)-AT"): ((4.29, 0.16), (4.09, 0.16), (3.85, 0.15)),
    ("Jumper", "train", "SortRL-PPO"): ((9.10, 0.29), (9.10, 0.29), (9.10, 0.30)),
    ("Jumper", "eval", "SortRL-PPO"): ((4.67, 0.39), (4.70, 0.39), (4.70, 0.40)),
}

"""Figures of the paper's tables (mean, standard error), to stand beside those measured here. None were measured by us."""

from __future__ import annotations

Figures = tuple[tuple[float, float], ...]
Partial = tuple[tuple[float, float | None] | None, ...]
"""Some rows have no standard errors, and some cells were never published."""

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

# Tables 1 and 3, Atari: game, agent -> at eps 0, 1, 3, 5 / 255 (PGD-10), or, worst of four attacks, at the eps of TABLE3_LEVELS.
TABLE1: dict[tuple[str, str], Partial] = {
    ("Freeway", "DQN"): ((33.9, 0.07), (0, 0), (0, 0), (0, 0)),
    ("Freeway", "RS-DQN"): ((32.93, None), (32.53, None), None, None),
    ("Freeway", "SA-DQN"): ((30, 0), (30, 0), (30.05, 0.05), (27.65, 0.22)),
    ("Freeway", "WocaR-DQN"): ((31.2, 0.4), (31.2, 0.5), (31.4, 0.3), (21.1, 1.75)),
    ("Freeway", "RADIAL-DQN"): ((33.2, 0.19), (33.35, 0.16), (33.4, 0.13), (29.1, 0.17)),
    ("Freeway", "SortRL-DQN"): ((33.91, 0.32), (33.83, 0.48), (33.94, 0.24), (33.92, 0.33)),
    ("RoadRunner", "DQN"): ((43390, 973), (0, 0), (0, 0), (0, 0)),
    ("RoadRunner", "A3C"): ((34420, 604), (31040, 2173), (3025, 317), (350, 93)),
    ("RoadRunner", "RS-DQN"): ((12106.67, None), (5753.33, None), None, None),
    ("RoadRunner", "SA-DQN"): ((45870, 1380), (44300, 1753), (20170, 1822), (3350, 335)),
    ("RoadRunner", "RADIAL-DQN"): ((44495, 1165), (44445, 1148), (39560, 1621), (23820, 942)),
    ("RoadRunner", "WocaR-DQN"): ((44156, 2279), (44079, 2154), (38720, 1765), (3490, 1959)),
    ("RoadRunner", "RADIAL-A3C"): ((34825, 981), (31960, 933), (29920, 1496), (31545, 1480)),
    ("RoadRunner", "SortRL-DQN"): ((43697, 1457), (44596, 1070), (39766, 1176), (40905, 1249)),
    ("Pong", "DQN"): ((21, 0), (-21, 0), (-21, 0), (-20.85, 0.08)),
    ("Pong", "A3C"): ((21, 0), (21, 0), (21, 0), (-17.85, 0.33)),
    ("Pong", "RS-DQN"): ((19.73, None), (18.13, None), None, None),
    ("Pong", "SA-DQN"): ((21, 0), (21, 0), (21, 0), (-19.75, 0.1)),
    ("Pong", "WocaR-DQN"): ((21, 0), (21, 0), (21, 0), (-20.7, 0.45)),
    ("Pong", "RADIAL-DQN"): ((21, 0), (21, 0), (21, 0), (21, 0)),
    ("Pong", "RADIAL-A3C"): ((21, 0), (21, 0), (21, 0), (21, 0)),
    ("Pong", "SortRL-DQN"): ((21, 0), (21, 0), (21, 0), (21, 0)),
    ("BankHeist", "DQN"): ((1325.5, 5.7), (29.5, 2.4), (0, 0), (0, 0)),
    ("BankHeist", "A3C"): ((1109, 21.4), (1102.5, 49.4), (534.5, 58.2), (115, 27.8)),
    ("BankHeist", "RS-DQN"): ((238.66, None), (190.67, None), None, None),
    ("BankHeist", "SA-DQN"): ((1237.6, 1.7), (1237, 2), (1213, 2.5), (1130, 29.1)),
    ("BankHeist", "WocaR-DQN"): ((1220, 12), (1220, 3), (1214, 7), (1094, 20)),
    ("BankHeist", "RADIAL-DQN"): ((1349.5, 1.7), (1349.5, 1.7), (1348, 1.7), (1182.5, 43.3)),
    ("BankHeist", "RADIAL-A3C"): ((1036.5, 23.4), (975, 22.2), (949, 19.5), (712, 46.4)),
    ("BankHeist", "SortRL-DQN"): ((1323.8, 6.9), (1325.6, 6.5), (1315.1, 5.8), (1317.8, 7.2)),
    ("BankHeist", "SortRL-RADIAL"): ((1342.8, 5.5), (1340.8, 4.7), (1345.2, 4.9), (1341.1, 5.1)),
}
# In percent, at 1 / 255.
TABLE1_ACR: dict[tuple[str, str], float] = {
    ("Freeway", "DQN"): 0.0,
    ("Freeway", "SA-DQN"): 100.0,
    ("Freeway", "WocaR-DQN"): 99.9,
    ("Freeway", "RADIAL-DQN"): 99.82,
    ("Freeway", "SortRL-DQN"): 99.94,
    ("RoadRunner", "DQN"): 0.0,
    ("RoadRunner", "A3C"): 0.0,
    ("RoadRunner", "SA-DQN"): 60.2,
    ("RoadRunner", "RADIAL-DQN"): 99.42,
    ("RoadRunner", "WocaR-DQN"): 98.41,
    ("RoadRunner", "RADIAL-A3C"): 92.33,
    ("RoadRunner", "SortRL-DQN"): 99.98,
    ("Pong", "DQN"): 0.0,
    ("Pong", "A3C"): 0.0,
    ("Pong", "SA-DQN"): 100.0,
    ("Pong", "WocaR-DQN"): 59.05,
    ("Pong", "RADIAL-DQN"): 89.49,
    ("Pong", "RADIAL-A3C"): 75.53,
    ("Pong", "SortRL-DQN"): 100.0,
    ("BankHeist", "DQN"): 0.0,
    ("BankHeist", "A3C"): 0.0,
    ("BankHeist", "SA-DQN"): 97.63,
    ("BankHeist", "WocaR-DQN"): 96.75,
    ("BankHeist", "RADIAL-DQN"): 98.17,
    ("BankHeist", "RADIAL-A3C"): 71.84,
    ("BankHeist", "SortRL-DQN"): 99.69,
    ("BankHeist", "SortRL-RADIAL"): 99.93,
}
# In 255ths. The text has RoadRunner's 32433 and 25325 at 20 / 255; the table, which is followed here, at 15 / 255.
TABLE3_LEVELS: dict[str, tuple[int, ...]] = {
    "Freeway": (10, 15, 20),
    "BankHeist": (5, 10, 15),
    "RoadRunner": (5, 10, 15),
}
TABLE3: dict[tuple[str, str], Partial] = {
    ("Freeway", "DQN"): ((0, 0), (0, 0), (0, 0)),
    ("Freeway", "SA-DQN"): ((19.3, 0.4), (19.3, 0.3), (20, 0.3)),
    ("Freeway", "RADIAL-DQN"): ((17.1, 0.3), (13.4, 0.2), (7.9, 0.3)),
    ("Freeway", "BCL-MOS-AT"): ((31.1, 0.3), (25.9, 0.4), (20.8, 0.3)),
    ("Freeway", "BCL-RADIAL"): ((33.4, 0.1), (25.9, 0.6), (21.2, 0.5)),
    ("Freeway", "SortRL-DQN"): ((33.1, 0.4), (30.3, 0.7), (27.2, 0.8)),
    ("BankHeist", "DQN"): ((0, 0), (0, 0), (0, 0)),
    ("BankHeist", "SA-DQN"): ((1126, 32), (63, 3.5), (16, 1.6)),
    ("BankHeist", "RADIAL-DQN"): ((518.5, 16.7), (0, 0), (0, 0)),
    ("BankHeist", "BCL-MOS-AT"): ((1095.5, 6.2), (664, 60.6), (586.5, 105.6)),
    ("BankHeist", "BCL-RADIAL"): ((1225.5, 4.9), (1223.5, 4.1), (228.5, 13.9)),
    ("BankHeist", "BCL-RADIAL+AT"): ((1093, 5.3), (1010.5, 8), (961.5, 9.2)),
    ("BankHeist", "SortRL-DQN"): ((1299.1, 7.2), (1265.5, 9.8), (1193.8, 15.2)),
    ("RoadRunner", "DQN"): ((0, 0), (0, 0), (0, 0)),
    ("RoadRunner", "SA-DQN"): ((985, 207), (0, 0), (0, 0)),
    ("RoadRunner", "RADIAL-DQN"): ((7195, 929), (495, 116), (0, 0)),
    ("RoadRunner", "BCL-MOS-AT"): ((40060, 1828), (15785, 1124), (1195, 180)),
    ("RoadRunner", "BCL-RADIAL"): ((37865, 1082), (37865, 1082), (6350, 590)),
    ("RoadRunner", "BCL-RADIAL+AT"): ((42490, 1309), (37665, 1563), (25325, 1057)),
    ("RoadRunner", "SortRL-DQN"): ((39924, 1429), (35297, 1566), (32433, 1719)),
}

# Random and human play of Figure 2's normalised scores, from the table of DQN Zoo (Quan and Ostrovski 2020): episodes begin after
# 1 to 30 idle steps, as in protocol "84". Mnih et al. (2015) have other humans for BankHeist (734.4) and Pong (9.3).
RANDOM_AND_HUMAN: dict[str, tuple[float, float]] = {
    "Freeway": (0.0, 29.6),
    "RoadRunner": (11.5, 7845.0),
    "Pong": (-20.7, 14.6),
    "BankHeist": (14.2, 753.1),
}

"""Teachers: the trained agents to be made robust; load one or train one."""

from __future__ import annotations

from sortrl.nets.architecture import Architecture
from sortrl.teachers.config import (
    DQN_TEACHERS,
    PQN_TEACHERS,
    TEACHERS,
    PQNConfig,
    TeacherConfig,
    continued,
    teacher_preset,
)
from sortrl.teachers.hardening import HardenConfig, hardened
from sortrl.teachers.load.load import load_teacher
from sortrl.teachers.load.vecnormalize import load_normalizer, save_normalizer
from sortrl.teachers.quantizing import quantized
from sortrl.teachers.sampling import sampled
from sortrl.teachers.smoothing import smoothed
from sortrl.teachers.starting import decided_at_start
from sortrl.teachers.steadying import SteadyConfig, steadied
from sortrl.teachers.teacher import Teacher
from sortrl.teachers.train_sb3 import train_teacher

__all__ = [
    "DQN_TEACHERS",
    "PQN_TEACHERS",
    "TEACHERS",
    "Architecture",
    "HardenConfig",
    "PQNConfig",
    "SteadyConfig",
    "Teacher",
    "TeacherConfig",
    "continued",
    "decided_at_start",
    "hardened",
    "load_normalizer",
    "load_teacher",
    "quantized",
    "sampled",
    "save_normalizer",
    "smoothed",
    "steadied",
    "teacher_preset",
    "train_teacher",
]

"""Teachers: the trained agents to be made robust; load one or train one."""

from __future__ import annotations

from sortrl.nets.architecture import Architecture
from sortrl.teachers.config import ImagePPOConfig, PQNConfig, TeacherConfig
from sortrl.teachers.continuous import ContinuousTeacher, load_continuous
from sortrl.teachers.hardening import HardenConfig, hardened
from sortrl.teachers.load.load import load_teacher
from sortrl.teachers.load.vecnormalize import load_normalizer, save_normalizer
from sortrl.teachers.steadying import SteadyConfig, steadied
from sortrl.teachers.teacher import Teacher
from sortrl.teachers.train_sb3 import train_teacher
from sortrl.teachers.wrappers import decided_at_start, quantized, sampled, smoothed

__all__ = [
    "Architecture",
    "ContinuousTeacher",
    "HardenConfig",
    "ImagePPOConfig",
    "PQNConfig",
    "SteadyConfig",
    "Teacher",
    "TeacherConfig",
    "decided_at_start",
    "hardened",
    "load_continuous",
    "load_normalizer",
    "load_teacher",
    "quantized",
    "sampled",
    "save_normalizer",
    "smoothed",
    "steadied",
    "train_teacher",
]

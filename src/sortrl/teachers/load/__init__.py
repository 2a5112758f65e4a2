"""Agents that others trained, read from their tensors alone: Stable-Baselines3, IMPALA, VecNormalize."""

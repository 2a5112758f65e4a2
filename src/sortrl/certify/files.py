"""Certificates as a file that others can check without this package's networks: see :mod:`sortrl.verify`."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.errors import SortRLError
from sortrl.files import read_tensors, write_tensors
from sortrl.nets import CertifiedPolicy, HybridPolicy, SortPolicy
from sortrl.nets.certified import FILE_NAME
from sortrl.records import Certificate

FORMAT = "sortrl-certificates-1"
CLAIM = (
    "For every state (unit space) and every float32 input within its radius in l_inf, the policy's action is the one stated. "
    "Observations alone are perturbed; one state at a time."
)


def weights_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and contents, in the order of names; halves count as the floats they become."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        array = (tensor.float() if tensor.dtype == torch.float16 else tensor).numpy()
        digest.update(f"{name}:{array.dtype.str}:{list(array.shape)};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def save_certificates(
    path: str | Path, policy: CertifiedPolicy, unit: Tensor, certificate: Certificate, policy_file: str | Path
) -> None:
    """Write unit-space states (batch, *obs_shape) with their certificates.

    ``policy_file`` is where the policy was saved (the file or its directory); it is named relative to ``path``, so that
    the two can travel together, and its weights must be those of ``policy``.
    """
    if len(unit) != len(certificate) or tuple(unit.shape[1:]) != policy.obs_shape:
        raise SortRLError(
            f"save_certificates: {len(certificate)} certificates for states of shape {tuple(unit.shape)}, expected "
            f"({len(certificate)}, {', '.join(map(str, policy.obs_shape))})."
        )
    file = Path(policy_file)
    file = file / FILE_NAME if file.is_dir() else file
    digest = weights_hash(read_tensors(file)[0])
    if digest != weights_hash(policy.state_dict()):
        raise SortRLError(f"save_certificates: {file} holds other weights than this policy. Save the policy first.")
    metadata = {
        "format": FORMAT,
        "claim": CLAIM,
        "policy": os.path.relpath(file.resolve(), Path(path).resolve().parent),
        "weights_sha256": digest,
        "lipschitz": policy.lipschitz if math.isfinite(policy.lipschitz) else None,
        "obs_shape": list(policy.obs_shape),
    }
    tensors = {
        "states": unit.detach().cpu().float(),
        "action": torch.from_numpy(np.asarray(certificate.action, dtype=np.int64)),
        "runner_up": torch.from_numpy(np.asarray(certificate.runner_up, dtype=np.int64)),
        "radius": torch.from_numpy(np.asarray(certificate.radius, dtype=np.float64)),
    }
    # The mixes are the only part of the network that its file does not hold: they follow from rho.
    if isinstance(policy, (SortPolicy, HybridPolicy)):
        tensors |= {f"mix.{index}": layer.mix for index, layer in enumerate(policy.trunk.layers)}
    write_tensors(path, tensors, metadata)


def load_certificates(path: str | Path) -> tuple[Tensor, Certificate, dict[str, Any]]:
    """States, certificates and metadata of a file that :func:`save_certificates` wrote."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise SortRLError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT}. It holds no certificates.")
    missing = [name for name in ("states", "action", "radius", "runner_up") if name not in tensors]
    if missing:
        raise SortRLError(f"{path} lacks {', '.join(missing)}. Write the certificates again.")
    certificate = Certificate(*(tensors[name].numpy() for name in ("action", "radius", "runner_up")))
    if tensors["states"].ndim < 2 or len(tensors["states"]) != len(certificate):
        raise SortRLError(
            f"{path}: {len(certificate)} certificates for states of shape {tuple(tensors['states'].shape)}, expected one each."
        )
    return tensors["states"], certificate, metadata

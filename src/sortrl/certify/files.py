"""Certificates as a file that others can check without this package's networks: see :mod:`sortrl.verify`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sortrl.core.errors import SortRLError
from sortrl.core.files import read_tensors, write_tensors
from sortrl.core.records import Certificate
from sortrl.nets import CertifiedPolicy, load_discrete
from sortrl.nets.base import FILE_NAME

FORMAT = "sortrl-certificates-2"
FIRST_FORMAT = (
    "sortrl-certificates-1"  # its hash covers the weights only; sort weights, constant and shape are stated apart
)
CLAIM = (
    "For every state (unit space) and every float32 input within its radius in l_inf, the policy's action is the one stated. "
    "Observations alone are perturbed; one state at a time."
)


def policy_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """SHA-256 of a policy's file: over its metadata, as JSON with sorted keys behind its length, and over names, types, shapes
    and contents of its tensors, in the order of names; halves count as the floats they become."""
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(f"{len(text)}:".encode() + text)
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
    the two can travel together, and it must hold this very ``policy``.
    """
    if len(unit) != len(certificate) or tuple(unit.shape[1:]) != policy.obs_shape:
        raise SortRLError(
            f"save_certificates: {len(certificate)} certificates for states of shape {tuple(unit.shape)}, expected "
            f"({len(certificate)}, {', '.join(map(str, policy.obs_shape))})."
        )
    file = Path(policy_file)
    file = file / FILE_NAME if file.is_dir() else file
    if _content(load_discrete(file)) != _content(policy):
        raise SortRLError(
            f"save_certificates: {file} holds other weights than this policy, or another configuration. Save the policy first."
        )
    metadata = {
        "format": FORMAT,
        "claim": CLAIM,
        "policy": os.path.relpath(file.resolve(), Path(path).resolve().parent),
        "policy_sha256": policy_hash(*read_tensors(file)),
    }
    tensors = {
        "states": unit.detach().cpu().float(),
        "action": torch.from_numpy(np.asarray(certificate.action, dtype=np.int64)),
        "runner_up": torch.from_numpy(np.asarray(certificate.runner_up, dtype=np.int64)),
        "radius": torch.from_numpy(np.asarray(certificate.radius, dtype=np.float64)),
    }
    write_tensors(path, tensors, metadata)


def _content(policy: CertifiedPolicy) -> str:
    """Hash of a policy's weights and configuration."""
    return policy_hash(
        policy.state_dict(), {"kind": policy.kind, "config": policy.describe(), "clip": policy.normalizer.clip}
    )


def load_certificates(path: str | Path) -> tuple[Tensor, Certificate, dict[str, Any]]:
    """States, certificates and metadata of a file that :func:`save_certificates` wrote."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") not in (FORMAT, FIRST_FORMAT):
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

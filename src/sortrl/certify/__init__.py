"""Certificates: certified radii in several units, tighter bounds, certified shares, proven returns, files to verify."""

from sortrl.certify.files import load_certificates, save_certificates
from sortrl.certify.intervals import interval_radius, proven_in_box
from sortrl.certify.ladder import ladder
from sortrl.certify.search import Bracket, exact_radius
from sortrl.certify.shares import (
    ACR_VARIANTS,
    acr,
    certificate_summary,
    certified_shares,
    fully_certified_episodes,
    proven_mean,
)
from sortrl.certify.units import certified_for, certified_levels, raw_radii

__all__ = [
    "ACR_VARIANTS",
    "Bracket",
    "acr",
    "certificate_summary",
    "certified_for",
    "certified_levels",
    "certified_shares",
    "exact_radius",
    "fully_certified_episodes",
    "interval_radius",
    "ladder",
    "load_certificates",
    "proven_in_box",
    "proven_mean",
    "raw_radii",
    "save_certificates",
]

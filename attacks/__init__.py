"""Attacks, for measuring: what a thief or an impostor does, one method, one file."""

from deepseal.attacks.base import EVASION, QUERY, REMOVAL, Evasion, Perturbed, Query, Removal, Removed

__all__ = ["EVASION", "QUERY", "REMOVAL", "Evasion", "Perturbed", "Query", "Removal", "Removed"]

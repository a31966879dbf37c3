"""Attacks, for measuring: what a thief or an impostor does, one method, one file."""

from deepseal.attacks.base import QUERY, REMOVAL, Query, Removal, Removed

__all__ = ["QUERY", "REMOVAL", "Query", "Removal", "Removed"]

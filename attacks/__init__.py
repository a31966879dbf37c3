"""Attacks, for measuring: what a thief or an impostor does, one method, one file."""

from deepseal.attacks.base import REMOVAL, Removal, Removed

__all__ = ["REMOVAL", "Removal", "Removed"]

"""Evasion attacks: inputs that a model gets wrong, one method, one file."""

"""Slow, readable references that the engine is tested against."""

"""Removal attacks: one method, one file."""

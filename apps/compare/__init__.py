"""Comparison of watermarking schemes by the field's criteria: cells that are measured once, and what they add up to."""

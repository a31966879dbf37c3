"""DeepSeal marks, guards and serves trained deep-learning models, and measures all of that against attacks."""

__version__ = "0.1.0"

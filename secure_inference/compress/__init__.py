"""Smaller networks for private inference: data projection, and pruning with retraining (DeepSecure, 2018)."""

from deepseal.secure_inference.compress.compress import Compressed, CompressSettings, Point, compress
from deepseal.secure_inference.compress.cost import Cost, program_cost
from deepseal.secure_inference.compress.projection import Dictionary, build_dictionary, principal_axes

__all__ = [
    "CompressSettings",
    "Compressed",
    "Cost",
    "Dictionary",
    "Point",
    "build_dictionary",
    "compress",
    "principal_axes",
    "program_cost",
]

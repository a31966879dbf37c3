"""Compile a PyTorch model to a program of integers, and run it in the clear."""

from deepseal.secure_inference.compile.arrays import LinearWeights, PublicArray
from deepseal.secure_inference.compile.calibrate import CompileSettings
from deepseal.secure_inference.compile.compiler import Compiled, LayerReport, compile_model, compile_report
from deepseal.secure_inference.compile.program import (
    Circuit,
    Connections,
    Encoding,
    Linear,
    Number,
    Operand,
    Program,
    Step,
    Wire,
)
from deepseal.secure_inference.compile.simulate import Encoded, decode_output, encode_input, simulate
from deepseal.secure_inference.compile.weights import Weights, layer_weights
from deepseal.secure_inference.compile.windows import Axis, Gather, View, Window

__all__ = [
    "Axis",
    "Circuit",
    "CompileSettings",
    "Compiled",
    "Connections",
    "Encoded",
    "Encoding",
    "Gather",
    "LayerReport",
    "Linear",
    "LinearWeights",
    "Number",
    "Operand",
    "Program",
    "PublicArray",
    "Step",
    "View",
    "Weights",
    "Window",
    "Wire",
    "compile_model",
    "compile_report",
    "decode_output",
    "encode_input",
    "layer_weights",
    "simulate",
]

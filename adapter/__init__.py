"""The common model adapter: classifier, input spec, access levels, oracle, training, checkpoints, data."""

from deepseal.adapter.access import BlackBox, Differentiable, WhiteBox
from deepseal.adapter.checkpoint import load, save
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.data import Dataset, Split, load_data
from deepseal.adapter.inputs import Batch, Inputs
from deepseal.adapter.oracle import Oracle
from deepseal.adapter.parallel import data_parallel
from deepseal.adapter.spec import Field, InputSpec
from deepseal.adapter.training import Recipe, Step, initialise, train

__all__ = [
    "Batch",
    "BlackBox",
    "Classifier",
    "Dataset",
    "Differentiable",
    "Field",
    "InputSpec",
    "Inputs",
    "Oracle",
    "Recipe",
    "Split",
    "Step",
    "WhiteBox",
    "data_parallel",
    "initialise",
    "load",
    "load_data",
    "save",
    "train",
]

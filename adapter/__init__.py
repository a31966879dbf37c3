"""The common model adapter: classifier, input spec, access levels, oracle, training, checkpoints, data."""

from deepseal.adapter.access import BlackBox, Differentiable, WhiteBox
from deepseal.adapter.checkpoint import load, save
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.data import Dataset, Split, load_data
from deepseal.adapter.oracle import Oracle
from deepseal.adapter.spec import InputSpec
from deepseal.adapter.training import Recipe, Step, initialise, train

__all__ = [
    "BlackBox",
    "Classifier",
    "Dataset",
    "Differentiable",
    "InputSpec",
    "Oracle",
    "Recipe",
    "Split",
    "Step",
    "WhiteBox",
    "initialise",
    "load",
    "load_data",
    "save",
    "train",
]

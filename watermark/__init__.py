"""Marks: schemes, keys, and the one decision whether a model carries one."""

from deepseal.watermark.deepsigns import DeepSigns
from deepseal.watermark.key import Key
from deepseal.watermark.keyfile import load_key, save_key
from deepseal.watermark.scheme import SCHEMES, Extraction, Scheme, embed, embedding_rounds, extract
from deepseal.watermark.verify import Verification, verify

__all__ = [
    "SCHEMES",
    "DeepSigns",
    "Extraction",
    "Key",
    "Scheme",
    "Verification",
    "embed",
    "embedding_rounds",
    "extract",
    "load_key",
    "save_key",
    "verify",
]

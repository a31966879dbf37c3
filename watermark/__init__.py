"""Marks: schemes, keys, and the one decision whether a model carries one."""

from deepseal.watermark.deepsigns import DeepSigns
from deepseal.watermark.key import Key
from deepseal.watermark.keyfile import load_key, save_key
from deepseal.watermark.scheme import SCHEMES, Extraction, Scheme, embed, embedding_rounds, extract
from deepseal.watermark.verify import Verification, verify
from deepseal.watermark.verify_aligned import AlignedVerification, aligned_view, verify_aligned

__all__ = [
    "SCHEMES",
    "AlignedVerification",
    "DeepSigns",
    "Extraction",
    "Key",
    "Scheme",
    "Verification",
    "aligned_view",
    "embed",
    "embedding_rounds",
    "extract",
    "load_key",
    "save_key",
    "verify",
    "verify_aligned",
]

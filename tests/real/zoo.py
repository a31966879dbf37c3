"""All models of these tests."""

from __future__ import annotations

from pretrained import PRETRAINED
from small import SMALL
from untrained import UNTRAINED

ZOO = {**PRETRAINED, **SMALL, **UNTRAINED}

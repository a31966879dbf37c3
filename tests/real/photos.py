"""Photographs that scikit-learn and scikit-image bring along, and crops of them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

OWNER = ("astronaut.png", "china.jpg", "motorcycle_left.png", "ihc.png", "hubble_deep_field.jpg", "retina.jpg")
OTHERS = ("chelsea.png", "coffee.png", "flower.jpg", "rocket.jpg")


@functools.cache
def photo(name: str) -> Tensor:
    """(3, H, W) in [0, 1]."""
    import skimage
    import sklearn.datasets

    folders = Path(skimage.__file__).parent / "data", Path(sklearn.datasets.__file__).parent / "images"
    path = next(folder / name for folder in folders if (folder / name).is_file())
    pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def crops(names: tuple[str, ...], count: int, size: int, seed: int, smallest: float = 0.5) -> Tensor:
    """(count, 3, size, size): squares of ``smallest`` to the whole of the shorter side, half of them mirrored."""
    draw = torch.Generator().manual_seed(seed)
    cut = []
    for index in range(count):
        image = photo(names[index % len(names)])
        height, width = image.shape[1:]
        share, down, right, mirror = torch.rand(4, generator=draw).tolist()
        side = int((smallest + (1 - smallest) * share) * min(height, width))
        top, left = int(down * (height - side)), int(right * (width - side))
        square = image[:, top : top + side, left : left + side]
        square = F.interpolate(square[None], size, mode="bilinear", antialias=True, align_corners=False)[0]
        cut.append(square.flip(2) if mirror < 0.5 else square)
    return torch.stack(cut).clamp(0, 1)

"""One input for a model: picked from the test data, drawn, or uploaded; and inputs as pictures."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray
from PIL import Image

from deepseal.apps.dashboard import look, settings
from deepseal.apps.dashboard.draw import can_draw, pad
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.errors import InputError

_PICK, _DRAW, _UPLOAD = "Pick from the test data", "Draw", "Upload"
SIDE = 224  # dots of a picture's longer side, about
# From less (orange) over equal (grey) to more (blue), told apart with every common colour blindness.
_LESS, _EQUAL, _MORE = np.array([230, 159, 0]), np.array([60, 60, 60]), np.array([86, 180, 233])
Picture = NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An input.

    Attributes:
        x: of the model's shape, within its bounds.
        said: where it comes from, for people.
        label: the right answer, where that is known.
    """

    x: NDArray[np.float32] = dataclasses.field(repr=False)
    said: str
    label: int | None = None


def choose(own: Workspace, key: str, data: str, shape: tuple[int, ...], bounds: tuple[float, float]) -> Chosen | None:
    """An input of that shape; None until there is one.

    Args:
        own: whose data.
        key: of the widgets.
        data: the data set that the model was made with, as a command's word; "" for none.
        shape: of the input.
        bounds: smallest and largest value of it.
    """
    ways = [*([_PICK] if data else []), *([_DRAW] if can_draw(shape) else []), _UPLOAD]
    way = st.segmented_control("Input", ways, default=ways[0], key=f"way-{key}") or ways[0]
    chosen = None
    with look.said(own):
        if way == _PICK:
            chosen = _picked(own, key, data, shape)
        elif way == _DRAW:
            ink = pad(key, shape, bounds)
            chosen = None if ink is None else Chosen(ink, "your drawing")
            if ink is None:
                st.info("Draw something: the answer comes as soon as you lift the pen.")
        else:
            chosen = _uploaded(key, shape, bounds)
    return chosen


def picture(x: NDArray[np.float32], bounds: tuple[float, float]) -> Picture | None:
    """An input of one or three channels as an enlarged picture, (rows, columns) or (…, 3); None of others."""
    if x.ndim != 3 or x.shape[0] not in (1, 3):
        return None
    low, high = bounds
    grey = np.rint(255.0 * (np.clip(x, low, high) - low) / (high - low)).astype(np.uint8)
    return _enlarged(grey[0] if len(grey) == 1 else np.moveaxis(grey, 0, -1))


def difference(before: NDArray[np.float32], after: NDArray[np.float32], largest: float) -> Picture | None:
    """Where the second is brighter (blue) or darker (orange), full colour at ``largest``; (rows, columns, 3)."""
    if before.ndim != 3 or before.shape[0] not in (1, 3):
        return None
    change = np.mean(after - before, axis=0) / (largest or 1.0)
    share = np.clip(np.abs(change), 0.0, 1.0)[..., None]
    colour = np.where(change[..., None] > 0, _MORE, _LESS)
    return _enlarged(np.rint(share * colour + (1.0 - share) * _EQUAL).astype(np.uint8))


def _enlarged(picture: Picture) -> Picture:
    times = max(1, SIDE // max(picture.shape[:2]))
    return np.repeat(np.repeat(picture, times, axis=0), times, axis=1)


def shown(x: NDArray[np.float32], bounds: tuple[float, float], caption: str) -> None:
    """The input as a picture, or in words where it is none."""
    found = picture(x, bounds)
    if found is not None:
        show_picture(found, caption)
    else:
        st.markdown(f"{look.plain(caption)}: {x.size} values, which are no picture")


def show_picture(picture: Picture, caption: str, *, width: str = f"{SIDE}px") -> None:
    """A picture with its caption, which is also what is read out instead of it."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    source, words = base64.b64encode(content.getvalue()).decode(), html.escape(caption, quote=True)
    st.html(
        f'<figure style="margin: 0 0 1rem; max-width: {width}">'
        f'<img src="data:image/png;base64,{source}" alt="{words}" style="width: 100%; border-radius: 0.5rem">'
        f'<figcaption style="font-size: 0.875rem; text-align: center">{words}</figcaption></figure>'
    )


def _picked(own: Workspace, key: str, data: str, shape: tuple[int, ...]) -> Chosen:
    test = test_split(own, data)
    if tuple(test.tensor.shape[1:]) != shape:
        found = f"inputs of shape {tuple(test.tensor.shape[1:])} in {data}"
        raise InputError(f"test inputs of shape {shape}", found=found, do="draw or upload one")
    most = len(test) - 1
    number = int(
        st.number_input(
            f"Number of the test input (0 to {most})", 0, most, 0, key=f"number-{key}-{data}",
            help="Test inputs were used neither to train the model nor to fit its monitor.",
        )
    )  # fmt: skip
    return Chosen(
        test.tensor[number].numpy().astype(np.float32), f"test input {number}, labelled {int(test.y[number])}",
        int(test.y[number]),
    )  # fmt: skip


def _uploaded(key: str, shape: tuple[int, ...], bounds: tuple[float, float]) -> Chosen | None:
    size = " x ".join(map(str, shape))
    given = st.file_uploader(
        f"One input as a .npy file: {size} values from {bounds[0]:g} to {bounds[1]:g}",
        type=["npy"], key=f"upload-input-{key}", max_upload_size=min(50, settings.current().upload_mib),
    )  # fmt: skip
    if given is None:
        return None
    return Chosen(array(given.getvalue(), given.name, shape, bounds), f"the file {given.name}")


def array(content: bytes, name: str, shape: tuple[int, ...], bounds: tuple[float, float]) -> NDArray[np.float32]:
    """The one input in the bytes of a ``.npy`` file, which may hold no pickle; 8-bit values are divided by 255.

    Raises:
        InputError: something else, another shape, or values outside the bounds.
    """
    from deepseal.errors import understood

    with understood(f"an input in {name}", "save it with numpy.save"):
        found = np.load(io.BytesIO(content), allow_pickle=False)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiub":
        raise InputError(f"numbers in {name}", found=str(getattr(found, "dtype", "none")), do="save them as float32")
    if found.shape != shape and found.shape != (1, *shape):
        raise InputError(f"one input of shape {shape} in {name}", found=str(found.shape), do="save one input alone")
    values = found.reshape(shape).astype(np.float32) / np.float32(255.0 if found.dtype == np.uint8 else 1.0)
    low, high = bounds
    if not np.isfinite(values).all() or values.min() < low or values.max() > high:
        raise InputError(f"values from {low:g} to {high:g} in {name}", found="others", do="scale the values")
    return np.asarray(values, dtype=np.float32)


def test_split(own: Workspace, data: str) -> Any:
    """The test split (see ``adapter.Split``) of a data set that is named by a command's word.

    Raises:
        InputError: it cannot be read.
    """
    path = own.root / data
    if data.startswith("data/"):
        if not path.is_file():
            raise InputError("the data that the model was made with", found="none of that name", do="upload it again")
        return _test_split(str(path), path.stat().st_mtime_ns)
    return _test_split(data, 0)


@st.cache_resource(max_entries=4, show_spinner="reading the data")
def _test_split(source: str, modified: int) -> Any:
    from deepseal.adapter import load_data

    return load_data(source).test

"""Labelled data as values: splits, data sets, and where they come from."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter.inputs import Batch, each, single
from deepseal.adapter.spec import InputSpec
from deepseal.adapter.targets import call_target, split_target
from deepseal.errors import InputError, UnknownNameError, understood
from deepseal.files import data_folders, read_bytes
from deepseal.rng import Rng

HELD_OUT = 10_000
_OPTIONS = ("bounds", "classes", "mean", "mode", "size", "std")
_SPLIT_SEED = Rng(20180326)


@dataclasses.dataclass(frozen=True)
class Split:
    """Inputs (N, …) in data space, one tensor or several named ones, and integer labels (N,)."""

    x: Batch = dataclasses.field(repr=False)
    y: Tensor = dataclasses.field(repr=False)

    @classmethod
    def unlabelled(cls, x: Batch) -> Split:
        """Inputs without labels, for a model without classes: every label is 0."""
        return cls(x, torch.zeros(len(x), dtype=torch.int64))

    @property
    def tensor(self) -> Tensor:
        """The inputs where they are one tensor.

        Raises:
            InputError: several named ones.
        """
        return single(self.x)

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor) -> Split:
        """The samples at the given positions."""
        return Split(self.x[index], self.y[index])

    def check(self, spec: InputSpec) -> None:
        """Refuse a split that does not fit the spec.

        Raises:
            InputError: empty, wrong shape, non-finite or out-of-range values, labels outside the classes.
        """
        kinds = [type(getattr(self, name)).__name__ for name in ("x", "y")]
        if kinds not in (["Tensor", "Tensor"], ["Inputs", "Tensor"]):
            found = " and ".join(kinds)
            raise InputError("inputs and labels as torch tensors", found=found, do="use torch.from_numpy")
        if len(self.x) == 0 or len(self.x) != len(self.y):
            found = "no samples" if len(self.x) == 0 else f"{len(self.x)} inputs and {len(self.y)} labels"
            raise InputError("a non-empty split with one label an input", found=found, do="check the data")
        if self.y.ndim != 1 or self.y.dtype != torch.int64:
            found = f"{self.y.dtype} of shape {tuple(self.y.shape)}"
            raise InputError("labels of type int64 and shape (N,)", found=found, do="use y.long().reshape(-1)")
        if any(tensor.requires_grad for tensor in each(self.x)):
            raise InputError("data without gradients", found="x.requires_grad", do="use x.detach()")
        spec.check(self.x)
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= spec.num_classes > 0:
            raise InputError(
                f"labels 0 … {spec.num_classes - 1}", found=f"labels {low} … {high}", do="renumber the labels from 0"
            )

    def fingerprint(self) -> str:
        """SHA-256 over shapes and bytes of inputs and labels."""
        digest = hashlib.sha256()
        for tensor in (*each(self.x), self.y):
            digest.update(f"{tensor.dtype}\x1f{tuple(tensor.shape)}\x1e".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A named data set: ``train`` is trained on, ``calibration`` is held out for thresholds, ``test`` only judges."""

    name: str
    spec: InputSpec
    train: Split
    calibration: Split
    test: Split

    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of each split."""
        return {f"data.{name}": getattr(self, name).fingerprint() for name in ("train", "calibration", "test")}


def load_data(source: str) -> Dataset:
    """Load ``digits``, ``mnist``, ``fashion-mnist``, ``isolet``, a ``.npz`` file, a folder or ``module:factory``.

    Of the training samples, one in six, at most 10,000, is held out for calibration by a fixed permutation.
    A ``.npz`` holds ``x`` and ``y`` (a fifth becomes the test) or ``x_train``, ``y_train``, ``x_test``, ``y_test``.
    An image folder holds one folder a class, or ``train/`` and ``test/`` with one folder a class each.
    Behind ``?``: ``mean=0.5&std=0.25`` (what the model normalises with; one number or one a channel), ``bounds=0,1``,
    ``classes=10``, and for folders ``size=32&mode=L``.
    A factory returns ``(x, y)``, ``(x_train, y_train, x_test, y_test)``, or a ``Dataset``.

    Raises:
        InputError: nothing usable there.
    """
    with understood(f"usable data in {source}", "check the file, or the options behind the question mark"):
        options = split_target(source)[1] if ":" not in source else {}  # a factory has options of its own
        for name in options:
            if name not in _OPTIONS:
                raise UnknownNameError("option of a data set", name, _OPTIONS)
        loaded = _load(source)
        mean, std = (_numbers(options[name]) if name in options else None for name in ("mean", "std"))
        if mean is None and std is None:
            return loaded
        return dataclasses.replace(loaded, spec=dataclasses.replace(loaded.spec, mean=mean, std=std))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _load(source: str) -> Dataset:
    name, options = split_target(source)
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    if name.endswith(".npz"):
        return _from_arrays(Path(name).stem, _npz(Path(name)), options)
    if Path(name).is_dir():
        return _from_arrays(Path(name).name, _image_folder(Path(name), options), options)
    if ":" in name:
        loaded = call_target(source)
        if isinstance(loaded, Dataset):
            return loaded
        return _from_arrays(name, _named(loaded, name), {})
    raise UnknownNameError("data set (or a .npz file, an image folder, module:factory)", name, _BUILT_IN)


def _digits() -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[:, None]
    return _from_arrays("digits", {"x": images, "y": bunch.target}, {"bounds": "0,1"})


def _idx_images(name: str, title: str) -> Dataset:
    folder = _folder(name, "train-images-idx3-ubyte.gz")
    arrays = {}
    for split, stem in (("train", "train"), ("test", "t10k")):
        arrays[f"x_{split}"] = _idx(folder / f"{stem}-images-idx3-ubyte.gz")[:, None]
        arrays[f"y_{split}"] = _idx(folder / f"{stem}-labels-idx1-ubyte.gz")
    return _from_arrays(title, arrays, {})


def _isolet() -> Dataset:
    folder = _folder("isolet", "isolet.npz")
    return _from_arrays("isolet", _npz(folder / "isolet.npz"), {"bounds": "-1,1"})


_BUILT_IN: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "mnist": lambda: _idx_images("mnist", "mnist"),
    "fashion-mnist": lambda: _idx_images("fashion-mnist", "fashion-mnist"),
    "isolet": _isolet,
}


def _folder(name: str, member: str) -> Path:
    for root in data_folders():
        if (root / name / member).is_file():
            return root / name
    places = ", ".join(str(root / name) for root in data_folders())
    raise InputError(
        f"the data set {name} ({member}) in {places}",
        found="no such file",
        do="set DEEPSEAL_DATA to the folder that holds it, or use --data digits, which needs no files",
    )


def _idx(path: Path) -> NDArray[np.uint8]:
    try:
        raw = gzip.decompress(read_bytes(path, "an IDX file"))
        dimensions = raw[3]
        shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=dimensions, offset=4))
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    except (OSError, EOFError, IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"a gzipped IDX file at {path}", found=str(error) or "something else", do="copy it again"
        ) from error


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(read_bytes(path, "a data file")), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"plain numeric arrays in {path}", found=str(error)[:120], do="save x and y with numpy.savez"
        ) from error


def _image_folder(root: Path, options: dict[str, str]) -> dict[str, NDArray[Any]]:
    if (root / "train").is_dir() and (root / "test").is_dir():
        classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
        x_train, y_train = _images(root / "train", classes, options)
        x_test, y_test = _images(root / "test", classes, options)
        return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    x, y = _images(root, sorted(p.name for p in root.iterdir() if p.is_dir()), options)
    return {"x": x, "y": y}


def _images(root: Path, classes: list[str], options: dict[str, str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    from PIL import Image, UnidentifiedImageError

    if not classes:
        raise InputError(f"one folder a class in {root}", found="no folders", do="sort the images into class folders")
    images, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((root / name).iterdir()):
            if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff"):
                continue
            try:
                with Image.open(path) as image:
                    loaded = image.convert(options.get("mode", "RGB"))
                    if "size" in options:
                        loaded = loaded.resize((int(options["size"]), int(options["size"])))
                    pixels = np.asarray(loaded)
            except (UnidentifiedImageError, OSError, ValueError) as error:
                raise InputError(f"an image at {path}", found=str(error)[:120], do="repair or remove it") from error
            images.append(pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None])
            labels.append(label)
    shapes = {image.shape for image in images}
    if len(shapes) != 1:
        found = f"{len(shapes)} different shapes, such as {sorted(shapes)[:2]}" if shapes else "no images"
        raise InputError(f"images of one size in {root}", found=found, do="add ?size=32 to the folder's name")
    return np.stack(images), np.asarray(labels)


def _named(loaded: Any, name: str) -> dict[str, Any]:
    if isinstance(loaded, tuple) and len(loaded) in (2, 4):
        names = ("x", "y") if len(loaded) == 2 else ("x_train", "y_train", "x_test", "y_test")
        return dict(zip(names, (np.asarray(part) for part in loaded), strict=True))
    raise InputError(
        f"(x, y), (x_train, y_train, x_test, y_test) or a Dataset from {name}",
        found=type(loaded).__name__,
        do="change what the factory returns",
    )


def _from_arrays(name: str, arrays: dict[str, NDArray[Any]], options: dict[str, str]) -> Dataset:
    whole = {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys()
    if not whole and not {"x", "y"} <= arrays.keys():
        raise InputError(
            "arrays x and y, or x_train, y_train, x_test and y_test", found=str(sorted(arrays)), do="rename the arrays"
        )
    pairs = [("x_train", "y_train"), ("x_test", "y_test")] if whole else [("x", "y")]
    splits = [_split(name, arrays[x], arrays[y]) for x, y in pairs]
    if whole:
        rest, test = splits
    else:
        rest, test = _divide(splits[0], max(1, len(splits[0]) // 5), "test")
    bounds = _bounds(options, arrays[pairs[0][0]].dtype, rest.tensor)
    classes = int(options["classes"]) if "classes" in options else int(torch.cat([rest.y, test.y]).max()) + 1
    spec = InputSpec(shape=tuple(rest.tensor.shape[1:]), num_classes=classes, bounds=bounds)
    train, calibration = _divide(rest, min(HELD_OUT, max(1, len(rest) // 6)), "calibration")
    for split in (train, calibration, test):
        split.check(spec)
    return Dataset(name=name, spec=spec, train=train, calibration=calibration, test=test)


def _split(name: str, x: NDArray[Any], y: NDArray[Any]) -> Split:
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "iuf":
        raise InputError(f"numeric arrays in {name}", found=f"x {x.dtype}, y {y.dtype}", do="convert them")
    if len(x) < 3 or y.ndim != 1 or len(x) != len(y):
        found = f"x of shape {x.shape} and y of shape {y.shape}"
        raise InputError(
            f"at least three inputs in {name}, with one integer label each", found=found, do="check the data"
        )
    if y.dtype.kind == "f" and not np.array_equal(y, np.round(y)):
        raise InputError(f"integer labels in {name}", found="fractions or NaN", do="number the classes from 0")
    scale = np.float32(255.0) if x.dtype == np.uint8 else np.float32(1.0)
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32) / scale)
    if not bool(torch.isfinite(inputs).all()):
        raise InputError(f"finite inputs in {name}", found="NaN or infinite values", do="clean the data")
    labels = torch.from_numpy(y.astype(np.int64))
    if int(labels.min()) < 0:
        raise InputError(f"labels from 0 in {name}", found=f"label {int(labels.min())}", do="number the classes from 0")
    return Split(inputs, labels)


def _bounds(options: dict[str, str], dtype: np.dtype[Any], x: Tensor) -> tuple[float, float]:
    if "bounds" in options:
        try:
            low, high = map(float, options["bounds"].split(","))
        except ValueError as error:
            raise InputError("bounds=low,high", found=options["bounds"], do="write for instance ?bounds=0,1") from error
        return low, high
    low, high = float(x.min()), float(x.max())
    if dtype == np.uint8 or (low >= 0.0 and high <= 1.0):
        return 0.0, 1.0
    return low, high if high > low else low + 1.0


def _divide(split: Split, size: int, purpose: str) -> tuple[Split, Split]:
    order = torch.from_numpy(_SPLIT_SEED.child(purpose, len(split)).numpy().permutation(len(split)))
    keep = order[: len(split) - size].sort().values
    return split.take(keep), split.take(order[len(split) - size :].sort().values)

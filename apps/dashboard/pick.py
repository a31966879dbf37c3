"""Choosing data, models and keys: from the shelf, from what is built in, or by upload through the strict loaders."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from deepseal.apps.dashboard import forms, settings
from deepseal.apps.dashboard.jobs import Step
from deepseal.apps.dashboard.look import HELP, said
from deepseal.apps.dashboard.workspace import Kind, Thing, Workspace
from deepseal.errors import InputError
from deepseal.files import data_folders

_SETS = {
    "digits": ("handwritten digits, 8 x 8 pixels (comes with the installation)", None),
    "mnist": ("MNIST: handwritten digits, 28 x 28 pixels", "mnist/train-images-idx3-ubyte.gz"),
    "fashion-mnist": ("Fashion-MNIST: clothes, 28 x 28 pixels", "fashion-mnist/train-images-idx3-ubyte.gz"),
    "isolet": ("ISOLET: spoken letters, 617 features", "isolet/isolet.npz"),
}
_NETWORKS = {
    "mlp": "fully connected, 2 x 512 neurons",
    "cnn": "convolutional, 4 layers",
    "lenet": "LeNet-5",
    "wrn": "wide residual network",
}
_MOST_UNPACKED = 2 * 2**30
_FILE_SAYS = "as the file itself says"
_TORCHVISION_MODEL = "one of torchvision's"


def data(own: Workspace, key: str, *, default: str = "") -> str | None:
    """The data set to work with, as a command's word; None until there is one."""
    with st.container(key=f"pick-data-{key}"):
        choices = [name for name in _SETS if _is_here(name)] + [f"data/{t.name}.npz" for t in own.things("data")]
        chosen = forms.choose(
            "Data",
            choices,
            format_func=lambda name: _SETS[name][0] if name in _SETS else f"{name[5:-4]} (yours)",
            index=choices.index(default) if default in choices else 0,
            key=f"data-{key}",
            help="What the model was trained on. A part of it is held out: what is tested was never trained on.",
        )
        with st.expander("Use my own data"):
            upload_data(own, key)
    return chosen


def upload_data(own: Workspace, key: str) -> None:
    """An upload of arrays."""
    limit = settings.current().upload_mib
    st.markdown(
        "A `.npz` file with arrays `x` (inputs) and `y` (labels from 0), or `x_train`, `y_train`, `x_test`, `y_test`."
    )
    given = st.file_uploader("Data file (.npz)", type=["npz"], key=f"upload-data-{key}", max_upload_size=limit)
    if given is not None and st.button("Use this file", key=f"use-data-{key}"):
        with said(own), st.spinner("reading the arrays"):
            _check_unpacked(given.getvalue(), given.name)
            thing = _kept(own, "data", given.name, given.getvalue())
            try:
                from deepseal.adapter import load_data

                found = load_data(str(thing.path))
            except (InputError, MemoryError, ValueError, RuntimeError) as error:
                own.remove(thing)
                raise _without_paths(error, own, given.name) from error
            st.success(f"{len(found.train)} training and {len(found.test)} test inputs of shape {found.spec.shape}.")
            st.rerun()


def model(
    own: Workspace, key: str, *, label: str = "Model", first: Callable[[Thing], object] = lambda _thing: True
) -> Thing | None:
    """A model of the shelf, those that ``first`` likes before the others; None until there is one."""
    return _of_shelf(own, "models", label, key, "A model that you trained, marked, attacked or uploaded here.", first)


def owner_key(own: Workspace, key: str) -> Thing | None:
    """A key of the shelf; None until there is one."""
    return _of_shelf(own, "keys", "Key", key, HELP["key"])


def upload_model(own: Workspace, key: str, data_word: str | None = None) -> None:
    """An upload of weights, with the architecture that they are for."""
    limit = settings.current().upload_mib
    st.markdown("Weights as **safetensors**. Files that can run code (pickles, `.pt`, `.bin`) are refused.")
    given = st.file_uploader("Weights (.safetensors)", key=f"upload-model-{key}", max_upload_size=limit)
    arch = architecture(f"upload-{key}")
    if given is not None and st.button("Use these weights", key=f"use-model-{key}"):
        with said(own), st.spinner("reading the weights"):
            thing = _kept(own, "models", given.name, given.getvalue(), {"arch": arch or "", "data": data_word or ""})
            try:
                _check_model(thing, arch, data_word, own)
            except (InputError, MemoryError, ValueError, RuntimeError) as error:
                own.remove(thing)
                raise _without_paths(error, own, given.name) from error
            st.success(f"{thing.name} is on your shelf.")
            st.rerun()


def upload_key(own: Workspace, key: str) -> None:
    """An upload of a key's file, as it is: encrypted or not."""
    given = st.file_uploader("Key file (.key)", key=f"upload-key-{key}", max_upload_size=settings.current().upload_mib)
    if given is not None and st.button("Use this key", key=f"use-key-{key}"):
        with said(own):
            thing = _kept(own, "keys", given.name, given.getvalue())
            try:
                _check_key(thing)
            except (InputError, MemoryError, ValueError) as error:
                own.remove(thing)
                raise _without_paths(error, own, given.name) from error
            st.rerun()


def architecture(key: str, *, from_file: bool = True) -> str | None:
    """An architecture that may be built here: ours, torchvision's, or one that the server was started with."""
    ours = {f"deepseal.adapter.zoo:{name}": f"{name} ({what})" for name, what in _NETWORKS.items()}
    allowed = {name: f"{name} (of this server)" for name in settings.current().archs}
    choices = [*([_FILE_SAYS] if from_file else []), *ours, *allowed, _TORCHVISION_MODEL]
    help_ = (
        "The network that the weights belong to. Code of yours can be named only by whoever starts the server (--arch)."
    )
    chosen = forms.choose(
        "Architecture", choices, format_func=lambda c: {**ours, **allowed}.get(c, c), key=f"arch-{key}", help=help_
    )
    if chosen != _TORCHVISION_MODEL:
        return None if chosen == _FILE_SAYS else chosen
    name = st.text_input("Name of the torchvision model", "resnet18", key=f"torchvision-{key}", max_chars=60).strip()
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        st.warning("A name of letters, digits and underscores, such as resnet18.")
        return None
    return f"torchvision:{name}"


def arch_words(thing: Thing) -> list[str]:
    """The option that a command needs to read this model's file."""
    arch = thing.said("arch")
    return ["--arch", arch] if arch else []


def small_model(own: Workspace) -> tuple[Thing, Step]:
    """What newcomers begin with: a place on the shelf, and the command that trains a small network on the digits."""
    made = own.place("models", own.free("models", "digits"), {"data": "digits"})
    words = ("model", "train", "--data", "digits", "--arch", "deepseal.adapter.zoo:mlp", "--epochs", "10")
    out = own.record_word("model.train")
    return made, Step("train a small model on the digits", (*words, "--out", word(made)), out)


def word(thing: Thing) -> str:
    """A thing's file as the commands, which run in the browser's folder, name it."""
    return f"{thing.kind}/{thing.path.name}"


def passphrase(key: str, *, new: bool = False) -> Callable[[], str]:
    """Fields for a passphrase, and what checks and returns it. It goes to the command through a pipe, and nowhere else.

    The check raises InputError: nothing typed, two different answers, or characters that no keyboard gives.
    """
    label = "New passphrase" if new else "Passphrase of the key"
    first = st.text_input(label, type="password", key=f"pass-{key}", help=HELP["passphrase"], max_chars=1024)
    again = first
    if new:
        again = st.text_input("The same again", type="password", key=f"pass2-{key}", max_chars=1024)

    def checked() -> str:
        if not first:
            raise InputError(f"a passphrase in the field '{label}'", found="none", do="type one")
        if first != again:
            raise InputError("the same passphrase twice", found="two different ones", do="type them again")
        if not first.isprintable():
            raise InputError("a passphrase of printable characters", found="others", do="choose another one")
        return first

    return checked


def is_encrypted(thing: Thing) -> bool:
    """Whether a key's file needs a passphrase."""
    from deepseal.watermark.keyfile import is_encrypted as encrypted

    try:
        return encrypted(thing.path)
    except InputError:
        return False


def _of_shelf(
    own: Workspace, kind: Kind, label: str, key: str, note: str, first: Callable[[Thing], object] = lambda _thing: True
) -> Thing | None:
    things = sorted(own.things(kind), key=lambda thing: not first(thing))
    if not things:
        return None
    chosen = forms.choose(label, [thing.name for thing in things], key=f"{kind}-{key}", help=note)
    return next((thing for thing in things if thing.name == chosen), None)


def _is_here(name: str) -> bool:
    member = _SETS[name][1]
    return member is None or any((root / member).is_file() for root in data_folders())


def _kept(own: Workspace, kind: Kind, name: str, content: bytes, about: dict[str, Any] | None = None) -> Thing:
    if len(content) > settings.current().upload_mib * 2**20:
        raise InputError("a smaller file", found=f"{len(content)} bytes", do="use the command line for it")
    return own.keep(kind, Path(name).stem, content, about)


def _check_unpacked(content: bytes, name: str) -> None:
    """Refuse an archive that grows beyond what this page is for, before anything of it is unpacked.

    Raises:
        InputError: it does, or it is no archive.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise InputError(f"a .npz file {name}", found="something else", do="save x and y with numpy.savez") from error
    if size > _MOST_UNPACKED:
        found, do = f"{size / 2**30:.1f} GiB in {name}", "use the command line for it"
        raise InputError(f"at most {_MOST_UNPACKED // 2**30} GiB of arrays", found=found, do=do)


def _check_model(thing: Thing, arch: str | None, data_word: str | None, own: Workspace) -> None:
    from deepseal.adapter import checkpoint, load_data

    word_ = None if data_word is None else str(own.root / data_word) if data_word.startswith("data/") else data_word
    spec = load_data(word_).spec if word_ else None
    checkpoint.load(thing.path, architecture=arch, spec=spec)


def _check_key(thing: Thing) -> None:
    from deepseal.watermark.keyfile import is_encrypted as encrypted
    from deepseal.watermark.keyfile import load_key

    if not encrypted(thing.path):
        load_key(thing.path)


def _without_paths(error: Exception, own: Workspace, name: str) -> InputError:
    """The error of a loader, about the file as its owner calls it."""
    found = str(error)
    for kind in ("models", "keys", "data"):
        found = re.sub(rf"{re.escape(str(own.root / kind))}/[^\s;,()]*", name, found)
    return _CompleteError(found.replace(str(own.root), ""))


class _CompleteError(InputError):
    """An error whose one line is complete already."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)

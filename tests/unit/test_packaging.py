"""The folders at the root are one package: as links, when imported, and in what is built for users."""

import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from deepseal import _native

ROOT = Path(__file__).resolve().parents[2]
SUBPACKAGES = ("adapter", "watermark", "defense", "attacks", "secure_inference", "apps")


def in_git_checkout() -> bool:
    return (ROOT / ".git").exists() and shutil.which("git") is not None


@pytest.mark.skipif(not in_git_checkout(), reason="the links are checked in a git checkout only")
@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackage_is_a_relative_link_to_the_root_folder(name: str) -> None:
    link = ROOT / "src" / "deepseal" / name
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / name
    assert link.resolve() == ROOT / name
    assert not (ROOT / name).is_symlink()


@pytest.mark.skipif(not in_git_checkout(), reason="the links are checked in a git checkout only")
def test_links_are_committed_as_links() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--stage", "--", *(f"src/deepseal/{name}" for name in SUBPACKAGES)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if not listing:
        pytest.skip("the links are not added to git yet")
    modes = {line.split("\t")[1]: line.split()[0] for line in listing.splitlines()}
    assert modes == {f"src/deepseal/{name}": "120000" for name in SUBPACKAGES}


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_subpackage_imports(name: str) -> None:
    module = importlib.import_module(f"deepseal.{name}")
    assert module.__name__ == f"deepseal.{name}"
    assert module.__doc__


def test_no_subpackage_is_installed_under_a_bare_name() -> None:
    installed = {file.parts[0] for file in metadata.files("deepseal") or ()}
    assert installed.isdisjoint(SUBPACKAGES)


def test_cpu_features_are_named_booleans() -> None:
    features = _native.cpu_features()
    assert set(features) == {
        "aes",
        "vaes",
        "pclmul",
        "vpclmulqdq",
        "avx2",
        "avx512f",
        "avx512bw",
        "avx512vl",
    }
    assert all(type(value) is bool for value in features.values())
    if features["avx512bw"] or features["avx512vl"]:
        assert features["avx512f"]


def test_native_module_says_how_it_was_built() -> None:
    machine = platform.machine().lower()
    assert _native.architecture() == {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    name, version = _native.compiler().split(" ", 1)
    assert name in {"GCC", "Clang"}
    assert version[0].isdigit()


def test_stub_matches_the_native_module() -> None:
    stub = (ROOT / "src" / "deepseal" / "_native.pyi").read_text(encoding="utf-8")
    public = {name: value for name, value in vars(_native).items() if not name.startswith("_")}
    for name, value in public.items():
        assert f"class {name}:" in stub if isinstance(value, type) else f"def {name}(" in stub, name
    for kind in (value for value in public.values() if isinstance(value, type)):
        body = stub.split(f"class {kind.__name__}:")[1].split("\nclass ")[0]
        assert [name for name in vars(kind) if not name.startswith("_") and f"def {name}(" not in body] == []


@pytest.mark.slow
def test_built_distributions_hold_every_subpackage(tmp_path: Path) -> None:
    for needed in ("build", "scikit_build_core", "pybind11"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed, so nothing can be built here")
    scripts = Path(sys.executable).parent
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr

    package = ROOT / "src" / "deepseal"
    files = [*package.glob("*"), *(file for name in SUBPACKAGES for file in (package / name).rglob("*"))]
    expected = {
        f"deepseal/{file.relative_to(package).as_posix()}"
        for file in files
        if file.is_file() and file.parent.name != "__pycache__" and not file.name.startswith(".")
    }
    assert {"deepseal/py.typed", "deepseal/_native.pyi"} < expected
    assert {f"deepseal/{name}/__init__.py" for name in SUBPACKAGES} < expected
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive}
    assert {f"src/{name}" for name in expected} <= members.keys()
    assert {"CMakeLists.txt", "LICENSE", "cpp/src/cpu.cpp", "pyproject.toml"} <= members.keys()
    assert all(member.isfile() for member in members.values())
    assert {name.partition("/")[0] for name in members}.isdisjoint(SUBPACKAGES)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "deepseal = deepseal.apps.cli:main" in archive.read(entry_points).decode()
    assert expected <= names
    assert any(name.startswith("deepseal/_native.") and name.endswith((".so", ".dylib")) for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"deepseal", f"deepseal-{metadata.version('deepseal')}.dist-info"}

"""Who may import whom: the layers of docs/architecture.md, read from the source with `ast`."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "deepseal"
SUBPACKAGES = ("adapter", "watermark", "defense", "attacks", "secure_inference", "apps")

# `evasion` also holds what all attacks share: attacks/__init__.py and attacks/base.py.
ALLOWED: dict[str, set[str]] = {
    "root": set(),
    "adapter": {"root"},
    "evasion": {"root", "adapter"},
    "watermark": {"root", "adapter", "evasion"},
    "defense": {"root", "adapter", "evasion"},
    "attacks": {"root", "adapter", "evasion", "watermark", "defense"},
    "secure_inference": {"root", "adapter"},
    "apps": {"root", "adapter", "evasion", "watermark", "defense", "attacks", "secure_inference"},
}


def layer(module: str) -> str:
    if module == "deepseal.__main__":
        return "apps"
    parts = module.split(".")
    if len(parts) == 1 or parts[1] not in SUBPACKAGES:
        return "root"
    if parts[1] == "attacks" and (len(parts) == 2 or parts[2] in {"base", "evasion"}):
        return "evasion"
    return parts[1]


def imported(source: str, module: str, is_package: bool, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of each imported module, also inside functions and `if TYPE_CHECKING`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                name = ".".join([*base, alias.name])
                yield node.lineno, name if name in known else ".".join(base)


def violations(source: str, module: str, is_package: bool = False, known: Collection[str] = ()) -> list[str]:
    found = []
    for line, target in imported(source, module, is_package, known):
        top = target.split(".")[0]
        if top in SUBPACKAGES:
            found.append(f"{module}:{line}: bare import of {target}; write deepseal.{target}")
        elif top == "deepseal" and module.split(".")[0] == "deepseal":
            own, other = layer(module), layer(target)
            if other != own and other not in ALLOWED[own]:
                found.append(f"{module}:{line}: {own} must not import {target} ({other})")
    return found


def package_modules() -> dict[str, Path]:
    files = [*PACKAGE.glob("*.py")]
    for name in SUBPACKAGES:
        files += (PACKAGE / name).rglob("*.py")
    modules = {}
    for file in files:
        parts = ("deepseal", *file.relative_to(PACKAGE).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


def test_packages_import_only_what_their_layer_allows() -> None:
    modules = package_modules()
    assert {f"deepseal.{name}" for name in SUBPACKAGES} < modules.keys()
    found = []
    for module, file in modules.items():
        found += violations(file.read_text(encoding="utf-8"), module, file.name == "__init__.py", modules)
    assert not found, "\n".join(found)


def test_nothing_else_imports_a_bare_top_level_package() -> None:
    found = []
    for folder in ("tests", "benchmarks", "examples"):
        for file in (ROOT / folder).rglob("*.py"):
            found += violations(file.read_text(encoding="utf-8"), str(file.relative_to(ROOT)))
    assert not found, "\n".join(found)


KNOWN = {"deepseal.attacks.removal", "deepseal.attacks.evasion", "deepseal.watermark", "deepseal.watermark.key"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deepseal.record", "import deepseal.adapter"),
        ("deepseal.record", "def f():\n    from deepseal.adapter import Classifier"),
        ("deepseal.record", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deepseal.adapter"),
        ("deepseal.record", "from deepseal import watermark"),
        ("deepseal.record", "from .watermark import key"),
        ("deepseal.adapter.data", "from deepseal.attacks.evasion import fgsm"),
        ("deepseal.adapter.data", "from deepseal.attacks import base"),
        ("deepseal.attacks.evasion.fgsm", "from deepseal.watermark.key import Key"),
        ("deepseal.attacks.evasion.fgsm", "from ...watermark.key import Key"),
        ("deepseal.attacks.base", "from deepseal.attacks import removal"),
        ("deepseal.watermark.key", "from deepseal.attacks.removal.prune import Prune"),
        ("deepseal.watermark.key", "from deepseal.attacks import removal"),
        ("deepseal.watermark.key", "from deepseal.defense import Monitor"),
        ("deepseal.defense.monitor", "from deepseal.watermark import key"),
        ("deepseal.attacks.matrix", "import deepseal.apps.cli"),
        ("deepseal.secure_inference.netlist", "import deepseal.attacks.evasion"),
        ("deepseal.attacks.removal.prune", "import deepseal.secure_inference"),
        ("deepseal.apps.cli", "import watermark"),
        ("deepseal.apps.cli", "from attacks.removal import prune"),
        ("tests/unit/test_key.py", "from watermark import Key"),
    ],
)
def test_checker_finds_forbidden_import(module: str, source: str) -> None:
    assert len(violations(source, module, known=KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deepseal.registry", 'import torch\nfrom deepseal.errors import DeepSealError\nx = "deepseal.watermark:Key"'),
        ("deepseal.adapter.data", "from deepseal import errors\nfrom . import spec\nfrom ..rng import seeded"),
        ("deepseal.attacks.evasion.fgsm", "from deepseal.attacks.base import Evasion\nimport deepseal.adapter"),
        ("deepseal.watermark.blackmarks", "from deepseal.attacks import evasion\nfrom deepseal.attacks import Evasion"),
        ("deepseal.attacks.removal.overwrite", "from deepseal.watermark import Key\nimport deepseal.defense"),
        ("deepseal.secure_inference.compile", "from deepseal.adapter import Classifier"),
        ("deepseal.apps.cli", "import deepseal.attacks.matrix, deepseal.secure_inference\nimport watermark_tools"),
        ("deepseal.__main__", "from deepseal.apps.cli import main"),
        ("tests/unit/test_key.py", "import deepseal.apps.cli"),
    ],
)
def test_checker_accepts_allowed_import(module: str, source: str) -> None:
    assert violations(source, module, known=KNOWN) == []


def test_checker_resolves_relative_imports_of_a_package() -> None:
    assert violations("from .removal import prune", "deepseal.attacks", is_package=True)
    assert not violations("from .base import Evasion", "deepseal.attacks", is_package=True)

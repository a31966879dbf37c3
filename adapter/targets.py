"""``package.module:factory?name=value``: the user's own code, named by the user on the command line."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from deepseal.errors import InputError, UnknownNameError


def split_target(target: str) -> tuple[str, dict[str, str]]:
    """The part before ``?`` and the options after it."""
    name, _, query = target.partition("?")
    return name, dict(parse_qsl(query, keep_blank_values=True))


def find_target(name: str) -> Callable[..., Any]:
    """The callable behind ``package.module:factory``; the working folder is searched too.

    Raises:
        InputError: the module or the attribute is not there, or importing it fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise InputError("package.module:factory", found=repr(name), do="name the module and the function in it")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise InputError(f"the module {module_name}", found=found, do="check the name, or repair the module") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)
    if not hasattr(module, attribute):
        raise UnknownNameError(f"function in {module_name}", attribute, _own_functions(module_name, vars(module)))
    found = getattr(module, attribute)
    if not callable(found):
        raise InputError(f"a function {attribute} in {module_name}", found=type(found).__name__, do="name a function")
    return found  # type: ignore[no-any-return]


def _own_functions(module_name: str, names: dict[str, Any]) -> list[str]:
    """The public callables that the module, or its package, defines: what it imports from elsewhere is not meant."""
    public = {name: value for name, value in names.items() if not name.startswith("_") and callable(value)}
    inside = f"{module_name}."
    return [name for name, value in public.items() if f"{getattr(value, '__module__', '')}.".startswith(inside)]


def call_target(target: str, **offered: Any) -> Any:
    """Call ``module:factory?name=value`` with those of ``offered`` that the factory has a parameter for.

    Raises:
        InputError: it cannot be found, or it fails.
    """
    name, options = split_target(target)
    factory = find_target(name)
    accepted = inspect.signature(factory).parameters
    arguments = {key: _literal(value) for key, value in options.items()}
    arguments.update({key: value for key, value in offered.items() if key in accepted})
    try:
        return factory(**arguments)
    except InputError:
        raise
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise InputError(f"{name} to build what was asked for", found=found, do="check its arguments") from error


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text

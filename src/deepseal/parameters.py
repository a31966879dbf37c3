"""Parameters of algorithms: frozen keyword-only dataclass fields, checked when built, readable from text."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from deepseal.errors import InputError, UnknownNameError

P = TypeVar("P", bound="Parameters")


def parameter(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field with a line of help and its range (inclusive) or its choices."""
    limits = {"help": help, "minimum": minimum, "maximum": maximum, "choices": tuple(choices)}
    return dataclasses.field(default=default, metadata=limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Base of every parametrised algorithm. Subclasses are frozen keyword-only dataclasses of ``parameter`` fields.

    Raises:
        InputError: a value outside its stated range or choices.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values, tuples as lists."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_mapping(cls: type[P], values: Mapping[str, Any]) -> P:
        """Build from names to values; text is read according to the field's type, anything else is taken as it is.

        Raises:
            UnknownNameError: a name that is not a parameter.
            InputError: a value that cannot be read or is out of range.
        """
        hints = get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        built: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                raise UnknownNameError("parameter", name, fields)
            built[name] = _read(fields[name], value, hints[name]) if isinstance(value, str) else _untuple(value)
        return cls(**built)

    @classmethod
    def table(cls) -> list[dict[str, Any]]:
        """One row a parameter: name, default, type, range or choices, help."""
        hints = get_type_hints(cls)
        return [
            {
                "name": field.name,
                "type": _type_name(hints[field.name]),
                "default": list(field.default) if isinstance(field.default, tuple) else field.default,
                "allowed": _allowed(field),
                "help": field.metadata.get("help", ""),
            }
            for field in dataclasses.fields(cls)
        ]


def pairs(texts: Sequence[str]) -> dict[str, str]:
    """``["a=1", "b=x"]`` as a mapping.

    Raises:
        InputError: an entry without ``=`` or given twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError("a parameter as name=value", found=repr(text), do="write for instance -p sparsity=0.9")
        if name in values:
            raise InputError("each parameter once", found=f"{name!r} twice", do="give it once")
        values[name] = value
    return values


def _untuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _type_name(hint: Any) -> str:
    names = [getattr(option, "__name__", str(option)) for option in _options(hint) if option is not type(None)]
    return " or ".join("list" if name == "tuple" else name for name in names)


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "tuple": "values with commas"}


def _read(field: dataclasses.Field[Any], text: str, hint: Any) -> Any:
    options = _options(hint)
    if type(None) in options and text.lower() in ("none", ""):
        return None
    for option in options:
        try:
            if option is bool:
                return {"true": True, "false": False, "yes": True, "no": False}[text.lower()]
            if option in (int, float):
                return option(text)
            if get_origin(option) is tuple:
                item = get_args(option)[0]
                return tuple(item(part.strip()) for part in text.split(",") if part.strip())
            if option is str:
                return text
        except (ValueError, KeyError):
            continue
    kinds = [getattr(option, "__name__", str(option)) for option in options if option is not type(None)]
    wanted = " or ".join(_WORDS.get(kind, kind) for kind in kinds)
    known = (value for value in (field.default, field.metadata.get("minimum")) if value is not None)
    example = next(known, 1)
    shown = ",".join(map(str, example)) if isinstance(example, tuple) else str(example).lower()
    raise InputError(f"{field.name} as {wanted}", found=repr(text), do=f"write for instance {field.name}={shown}")


def _allowed(field: dataclasses.Field[Any]) -> str:
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if field.metadata.get("choices"):
        return " | ".join(field.metadata["choices"])
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low} … {'' if high is None else high}"


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    low, high, choices = (field.metadata.get(key) for key in ("minimum", "maximum", "choices"))
    if value is None or value == "auto":
        return
    if choices and value not in choices:
        raise UnknownNameError(field.name, str(value), choices)
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        outside = (low is not None and number < low) or (high is not None and number > high)
        if not math.isfinite(number) or outside:
            raise InputError(
                f"{field.name} in the range {_allowed(field) or 'of finite numbers'}", found=str(value), do="change it"
            )

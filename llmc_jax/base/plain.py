"""Records as JSON can hold them, and back: each field is checked by its annotation. Bytes of others are read so too.

A record is a named tuple, or a dataclass. Conditions may be added: `Annotated[int, lambda number: number > 0]`.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

Count = Annotated[int, lambda number: 0 <= number < 1 << 53]
Seconds = Annotated[float, lambda seconds: 0 <= seconds < 1e12]  # so not NaN


def to_json(value: Any) -> Any:
    """Return a value as JSON can hold it: records as objects, other tuples as lists, NaN and infinities as strings.

    NumPy's and JAX's arrays and scalars become Python's. A float32 becomes the double of the same value.
    """
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): to_json(each) for name, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        kinds = set(map(type, value))  # of long curves no number is looked at by itself
        whole = kinds <= {int} or (kinds == {float} and all(map(math.isfinite, value)))
        return list(value) if whole else [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def from_json(kind: Any, value: Any, name: str = "") -> Any:
    """Return what `to_json` made of a value of a type. A field with a default may be missing.

    name: of the value, for errors. Raises ValueError for a value of another type.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        found = from_json(parts[0], value, name)
        if all(holds(found) for holds in parts[1:]):
            return found
    elif origin is tuple and isinstance(value, list):
        if parts[-1] is ...:
            return tuple(from_json(parts[0], each, name) for each in value)
        if len(parts) == len(value):
            return tuple(from_json(part, each, name) for part, each in zip(parts, value, strict=True))
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        return {key: from_json(parts[1], each, f"{name}.{key}") for key, each in value.items()}
    elif (hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)) and isinstance(value, Mapping):
        return _read_fields(kind, value, name)
    elif (
        kind is Any
        or (isinstance(kind, types.UnionType) and type(value) in parts)
        or (origin is typing.Literal and isinstance(value, str) and value in parts)
    ):
        return value
    elif float in (kind, *parts) and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name or 'it'} is {repr(value)[:60]}")


def _read_fields(kind: Any, value: Mapping[str, Any], name: str) -> Any:
    hints, dotted = hints_of(kind), f"{name}." if name else ""
    if unknown := sorted(set(value) - set(hints)):
        raise ValueError(f"this version does not know {dotted}{unknown[0]}")
    if missing := sorted(set(hints) - set(value) - _with_defaults(kind)):
        raise ValueError(f"it lacks {dotted}{missing[0]}")
    return kind(**{each: from_json(hints[each], found, f"{dotted}{each}") for each, found in value.items()})


def _with_defaults(kind: Any) -> set[str]:
    if hasattr(kind, "_fields"):
        return set(kind._field_defaults)
    return {each.name for each in dataclasses.fields(kind) if each.default is not dataclasses.MISSING}


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the annotations of a record's fields by name, in their order."""
    return typing.get_type_hints(kind, include_extras=True)

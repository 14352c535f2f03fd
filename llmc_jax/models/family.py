"""A family of models: what the rest of the program asks of one, as a record of functions. Knows no JAX.

A model is plain data, its shape, which names its family and, of a family in a user's file, the digest of that file
(`config.model.ModelShape`). `family_of` finds the record by these two. Leaves out what computes the model (program.py).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llmc_jax.base import own_file
from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.config.model import ModelShape
from llmc_jax.models.tensors import Tables, Tensor

if TYPE_CHECKING:
    from llmc_jax.models.program import Program


class Family(NamedTuple):
    """A family of models. `Shape` below is its own kind of shape."""

    name: str
    shape: type  # a frozen dataclass that has what `ModelShape` has; all its fields are numbers, words or records
    parse: Callable[[str], Any]  # a descriptor of -e to a Shape; raises InputError for one that is none
    tensors: Callable[[Any], tuple[Tensor, ...]]  # of a Shape, in the order of the flat buffer
    letters: Callable[[Any], Mapping[str, int]]  # of a Shape, what its tensors' letters stand for; L: the layers, or 0
    initial: Callable[[Any, int], np.ndarray]  # of a Shape and a seed, the weights (flat_size,) float32
    program: Callable[[], "Program"]  # imports JAX
    params: type | None = None  # a NamedTuple of the tensors; None, or where there are others: made of their names
    frozen: Callable[[Any], tuple[str, ...]] = lambda shape: ()  # "wpe", or of one layer "qkvw 3": not updated
    head: str = "wte"  # the tensor (Vp, C) that makes logits of what comes out of the model
    tables: Callable[[Any], Tables] | None = None  # of a Shape; None: plan and profile count by parameters alone
    source: str = ""  # of one in a user's file: its digest
    path: Path | None = None  # the file
    content: bytes = b""  # and what it held when it was loaded


class UnknownFamily(InputError):
    """A model is of a family whose file was not loaded."""

    def __init__(self, name: str, source: str, words: str = "give it: --model FILE.py") -> None:
        file = f"in a file of sha256 {source[:12]}" if source else "which is not built in"
        super().__init__(f"the model is of the family {name!r}, {file}; {words}")
        self.name, self.source = name, source


BUILT_IN = {"gpt2": "llmc_jax.models.gpt2.family"}
VARIABLE = "LLMC_JAX_MODEL"  # of the environment: the file that this process has loaded, for those that it starts
_families: dict[tuple[str, str], Family] = {}  # by name and digest: a file is loaded once, as a module is
_accepted: dict[str, Family] = {}  # by name, whatever the digest: the user has changed the file


def family_of(shape: ModelShape) -> Family:
    """Return the family of a model. Raises InputError where it stands in a file that was not loaded."""
    return family_named(shape.family, shape.source)


def family_named(name: str = "gpt2", source: str = "") -> Family:
    """Return a family by its name and the digest of the file that it stands in. Raises InputError as `family_of`."""
    if name in BUILT_IN and not source and (name, source) not in _families:
        _families[name, source] = import_module(BUILT_IN[name]).FAMILY
    found = _families.get((name, source)) or _accepted.get(name)
    if found is None:
        raise UnknownFamily(name, source)
    return found


def chosen(path: str) -> Family:
    """Return the family that --model names: that of a file, or GPT-2 where it is empty. Raises InputError as `load`."""
    return load(path) if path else family_named()


def loaded_families() -> list[Family]:
    """Return the families of files that were loaded."""
    return [family for (_, source), family in _families.items() if source]


def accept(family: Family) -> None:
    """Take models that another version of a family's file has made as that family's, from now on."""
    _accepted[family.name] = family


def parsed(descriptor: str, family: Family) -> Any:
    """Return the shape of a descriptor of -e. Raises InputError for one that the family does not know."""
    return of_family(family.parse(descriptor), family)


def described(name: str, family: Family) -> Any:
    """Return the shape of a descriptor of -e; None for what is none."""
    try:
        return parsed(name, family)
    except InputError:
        return None


def of_family(shape: Any, family: Family) -> Any:
    """Return a shape as one of a family, whose kind of shape it is."""
    return replace(shape, family=family.name, source=family.source)


# ----- as JSON --------------------------------------------------------------------------------------------------------


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as JSON can hold it, without the fields that have their defaults: GPT-2's is six numbers."""
    usual = {each.name: each.default for each in fields(shape)} | {"family": "gpt2", "source": ""}
    return {name: to_json(value) for name, value in vars(shape).items() if value != usual[name]}


def shape_from_json(stored: Any) -> Any:
    """Return the shape that stands in JSON. Raises ValueError for what is none, InputError as `family_of`."""
    if not isinstance(stored, Mapping):
        raise ValueError("it is no object")
    key = [stored.get(name, usual) for name, usual in (("family", "gpt2"), ("source", ""))]
    if not all(isinstance(each, str) for each in key):
        raise ValueError("its family and source are no words")
    return from_json(family_named(*key).shape, stored)


# ----- a user's file --------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Family:
    """Return the family that a Python file defines as FAMILY, and know it from now on by its name and digest.

    The file is run once for each content. Raises InputError where it cannot be, with the line, or defines none.
    """
    path, data, source = own_file.read("--model", path, "a model")
    os.environ[VARIABLE] = str(path.absolute())
    if known := next((family for family in loaded_families() if family.source == source), None):
        return known
    family: Family = own_file.defined("--model", path, data, "FAMILY", Family, BUILT_IN, "docs/models.md")
    if problem := _problem(family):
        raise InputError(f"--model {path}: FAMILY: {problem}")
    _families[family.name, source] = family
    return family


def load_of_parent() -> None:
    """Load the file that the process that has started this one has loaded, if any: its shapes may be pickled here."""
    if path := os.environ.get(VARIABLE):
        load(path)


def _problem(family: Family) -> str:
    """Return what is wrong with a family of a user's; empty: nothing that can be seen without a shape."""
    needed = ("family", "source", "vocab_size", "max_seq_len")
    if not is_dataclass(family.shape) or not family.shape.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return f"its shape must be a frozen dataclass with {', '.join(needed)}"
    if missing := [name for name in needed if name not in {each.name for each in fields(family.shape)}]:
        return f"its shape must have {', '.join(needed)}; it has no {missing[0]}"
    return ""

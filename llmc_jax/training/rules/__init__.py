"""Optimizers, each with its derivation: how the gradient of an element, or of a whole matrix, becomes its change."""

import re
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.base import own_file
from llmc_jax.base.errors import InputError
from llmc_jax.config.train import OPTIMIZERS, OPTIONS, TrainConfig
from llmc_jax.training.optimizer import Optimizer, Rule, numbers_of

TAKEN = ("params", "copy", "step", "updates", "loss_scale", "outliers")  # names of a checkpoint's other arrays
NUMBERS = [each.name for each in OPTIONS if each.type is float and each.name != "weight_decay"]


def named(name: str) -> Optimizer:
    """Return the optimizer that --optimizer names. Raises InputError for a file that defines none."""
    if name not in OPTIMIZERS:
        return _loaded(*own_file.read("--optimizer", name, "an optimizer"))
    found: Optimizer = getattr(import_module(f"{__name__}.{OPTIMIZERS[name]}"), name.upper().replace("-", "_"))
    return found


@cache  # a file is run once for each content
def _loaded(path: Path, content: bytes, _: str) -> Optimizer:
    flag, page = "--optimizer", "docs/optimizers.md"
    found: Optimizer = own_file.defined(flag, path, content, "OPTIMIZER", Optimizer, OPTIMIZERS, page)
    with own_file.inside(path, flag):
        if problem := _problem(found):
            raise InputError(f"{flag} {path}: OPTIMIZER: {problem} ({page})")
        assert {found}  # it can be hashed: it is a static argument
        jax.eval_shape(partial(_update, found), numbers_of(found, TrainConfig()), jnp.zeros((2, 4, 6)), jnp.int32(1))
    return found


def _update(found: Optimizer, numbers: Any, array: jax.Array, t: jax.Array) -> None:
    """Call each function of an optimizer's rules with two matrices. Raises InputError for a result of another shape."""
    for rule in found.rules:
        made = {name: after(array, array, t, numbers) for name, after in rule.buffers}
        made["change"] = rule.change(array, *made.values(), t, numbers)
        made["matrix"] = array if rule.matrix is None else rule.matrix(made["change"])
        for name, each in made.items():
            if jnp.shape(each) != array.shape:
                raise InputError(f"--optimizer {found.path}: {name} has the shape {jnp.shape(each)}, not {array.shape}")


def _problem(found: Optimizer) -> str:
    """Return what is wrong with an optimizer of a user's; empty: nothing that can be seen without a model."""
    if not found.rules or not all(isinstance(rule, Rule) for rule in found.rules):
        return "its rules must be a tuple of Rules, at least one"
    if any(len(dict(rule.buffers)) < len(rule.buffers) for rule in found.rules):
        return "a rule names a buffer twice"
    if wrong := [each for each in found.buffers if each in TAKEN or not re.fullmatch("[a-z][a-z0-9_]{0,30}", each)]:
        return f"a buffer is called {wrong[0]!r}; it must be letters and digits, and none of {', '.join(TAKEN)}"
    if unknown := [each for each in found.numbers if each not in NUMBERS]:
        return f"its number {unknown[0]!r} must be one of {', '.join(NUMBERS)}"
    if len(found.rules) > 1 and found.rule_of is None:
        return "it has several rules, and no rule_of says which tensor has which"
    return ""

"""Optimizers, each with its derivation: how the gradient of an element, or of a whole matrix, becomes its change."""

from functools import cache, partial
from importlib import import_module

import jax
import jax.numpy as jnp

from llmc_jax.base import own_file
from llmc_jax.base.errors import InputError
from llmc_jax.config.train import OPTIMIZERS, TrainConfig
from llmc_jax.training.optimizer import Optimizer, numbers_of


@cache  # a file is loaded once, as a module is
def named(name: str) -> Optimizer:
    """Return the optimizer that --optimizer names. Raises InputError for a file that defines none."""
    if name in OPTIMIZERS:
        found: Optimizer = getattr(import_module(f"{__name__}.{OPTIMIZERS[name]}"), name.upper().replace("-", "_"))
        return found
    flag, page = "--optimizer", "docs/optimizers.md"
    path, content, _ = own_file.read(flag, name, "an optimizer")
    found = own_file.defined(flag, path, content, "OPTIMIZER", Optimizer, OPTIMIZERS, page)
    if problem := _problem(found):
        raise InputError(f"{flag} {path}: OPTIMIZER: {problem} ({page})")
    with own_file.inside(path, flag):
        jax.eval_shape(partial(_update, found))
    return found


def _update(found: Optimizer) -> None:
    """Call each function of an optimizer's rules once, with two matrices. Raises InputError where one returns another
    shape.
    """
    numbers, array, t = numbers_of(found, TrainConfig()), jnp.zeros((2, 4, 6)), jnp.int32(1)
    for rule in found.rules:
        made = {name: after(array, array, t, numbers) for name, after in rule.buffers}
        made["change"] = rule.change(array, *made.values(), t, numbers)
        if rule.matrix is not None:
            made["matrix"] = rule.matrix(made["change"])
        for name, each in made.items():
            if each.shape != array.shape:
                raise InputError(f"--optimizer {found.path}: {name} has the shape {each.shape}, not {array.shape}")


def _problem(found: Optimizer) -> str:
    """Return what is wrong with an optimizer of a user's; empty: nothing that can be seen without a model."""
    if taken := {"params", "copy", "step", "updates"}.intersection(found.buffers):
        return f"a buffer is called {min(taken)!r}, as something else in a checkpoint is"
    if unknown := [name for name in found.numbers if type(getattr(TrainConfig(), name, None)) is not float]:
        return f"its number {unknown[0]!r} is no option of train.py that is a number"
    if len(found.rules) > 1 and found.rule_of is None:
        return "it has several rules, and no rule_of says which tensor has which"
    return ""

"""Each kernel is called as its plain twin is, with a few keywords of its own."""

import importlib
import inspect

import pytest

from llmc_jax.kernels import functions
from llmc_jax.kernels.functions import FILES, PLAIN
from llmc_jax.ops import attention, softmax

TWINS = (
    PLAIN
    | functions.TWINS
    | {
        f"{name}_{way}": getattr(module, f"{name.removeprefix('relu_')}_{way}")
        for name, module in (("softmax", softmax), ("relu_attention", attention))
        for way in ("forward", "backward")
    }
)
OWN = {"target", "interpret", "version", "form"}
# A kernel computes one kind of attention, and one rule of an optimizer, whose buffers it names.
OF_THE_TWIN = {"spec", "starts", "rules", "by_matrix", "held"}
BUFFERS = {"arrays": ["m", "v", "gradient"]}


@pytest.mark.parametrize("name", sorted(set(TWINS) & set(FILES)))
def test_the_parameters_are_the_twin_s(name: str) -> None:
    kernel = inspect.signature(getattr(importlib.import_module(f"pallas_kernels.{FILES[name]}"), name)).parameters
    assert {"target", "interpret"} <= set(kernel)
    renamed = {"lse": "att", "saved": "att"}  # what attention keeps differs, and with it its name
    plain = [each.lstrip("_") for each in inspect.signature(TWINS[name]).parameters if each not in OF_THE_TWIN]
    expected = [each for name in plain for each in BUFFERS.get(name, [name])]
    assert [renamed.get(parameter, parameter) for parameter in kernel if parameter not in OWN] == expected

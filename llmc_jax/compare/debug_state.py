"""A debug state of llm.c beside our forward and backward of the same batch: errors, and llm.c's verdict.

`llmc-jax compare debug-state`. Leaves out the values between the operations.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc_jax.base.numbers import small
from llmc_jax.base.options import own
from llmc_jax.base.text import table
from llmc_jax.checkpoint.debug_state import DebugState, computed, read_debug_state
from llmc_jax.checkpoint.source import Source, gpt2_shape
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.compare.tensors import Difference, Limit, Show, as_json, cells, difference, index_text
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import ATTENTIONS, BY_NAME, TrainConfig
from llmc_jax.machine import jax_setup
from llmc_jax.machine.device import first_device
from llmc_jax.models.gpt2.tensors import TENSORS, Params
from llmc_jax.models.layout import shape_words, views

if TYPE_CHECKING:  # it brings JAX in
    from llmc_jax.plan.plan import Plan

DESCRIPTION = """\
Run our forward and backward on the batch of a debug state (gpt2_124M_debug_state.bin) and compare logits, loss and
the 16 gradients with what it holds, by the tolerances of llm.c's test_gpt2.cu.

Exit status: 0 everything agrees, 2 bad input, 4 compared, and something differs."""


def _limits(logits: float, loss: float, gradients: Limit) -> dict[str, Limit]:
    of_gradients = dict.fromkeys(Params._fields, gradients)
    return {"logits": Limit(logits, strict=True), "loss": Limit(loss, strict=True), **of_gradients}


# test_gpt2.cu compares the loss with figures that hold for GPT-2 124M alone; here it is the debug state's. NaN, which
# slips through llm.c's comparison of the logits, is always a failure here.
OF_BF16 = {
    "wte": 5e-1, "wpe": 4e-3, "ln1w": 1e-1, "ln1b": 4e-2, "qkvw": 5e-2, "qkvb": 3.5e-2, "attprojw": 2e-2,
    "attprojb": 3e-2, "ln2w": 5e-2, "ln2b": 3e-2, "fcw": 3e-2, "fcb": 3e-2, "fcprojw": 2e-2, "fcprojb": 1e-2,
    "lnfw": 1e-1, "lnfb": 2e-2,
}  # fmt: skip
# By what we compute in: llm.c's test, and what it allows of logits, loss and the gradients of 16 tensors.
TOLERANCES = {
    "fp32": ("test_gpt2.cu in FP32", _limits(1e-3, 1e-5, Limit(1e-6, 0.079))),
    "bf16": (
        "test_gpt2.cu in BF16",
        _limits(25.0, 0.05, Limit(0.0)) | {name: Limit(absolute, 0.079) for name, absolute in OF_BF16.items()},
    ),
}


Tensors = dict[str, Any]  # logits (B, T, V), loss () and the 16 gradients, by the tensors' names


# ----- the command line ----------------------------------------------------------------------------------------------


DTYPES = "|".join(each for each in BY_NAME["dtype"].choices if each != "auto")
SAME_MODEL = "|".join(ATTENTIONS)
OPTIONS = (
    own("model", "MODEL", None, "the weights: a model_*.bin, or any checkpoint", type=Path, is_path=True),
    own("state", "STATE", None, "the debug state, *_debug_state.bin"),
    own("--dtype", DTYPES, None, "what we compute in [that of the model's weights]"),
    own("--kernels", "|".join(BY_NAME["kernels"].choices), "auto", "as in train.py [default auto]"),
    own("--attention", SAME_MODEL, "auto", "as in train.py [default auto]"),
    own("--strict-kernels", "", False, "as in train.py"),
)  # fmt: skip


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Compare and print; return whether they agree, and the result for JSON. Raises InputError."""
    source = open_source(args.model)
    config, dtype = gpt2_shape(source.config, "debug states"), args.dtype or source.dtype
    state = read_debug_state(args.state, config)
    theirs = _tensors(config, state.logits, state.loss, state.gradient)
    import jax.numpy as jnp

    from llmc_jax.training.state import DTYPES

    jax_setup.configure(tf32=False)  # as in llm.c's tests
    plan = _plan(args, dtype, config, state)
    flat = jnp.asarray(flat_parameters(source), DTYPES[dtype])
    test, limits = TOLERANCES["fp32" if dtype == "fp32" else "bf16"]
    device = first_device().device_kind
    show(_headline(args, source, state, plan, device))

    ours = _tensors(config, *computed(flat, state.x, state.y, config, plan.execution))
    found = compare(ours, theirs, limits)
    first = first_failure(found, ours, theirs, config)
    show(f"{_table(found)}\n\n{_verdict(found, first, test)}")
    B, T = state.x.shape
    return first is None, {
        "model": args.model, "state": args.state, "B": B, "T": T, "dtype": dtype, "device": device,
        "kernels": {choice.operation: choice.implementation for choice in plan.choices},
        "tolerances": test, "agrees": first is None, "first": first,
        "tensors": [{"name": name, **as_json(each)} for name, each in found.items()],
    }  # fmt: skip


def _headline(args: argparse.Namespace, source: Source, state: DebugState, plan: "Plan", device: str) -> str:
    """Return what is compared."""
    (B, T), c = state.x.shape, source.config
    runs = ", ".join(f"{choice.operation}: {choice.implementation}" for choice in plan.choices)
    lines = [
        f"model  {args.model}: {source.kind}, {source.dtype}, {shape_words(c)} V={c.vocab_size}",
        f"state  {args.state}: B={B} T={T}",
        f"ours   {plan.dtype} {'' if args.dtype else '(dtype of the weights; --dtype changes it) '}on {device}, "
        + ("XLA alone" if {choice.by for choice in plan.choices} == {"xla"} else runs),
        *(f"warning: {line}" for line in source.warnings),
        "",
    ]
    return "\n".join(lines)


# ----- computing -----------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace, dtype: str, config: ModelConfig, state: DebugState) -> "Plan":
    """Plan one pass over the state's batch, everything kept."""
    from llmc_jax.kernels import this_machine
    from llmc_jax.plan.plan import make_plan

    B, T = state.x.shape
    run = TrainConfig(
        dtype=dtype, kernels=args.kernels, attention=args.attention, strict_kernels=args.strict_kernels, batch_size=B,
        sequence_length=T, recompute=0, logit_rows=0,
    )  # fmt: skip
    return make_plan(run, config, this_machine())


def _tensors(config: ModelConfig, logits: np.ndarray, loss: Any, gradient: np.ndarray) -> Tensors:
    return {"logits": logits, "loss": np.float64(loss), **views(gradient, config)._asdict()}


def places(num_layers: int) -> Iterator[tuple[int | None, str]]:
    """Yield layer and name of all that is compared: gradients from the last to the first, as the backward goes."""
    of_blocks = [row.name for row in reversed(TENSORS) if row.layered]
    yield from [(None, "logits"), (None, "loss"), (None, "lnfb"), (None, "lnfw")]
    yield from [(layer, name) for layer in reversed(range(num_layers)) for name in of_blocks]
    yield from [(None, "wpe"), (None, "wte")]


def compare(ours: Tensors, theirs: Tensors, limits: dict[str, Limit]) -> dict[str, Difference]:
    """Return the differences by name: of logits, loss and the gradients, those of all layers together."""
    return {name: difference(ours[name], theirs[name], limits[name]) for _, name in places(1)}


def first_failure(
    found: dict[str, Difference], ours: Tensors, theirs: Tensors, config: ModelConfig
) -> dict[str, Any] | None:
    """Return what fails first in the order of computation: a tensor's name, of a gradient also the layer; or None."""
    for layer, name in places(config.num_layers):
        if not found[name].agrees:
            at = ... if layer is None else layer
            here = difference(ours[name][at], theirs[name][at], found[name].limit)
            if not here.agrees:
                return {"name": name, "layer": layer} | as_json(here)
    return None


# ----- printing ------------------------------------------------------------------------------------------------------


def _table(found: dict[str, Difference]) -> str:
    headings = ["tensor", "shape", "largest error", "mean error", "relative norm", "worst at", "ours", "theirs",
                "allowed", "of it", "verdict"]  # fmt: skip
    rows = [
        [name, index_text(each.shape), *cells(each), str(each.limit), _share(each.share), _words(each)]
        for name, each in found.items()
    ]
    optional = ("theirs", "ours", "worst at", "shape", "of it", "mean error", "relative norm")
    return table(headings, rows, left=("tensor", "shape", "worst at", "allowed", "verdict"), optional=optional)


def _share(share: float) -> str:
    return "" if math.isinf(share) else f"{share:.2%}" if share < 10 else f"{share:.3g} x"


def _words(found: Difference) -> str:
    if found.not_finite:
        return f"FAILS: {found.not_finite:,} NaN or infinite"
    return "ok" if found.agrees else f"FAILS: {found.beyond:,} of {math.prod(found.shape):,}"


def _verdict(found: dict[str, Difference], first: dict[str, Any] | None, test: str) -> str:
    if first is None:
        return f"Logits, loss and all 16 gradients agree, by the tolerances of llm.c's {test}."
    failing = sum(not each.agrees for each in found.values())
    layer = "" if first["layer"] is None else f" of layer {first['layer']}"
    what = first["name"] if first["name"] in ("logits", "loss") else f"the gradient of {first['name']}{layer}"
    how = f"relative norm {small(first['relative_norm'])}, worst at {index_text(tuple(first['worst_index']))}"
    return (
        f"{failing} of {len(found)} fail the tolerances of llm.c's {test}.\n"
        f"The first that disagrees, in the order of computation: {what} ({how})."
    )

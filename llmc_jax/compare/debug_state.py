"""A debug state of llm.c beside our forward and backward of the same batch: errors, llm.c's verdict, who began.

`llmc-jax compare debug-state`. Leaves out the values between the operations (activations.py).
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc_jax.base.numbers import small
from llmc_jax.base.options import own
from llmc_jax.base.text import table
from llmc_jax.checkpoint.debug_state import DebugState, program, read_debug_state
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.compare.tensors import Difference, Limit, Show, as_json, cells, difference, index_text
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import ATTENTIONS, BY_NAME, TrainConfig
from llmc_jax.machine import jax_setup
from llmc_jax.machine.device import first_device
from llmc_jax.models.gpt2.operations import backward_operations
from llmc_jax.models.gpt2.tensors import Params, views

if TYPE_CHECKING:  # they bring JAX in
    from llmc_jax.compare.activations import Folder, Model, Step
    from llmc_jax.plan.plan import Plan

DESCRIPTION = """\
Run our forward and backward on the batch of a debug state (gpt2_124M_debug_state.bin) and compare logits, loss and
the 16 gradients with what it holds, by the tolerances of llm.c's own tests.

--dump FOLDER writes every value of the computation, --against FOLDER compares each with such a folder and names the
first operation that disagrees: the program computes it from the other side's own inputs, so that a local error
can be told from a propagated one. The folder may come from another device, dtype or kernel, or another program.

A folder holds NumPy files of float32, float64 or float16; any of them may be missing:
  encoded.npy                                    (B, T, C)
  layer_00.ln1_mean.npy, .ln1_rstd, .ln2_mean, .ln2_rstd         (B, T)
  layer_00.ln1.npy, .atty, .attproj, .residual2, .ln2, .fcproj, .residual3   (B, T, C)
  layer_00.qkv.npy (B, T, 3C), .fch and .fch_gelu (B, T, 4C), .att (B, NH, T, T)
  lnf_mean.npy, lnf_rstd, lnf, logits (B, T, V), losses (B, T), loss ()
  and their gradients, with a d before the name: dlogits.npy, dlnf, layer_00.dresidual3, .dfch_gelu, .dfch, .dln2,
  .dresidual2, .datty, .dqkv, .dln1, dencoded; of the weights dwte (Vp, C), dwpe, dlnfw, dlnfb, layer_00.dqkvw, ...
  dresidual2 and dresidual3 are the gradients of the whole stream at that point.
  x.npy and y.npy (B, T), if there, must be the batch of the debug state.
  index.json, if there: {"dtype": "fp32" | "bf16" | "fp16" | "fp64"}, what the values were computed in.

Exit status: 0 everything agrees, 2 bad input, 4 compared, and something differs."""

ROWS = 12  # of --against, of operations that fail of themselves, unless --all


def _limits(logits: float, loss: float, gradients: Limit) -> dict[str, Limit]:
    of_gradients = dict.fromkeys(Params._fields, gradients)
    return {"logits": Limit(logits, strict=True), "loss": Limit(loss, strict=True), **of_gradients}


# test_gpt2.cu compares the loss with figures that hold for GPT-2 124M alone; here with the debug state's, as the other
# two do. NaN, which slips through llm.c's comparison of the logits, is always a failure here.
OF_BF16 = {
    "wte": 5e-1, "wpe": 4e-3, "ln1w": 1e-1, "ln1b": 4e-2, "qkvw": 5e-2, "qkvb": 3.5e-2, "attprojw": 2e-2,
    "attprojb": 3e-2, "ln2w": 5e-2, "ln2b": 3e-2, "fcw": 3e-2, "fcb": 3e-2, "fcprojw": 2e-2, "fcprojb": 1e-2,
    "lnfw": 1e-1, "lnfb": 2e-2,
}  # fmt: skip
TOLERANCES = {  # which of llm.c's tests, and what it allows of logits, loss and the gradients of 16 tensors
    "cpu": ("test_gpt2.c", _limits(1e-2, 1e-2, Limit(2e-2))),
    # which computes this verdict of the gradients, and does not count it
    "fp32cu": ("test_gpt2_fp32.cu", _limits(1e-2, 1e-2, Limit(1e-2))),
    "fp32": ("test_gpt2.cu in FP32", _limits(1e-3, 1e-5, Limit(1e-6, 0.079))),
    "bf16": (
        "test_gpt2.cu in BF16",
        _limits(25.0, 0.05, Limit(0.0)) | {name: Limit(absolute, 0.079) for name, absolute in OF_BF16.items()},
    ),
}


Tensors = dict[str, Any]  # logits (B, T, V), loss () and the 16 gradients, by the tensors' names


# ----- the command line ----------------------------------------------------------------------------------------------


DTYPES = "|".join(each for each in BY_NAME["dtype"].choices if each != "auto")
SAME_MODEL = "|".join(name for name, computes in ATTENTIONS.items() if computes == ATTENTIONS["auto"])
TESTS = ", ".join(f"{name} = {test}" for name, (test, _) in TOLERANCES.items())
OPTIONS = (
    own("model", "MODEL", None, "the weights: a model_*.bin, or any checkpoint", type=Path, is_path=True),
    own("state", "STATE", None, "the debug state, *_debug_state.bin"),
    own("--dtype", DTYPES, None, "what we compute in [that of the model's weights]"),
    own("--tolerances", "|".join(TOLERANCES), None, f"whose verdict: {TESTS} [default: fp32; with 16 bits bf16]"),
    own("--kernels", "|".join(BY_NAME["kernels"].choices), "auto", "as in train.py [default auto]"),
    own("--attention", SAME_MODEL, "auto", "as in train.py [default auto]"),
    own("--strict-kernels", "", False, "as in train.py"),
    own("--dump", "FOLDER", None, "write every value of the forward pass"),
    own("--gradients", "", False, "with --dump: those of the backward pass too", needs="dump"),
    own("--against", "FOLDER", None, "compare with the values in a folder, one by one"),
    own("--operation-tolerance", "X", None, "the relative error that one operation of --against may have; 10 times as "
        "much for the whole computation [default 2e-5; where a side computes in fp16 2e-3, in bf16 1e-2]", 0,
        needs="against"),
    own("--all", "", False, "with --against: print every value, not only what tells most", needs="against"),
)  # fmt: skip


def run(args: argparse.Namespace, show: Show) -> tuple[bool, dict[str, Any]]:
    """Compare and print; return whether they agree, and the result for JSON. Raises InputError."""
    source = open_source(args.model)
    config, dtype = source.config, args.dtype or source.dtype
    state = read_debug_state(args.state, config)
    theirs = _tensors(config, state.logits, state.loss, state.gradient)
    import jax.numpy as jnp

    from llmc_jax.compare import activations
    from llmc_jax.training.state import DTYPES

    jax_setup.configure(tf32=False)  # as in llm.c's tests
    if args.dump:
        activations.check_new(args.dump)
    batch = activations.Batch(state.x, state.y)
    folder = activations.read_folder(args.against, config, batch) if args.against else None
    plan = _plan(args, dtype, config, state)
    flat = jnp.asarray(flat_parameters(source), DTYPES[dtype])
    test, limits = TOLERANCES[args.tolerances or ("fp32" if dtype == "fp32" else "bf16")]
    device = first_device().device_kind
    show(_headline(args, source, state, plan, device))

    model = activations.Model(config, views(flat, config), plan.execution)
    computed = program(config, plan.execution)(flat, state.x, state.y)
    ours = _tensors(config, *map(np.asarray, computed))
    found = compare(ours, theirs, limits)
    first = first_failure(found, ours, theirs, config)
    show(f"{_table(found)}\n\n{_verdict(found, first, test, folder is not None)}")
    agrees = first is None
    B, T = state.x.shape
    result = {
        "model": args.model, "state": args.state, "B": B, "T": T, "dtype": dtype, "device": device,
        "kernels": {choice.operation: choice.implementation for choice in plan.choices},
        "tolerances": test, "agrees": agrees, "first": first,
        "tensors": [{"name": name, **as_json(each)} for name, each in found.items()],
    }  # fmt: skip
    if args.dump or folder is not None:
        gradients = args.gradients or (folder is not None and activations.has_gradients(folder.values))
        values = activations.own_values(model, batch, gradients=gradients)
        if folder is not None:
            result["against"] = _compare_values(args, show, dtype, model, values, folder)
            agrees = agrees and result["against"]["agrees"]
        if args.dump:
            count = activations.write_folder(args.dump, model, values, dtype, gradients=args.gradients)
            show(f"\n{args.dump}: {count} arrays and {activations.INDEX}")
    return agrees, result


def _headline(args: argparse.Namespace, source: Source, state: DebugState, plan: "Plan", device: str) -> str:
    """Return what is compared."""
    (B, T), c = state.x.shape, source.config
    runs = ", ".join(f"{choice.operation}: {choice.implementation}" for choice in plan.choices)
    lines = [
        f"model  {args.model}: {source.kind}, {source.dtype}, L={c.num_layers} NH={c.num_heads} C={c.channels} "
        f"V={c.vocab_size}",
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


def places(num_layers: int) -> list[tuple[int | None, str]]:
    """Return the layer and the name of all that is compared, in the order of computation."""
    made = (name.rpartition(".") for each in backward_operations(num_layers) for name in each.outputs)
    gradients = [(int(of[6:]) if of else None, own[1:]) for of, _, own in made if own[1:] in Params._fields]
    return [(None, "logits"), (None, "loss"), *gradients]


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


def _verdict(found: dict[str, Difference], first: dict[str, Any] | None, test: str, against: bool) -> str:
    if first is None:
        return f"Logits, loss and all 16 gradients agree, by the tolerances of llm.c's {test}."
    failing = sum(not each.agrees for each in found.values())
    layer = "" if first["layer"] is None else f" of layer {first['layer']}"
    what = first["name"] if first["name"] in ("logits", "loss") else f"the gradient of {first['name']}{layer}"
    how = f"relative norm {small(first['relative_norm'])}, worst at {index_text(tuple(first['worst_index']))}"
    lines = [
        f"{failing} of {len(found)} fail the tolerances of llm.c's {test}.",
        f"The first that disagrees, in the order of computation: {what} ({how}).",
    ]
    if not against:
        lines.append("Given a folder of the other side's values, --against FOLDER names the operation.")
    return "\n".join(lines)


# ----- one by one ----------------------------------------------------------------------------------------------------


def _compare_values(
    args: argparse.Namespace, show: Show, dtype: str, model: "Model", values: dict[str, Any], folder: "Folder"
) -> dict[str, Any]:
    """Compare the values of a folder with ours, print, and return the JSON."""
    from llmc_jax.compare import activations

    tolerance = args.operation_tolerance
    if tolerance is None:
        tolerance = activations.allowed(dtype, folder.dtype)
    found = list(activations.steps(model, values, folder.values, tolerance))
    first = activations.first_step(found)
    lines = [f"\n{args.against}: {len(found)} values, {folder.dtype}"]
    lines += [f"warning: {args.against / name}.npy: not the name of a value; ignored" for name in folder.ignored[:8]]
    shown = found if args.all else _telling(found, first)
    if shown:
        lines += ["", _values_table(shown)]
    if len(shown) < len(found):
        lines.append(f"({len(found) - len(shown)} more; --all prints them)")
    lines += ["", _first_words(found, first, tolerance)]
    show("\n".join(lines))
    return {
        "folder": args.against, "dtype": folder.dtype, "tolerance": tolerance,
        "total_tolerance": activations.TOTAL * tolerance,
        "agrees": first is None, "first": None if first is None else found[first].name,
        "made_there": None if first is None else not found[first].local.agrees,
        "values": [step._asdict() | {"total": as_json(step.total), "local": as_json(step.local)} for step in found],
    }  # fmt: skip


def _telling(found: "list[Step]", first: int | None) -> "list[Step]":
    """Return the rows to print: round the first failure, and the other operations that fail of themselves."""
    if first is None:
        return []
    near = range(max(0, first - 2), first + 4)
    failing = [at for at, step in enumerate(found) if not step.local.agrees][:ROWS]
    return [step for at, step in enumerate(found) if at in near or at in failing]


def _values_table(found: "list[Step]") -> str:
    headings = ["value", "operation", "in total", "local error", "largest error", "worst at", "ours", "theirs",
                "verdict"]  # fmt: skip
    rows = []
    for step in found:
        largest, _, total, *where = cells(step.total)
        verdict = "LOCAL ERROR" if not step.local.agrees else "ok" if step.total.agrees else "propagated"
        if step.total.not_finite:
            verdict += f", {step.total.not_finite:,} NaN or infinite"
        rows.append([step.name, step.operation, total, small(step.local.relative_norm), largest, *where, verdict])
    optional = ("theirs", "ours", "worst at", "largest error")
    return table(headings, rows, left=("value", "operation", "worst at", "verdict"), optional=optional)


def _first_words(found: "list[Step]", first: int | None, tolerance: float) -> str:
    if first is None:
        return f"All {len(found)} values agree: each operation within {tolerance:g} of its own, by relative norm."
    step = found[first]
    total, local = small(step.total.relative_norm), small(step.local.relative_norm)
    lines = [f"First operation that disagrees: {step.operation}, output {step.name}, relative norm {total}."]
    if step.local.agrees:
        lines.append(
            f"The error does not originate there: from the other side's inputs we reproduce their value to {local}. "
            "Errors of earlier operations, each small enough, have added up."
        )
    else:
        lines.append(
            f"The error originates there: computed from the other side's inputs, ours differs by {local} (allowed "
            f"{tolerance:g})."
        )
        if step.covers:
            lines.append(f"The folder lacks values in between: {', '.join(step.covers)}. The error is in one of them.")
    return "\n".join(lines)

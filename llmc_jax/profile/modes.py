"""What the profiler prints and writes: a measured step, a calculated one, a trace that was kept, several in turns.

Leaves out its command line (command.py).
"""

import json
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import write_atomic
from llmc_jax.base.plain import to_json
from llmc_jax.base.streams import print_error
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine.cards import named
from llmc_jax.machine.device import device_label, gib
from llmc_jax.machine.gpus import GPUS, Machine, machine_of, peak_flops
from llmc_jax.machine.jax_setup import configure, settle
from llmc_jax.models.gpt2 import memory as memory_of
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.models.gpt2.work import Shape, flops_per_token, products_flops, step_work
from llmc_jax.plan.asked import model_of
from llmc_jax.plan.efficiency import gpu
from llmc_jax.plan.moments import largest_moment
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.profile import table
from llmc_jax.profile.trace import keep_step, kept_step, newest_trace, read_trace
from llmc_jax.run.console import format_table
from llmc_jax.run.record import check_writable
from llmc_jax.run.table import kernel_rows, option_rows, precision_text
from llmc_jax.training import outliers

# ----- what is printed ----------------------------------------------------------------------------------------------


def shape_rows(config: TrainConfig, model: ModelConfig, shape: Shape) -> list[tuple[str, Any]]:
    """Return the model and the batch, for the table at the top."""
    return [
        ("model", config.model),
        ("num_parameters", f"{num_parameters(model):,}"),
        ("B x T", f"{shape.batch} x {shape.sequence}"),
        ("micro-batches", shape.micro_batches),
        ("tokens of a step", f"{shape.rows * shape.micro_batches:,}"),
        ("computed in", shape.dtype),
        ("recompute", f"every {shape.recompute_blocks} blocks" if shape.recompute_blocks else shape.recompute),
    ]


def memory_rows(model: ModelConfig, shape: Shape) -> list[tuple[str, Any]]:
    """Return the memory by kind, from the shape."""
    memory = memory_of.memory(model, shape, outliers.BYTES)
    return [
        ("parameters", gib(memory.parameters)),
        ("optimizer m and v", gib(memory.optimizer)),
        ("gradient", gib(memory.gradient)),
        ("activations", f"{gib(memory.activations)}, kept for the backward"),
        ("logits", f"{gib(memory.head)}, at a time"),
    ]


def temporary_rows(plan: Plan) -> list[tuple[str, Any]]:
    """Return what the compiled step needs beside its arguments, and when it needs most."""
    moment, needed = largest_moment(plan)
    where = " on a CPU" if plan.machine.platform == "cpu" else ""
    return [(f"temporaries{where}", f"about {gib(needed.total())}, most at: {moment}")]


def flops_rows(model: ModelConfig, shape: Shape) -> list[tuple[str, Any]]:
    """Return the FLOPs by the definitions in use."""
    tokens = shape.rows * shape.micro_batches
    exact = products_flops(model, shape)
    llmc = flops_per_token(model, shape.sequence)
    palm = flops_per_token(model, shape.sequence, definition="palm")
    return [
        ("FLOPs of the products", f"{exact / tokens:,.0f} per token, {exact:,} per step"),
        ("FLOPs as llm.c counts", f"{llmc:,} per token (6N + 6LCT)"),
        ("FLOPs as PaLM counts", f"{palm:,} per token (6N + 12LCT)"),
    ]


def calculate(config: TrainConfig, own: SimpleNamespace) -> int:
    """Print everything that the shape alone says: `--calculate`."""
    model = model_of(config.init_from or config.model)
    device = own.device if own.device in (None, *GPUS) else named(own.device).device_kind
    config = replace(config, strict_kernels=False)  # nothing runs
    plan = make_plan(config, model, machine_of(device) if device else Machine("cpu", "cpu"))
    if device is None and config.attention in ("flash", "cudnn"):  # as asked, where no machine says that it cannot be
        plan = plan._replace(shape=plan.shape._replace(flash=True))
    shape = plan.shape
    attention = "without the T x T matrix" if shape.flash else "with the T x T matrix"
    sections = [
        [*shape_rows(config, model, shape), ("attention", attention)],
        flops_rows(model, shape),
        [*memory_rows(model, shape), *temporary_rows(plan)],
    ]
    roof = None
    if device is not None:
        if peak_flops(device, plan.product_precision) is None:
            raise InputError(
                f"--device {device}: it does not compute in {plan.product_precision}; take another --dtype"
            )
        roof = gpu(device, plan.product_precision).roof
    report = table.calculated(step_work(model, shape), roof, by_layer=own.layers)
    if own.json:
        memory = memory_of.memory(model, shape, outliers.BYTES)
        _write_json(own.json, {
            "shape": shape, "memory_bytes": memory._asdict() | {"state": memory.state},
            "activation_bytes": memory_of.activations(model, shape),
            "products_flops": products_flops(model, shape), "operations": [line._asdict() for line in report.lines],
        })  # fmt: skip
    print(format_table(sections))
    print(table.as_text(report))
    return ExitCode.DONE


def _write_json(path: str, content: dict[str, Any]) -> None:
    write_atomic(Path(path), (json.dumps(to_json(content), indent=1) + "\n").encode())


# ----- measuring ----------------------------------------------------------------------------------------------------


def read(own: SimpleNamespace) -> int:
    """Print the table of a trace from before: `--read`. Raises InputError for a trace that says nothing of the step."""
    report = _from_trace(Path(own.read), by_layer=own.layers)
    if reason := report.problem:
        raise InputError(f"--read {own.read}: {reason}; record it again with --trace")
    if own.json:
        _write_json(own.json, table.as_json(report))
    print(table.as_text(report))
    return ExitCode.DONE


def _from_trace(folder: Path, *, by_layer: bool) -> table.Report:
    """Return the table of a trace that was kept."""
    facts = kept_step(folder)
    trace = read_trace(newest_trace(folder), facts.program.name, facts.program.whole)
    return table.report_from_trace(
        trace, facts.program, step_work(facts.model, facts.shape), facts.roof, by_layer=by_layer
    )


def measure(config: TrainConfig, own: SimpleNamespace) -> int:
    """Compile, time and trace the step, and print the table: the default."""
    if own.trace:
        check_writable(Path(own.trace))
    notes = [*settle(steps=True), *configure(tf32=config.tf32)]
    jax.config.update("jax_enable_compilation_cache", False)  # the time of a compilation is to be measured
    from llmc_jax.profile import measure  # here, because the other modes do without

    bench = measure.prepared(config)
    for note in notes:
        print(note)
    times = measure.summary(bench.steps(own.steps, 2))
    used = measure.memory_used(bench)
    rates = measure.machine_rates(bench)
    place: Any = nullcontext(own.trace) if own.trace else tempfile.TemporaryDirectory()
    with place as folder:
        bench.record(Path(folder), own.traced)
        if rates.measured:
            rates = measure.better(rates, measure.machine_rates(bench))  # the machine may have been busy with others
        print(_summary(bench, times, used, rates))
        report = _traced(bench, own, Path(folder), rates.roof)
    if own.json:
        work = products_flops(bench.model, bench.shape)
        _write_json(own.json, {
            "shape": bench.shape, "device": bench.device, "jax": jax.__version__, "kernels": bench.plan.choices,
            "seconds": times, "tokens": bench.tokens, "compile_seconds": bench.compile_seconds, "products_flops": work,
            "rates": rates, "memory_used": used, "traced_without_graphs": bench.traced is not bench.compiled,
            "memory_bytes": memory_of.memory(bench.model, bench.shape, outliers.BYTES), **table.as_json(report),
        })  # fmt: skip
    if report.problem:
        print_error(f"note: no table: {report.problem}")
    else:
        print(table.as_text(report))
    return ExitCode.DONE


def _summary(bench: Any, times: Any, used: Any, rates: Any) -> str:
    """Return the box at the top: machine, model, step, memory."""
    plan, model, shape = bench.plan, bench.model, bench.shape
    per_second = bench.tokens / times.median
    step = [
        ("lowering, compiling", f"{bench.lower_seconds:.2f} s, {bench.compile_seconds:.2f} s"),
        ("step", f"{1e3 * times.median:.2f} ms, quartiles {1e3 * times.low:.2f} and {1e3 * times.high:.2f}, "
                 f"least {1e3 * times.least:.2f}, of {times.runs}"),
        ("tok/s", f"{per_second:,.0f}"),
    ]  # fmt: skip
    if rates.measured:
        share = products_flops(model, shape) / times.median / rates.products
        step += [
            ("products alone", f"{rates.products / 1e9:,.1f} GFLOP/s; the step has {100 * share:.1f}% of that rate"),
            ("fastest product", f"{rates.flops / 1e9:,.1f} GFLOP/s"),
            ("memory", f"{rates.memory / 1e9:,.1f} GB/s, only read {rates.reading / 1e9:,.1f}"),
            ("arrays for that", f"{gib(rates.array_bytes)} each"),
        ]  # fmt: skip
        if rates.cache is not None:
            step.append(("caches", gib(rates.cache)))
    else:
        for definition, name in (("llm.c", "MFU (llm.c)"), ("palm", "MFU (PaLM)")):
            each: Any = definition
            flops = flops_per_token(model, shape.sequence, definition=each) * per_second
            step.append((name, f"{100 * flops / rates.flops:.1f}% of {rates.flops / 1e12:,.1f} TFLOP/s"))
        step.append(("memory", f"{rates.memory / 1e9:,.1f} GB/s, from the table of GPUs"))
    memory = [
        *memory_rows(model, shape),
        ("program's arguments", f"{gib(used.arguments)}, {gib(used.overwritten)} of it overwritten"),
        ("program's temporaries", gib(used.temporaries)),
        ("peak", "not known" if used.peak is None else gib(used.peak)),
    ]
    machine = [
        ("device", device_label(bench.device)),
        ("JAX", jax.__version__),
        ("precision", precision_text(plan)),
        *kernel_rows(plan.choices),
        *option_rows(plan),
    ]
    sections = [machine, shape_rows(plan.config, model, shape), step, flops_rows(model, shape), memory]
    return format_table(sections)


def _traced(bench: Any, own: SimpleNamespace, folder: Path, roof: Any) -> Any:
    """Return the table of the trace that was recorded into a folder, and keep there what `--read` needs."""
    keep_step(folder, bench.traced.as_text(), bench.model, bench.shape, roof)
    if own.trace:
        print(f"trace: {own.trace}")
    if bench.traced is not bench.compiled:
        print("traced without CUDA graphs, which hide the names of kernels")
    return _from_trace(folder, by_layer=own.layers)


# ----- comparing ----------------------------------------------------------------------------------------------------


def compare(words: list[str], own: SimpleNamespace) -> int:
    """Run versions in turns and print how they compare: `--vs`."""
    from llmc_jax.profile import compare

    variants = [compare.Variant("this", tuple(words)), *(compare.parse_variant(text, words) for text in own.vs)]
    for note in settle(steps=True):
        print_error(f"note: {note}")
    results = compare.compare(variants, own.rounds, steps=3)
    if own.json:
        _write_json(own.json, {"results": results})
    print(compare.as_text(results))
    return ExitCode.DONE

"""The profiler's output: of a measured step, and of several in turns.

Leaves out its command line (command.py).
"""

import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from llmc_jax.base.errors import ExitCode
from llmc_jax.base.files import write_atomic
from llmc_jax.base.parsers import write_json
from llmc_jax.base.streams import print_error
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine.device import device_label, gib
from llmc_jax.machine.jax_setup import configure, settle
from llmc_jax.models.layout import num_parameters
from llmc_jax.models.work import Shape, flops_per_token, products_flops, step_work
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.memory import computed
from llmc_jax.plan.program import Program
from llmc_jax.profile import table
from llmc_jax.profile.trace import PROGRAM, read_trace
from llmc_jax.run.console import format_table
from llmc_jax.run.record import check_writable
from llmc_jax.run.table import kernel_rows, option_rows, precision_text

# ----- what is printed ----------------------------------------------------------------------------------------------


def shape_rows(config: TrainConfig, model: ModelShape, shape: Shape) -> list[tuple[str, Any]]:
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


# ----- measuring ----------------------------------------------------------------------------------------------------


def measure(config: TrainConfig, own: SimpleNamespace) -> int:
    """Compile, time and trace the step, and print the table: the default."""
    if own.trace:
        check_writable(Path(own.trace))
    notes = [*settle(steps=True), *configure(tf32=config.tf32)]
    jax.config.update("jax_enable_compilation_cache", False)  # the time of a compilation is to be measured
    from llmc_jax.profile import measure  # here, because --vs does without

    bench = measure.prepared(config)
    for note in notes:
        print(note)
    left = bench.step() * (own.steps + own.traced + 2)
    if left > 60:
        print_error(f"note: all steps together take about {left / 60:.0f} minutes; a smaller -b or -t takes less")
    times = measure.summary(bench.steps(own.steps, 1))
    used = measure.memory_used(bench)
    roof = measure.roof_of(bench, print_error)
    place: Any = nullcontext(own.trace) if own.trace else tempfile.TemporaryDirectory()
    with place as folder:
        bench.record(Path(folder), own.traced)
        print(_summary(bench, times, used, roof))
        report = _traced(bench, own, Path(folder), roof)
    if own.json:
        work = products_flops(bench.model, bench.shape)
        write_json({
            "shape": bench.shape, "device": bench.device, "jax": jax.__version__, "kernels": bench.plan.choices,
            "seconds": times, "tokens": bench.tokens, "compile_seconds": bench.compile_seconds, "products_flops": work,
            "roof": roof, "memory_used": used, "traced_without_graphs": bench.traced is not bench.compiled,
            "memory_bytes": computed(bench.plan).kinds, **table.as_json(report),
        }, own.json)  # fmt: skip
    if report.problem:
        print_error(f"note: no table: {report.problem}")
    else:
        print(table.as_text(report))
    return ExitCode.DONE


def _summary(bench: Any, times: Any, used: Any, roof: Roof | None) -> str:
    """Return the box at the top: machine, model, step, memory."""
    plan, model, shape = bench.plan, bench.model, bench.shape
    per_second, products = bench.tokens / times.median, products_flops(model, shape)
    step = [
        ("lowering, compiling", f"{bench.lower_seconds:.2f} s, {bench.compile_seconds:.2f} s"),
        ("step", f"{1e3 * times.median:.2f} ms, quartiles {1e3 * times.low:.2f} and {1e3 * times.high:.2f}, "
                 f"least {1e3 * times.least:.2f}, of {times.runs}"),
        ("tok/s", f"{per_second:,.0f}"),
        ("FLOPs of the products", f"{products / bench.tokens:,.0f} per token, {products:,} per step"),
    ]  # fmt: skip
    if roof is not None:
        on_gpu = bench.device.platform == "gpu"
        if on_gpu:
            for definition, name in (("llm.c", "MFU (llm.c)"), ("palm", "MFU (PaLM)")):
                each: Any = definition
                flops = flops_per_token(model, shape.sequence, definition=each) * per_second
                step.append((name, f"{100 * flops / roof.flops:.1f}% of {roof.flops / 1e12:,.1f} TFLOP/s"))
        source = "from the table of GPUs" if on_gpu else "the best that was measured here"
        step.append(("rates", f"{roof.flops / 1e9:,.0f} GFLOP/s, {roof.bandwidth / 1e9:,.1f} GB/s, {source}"))
    memory = [
        *((kind, gib(size)) for kind, size in computed(plan).kinds.items() if size),
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
    sections = [machine, shape_rows(plan.config, model, shape), step, memory]
    return format_table(sections)


def _traced(bench: Any, own: SimpleNamespace, folder: Path, roof: Roof | None) -> table.Report:
    """Return the table of the trace that was recorded into a folder."""
    text, work = bench.traced.as_text(), step_work(bench.model, bench.shape)
    if own.trace:
        write_atomic(folder / PROGRAM, text.encode())
        print(f"trace: {own.trace}")
    if bench.traced is not bench.compiled:
        print("traced without CUDA graphs, which hide the names of kernels")
    program = Program(text)
    trace = read_trace(folder, program.name, program.whole)
    return table.report_from_trace(trace, program, work, roof)


# ----- comparing ----------------------------------------------------------------------------------------------------


def compare(config: TrainConfig, words: list[str], own: SimpleNamespace) -> int:
    """Run versions in turns and print how they compare: `--vs`. config: of the words, flags of train.py."""
    from llmc_jax.profile import compare

    variants = [("this", config), *((text, compare.parse_variant(text, words)) for text in own.vs)]
    for note in settle(steps=True):
        print_error(f"note: {note}")
    results = compare.compare(variants, rounds=5, steps=3)
    if own.json:
        write_json({"results": results}, own.json)
    print(compare.as_text(results))
    return ExitCode.DONE

"""Where the time of a whole training step goes on a GPU that is not there: a table by group of kernels.

    python benchmarks/step_table.py -e d12 -b 64 -r 0            one step, as train.py's flags have it
    python benchmarks/step_table.py … --gpu a100 --json FILE     for another GPU; keep the figures
    python benchmarks/step_table.py … --compare FILE             beside figures that were kept
    python benchmarks/step_table.py --write                      every step of CASES into results/step_table.md

Needs a Python with JAX's CUDA plugin (`make test-aot` makes one); the table of a program's text, which --keep FILE
writes, does not: --hlo FILE. The step is compiled as train.py does it on that GPU. Kernels are those of the optimized
program, before a CUDA graph makes one launch of several, the body of a loop as often as it runs. Nothing runs: the
times are estimates.

- Rates are the typical ones of llmc_jax/plan/efficiency.py, which names their sources: of Hopper those that one NVIDIA
  H200 reached, but of products of ours; these, and those of an A100, an RTX 4090 and a B200, are estimates: shares of a
  peak that other programs or cards reached. Between: by the highest of all rates, and by the lowest.
- A product takes its operations over a rate, divided by the share of the multiprocessors that its tiles (of 128 x 256,
  and the others that its GPU takes) keep busy, the sum split where they are too few; never less than its bytes at the
  speed of a copy. What an epilogue adds is its bytes alone.
- Attention takes the operations inside the mask over a rate of its own (--attention).
- Anything else takes its bytes at the rate that its operation was measured at, or else at 86 % of the speed of a copy,
  2 µs at the least.
- Each kernel is followed by 1 µs of nothing, on Hopper by 0.1 µs.

Bytes are those of each kernel's arrays, of an array that it takes a part of only the part; of attention, AdamW and the
embedding, which write parts of arrays, those that llmc_jax/models/work.py knows. What the caches hold and how
many instructions a kernel has is not seen.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.hlo import copied_arrays  # noqa: E402
from benchmarks.launches import launched, moved_bytes  # noqa: E402
from llmc_jax.base.errors import InputError  # noqa: E402
from llmc_jax.config.flags import parse_args  # noqa: E402
from llmc_jax.config.model import ModelConfig, parse_descriptor  # noqa: E402
from llmc_jax.config.train import TrainConfig  # noqa: E402
from llmc_jax.machine import gpus  # noqa: E402
from llmc_jax.machine.hlo import Instruction, elements  # noqa: E402
from llmc_jax.models.work import PHASES, Shape, rows_at_once, step_work  # noqa: E402
from llmc_jax.plan import efficiency  # noqa: E402
from llmc_jax.plan.efficiency import (  # noqa: E402
    ATTENTION,
    ATTENTION_BACKWARD,
    COPY,
    MEMORY,
    OWN_PRODUCTS,
    PRODUCTS,
    Hardware,
)
from llmc_jax.plan.program import Place, Program, is_own_product  # noqa: E402

RESULTS = ROOT / "benchmarks/results/step_table.md"
NOW = ROOT / "benchmarks/results/step_table.json"
CASES = (
    ("h200", "-e d12 -b 64 -r 0"),
    ("h200", "-e d12 -b 64 -r 1"),
    ("h200", "-e d12 -b 64 -r 0 --optimizer muon"),
    ("h200", "-e d24 -b 32 -r 0"),
    ("h200", "-e d36 -b 32 -r 0"),
    ("h200", "-e d48 -b 16 -r 0"),
    ("a100", "-e d12 -b 64 -r 0"),
    ("rtx4090", "-e d12 -b 16 -r 0"),
    ("b200", "-e d12 -b 64 -r 0"),
)

LINEAR = ("qkv", "attproj", "fc", "fcproj")
LAYERNORMS = ("ln1", "ln2", "lnf")
GROUPS = (
    "products forward", "products backward", "products of the head", "bias additions", "bias gradients",
    "sums of partial sums", "attention forward", "delta of attention", "attention backward", "layernorm forward",
    "layernorm backward", "GELU forward", "GELU backward", "classifier", "embedding", "slices of weights",
    "gradient in one piece", "norm", "AdamW", "products update", "optimizer", "other",
)  # fmt: skip
# Groups whose kernels write parts of arrays, and what models/work.py calls their work.
KNOWN_BYTES = {
    "attention forward": ("forward", "attention"),
    "attention backward": ("backward", "attention"),
    "embedding": ("backward", "embedding"),
    "AdamW": ("update", "adamw"),
}

LARGE = 1_000_000  # bytes: copies below are not worth a look


class Group(NamedTuple):
    """What the kernels of one group do in a step."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0


class Facts(NamedTuple):
    """What a program should have none of, and what its library products do beside multiplying."""

    copies: list[str]  # arrays of at least LARGE bytes that are copied whole
    wide: list[str]  # activations in float32 that a kernel leaves in memory
    epilogues: dict[str, int]  # cuBLASLt's, how many products have each


class Table(NamedTuple):
    """A step by group."""

    case: str
    jax: str
    tokens: int  # of one step
    rates: dict[str, float]  # FLOP/s and bytes per second
    groups: dict[str, Group]
    facts: Facts
    between: tuple[float, float]  # seconds by the highest of all rates, and by the lowest

    @property
    def total(self) -> Group:
        """All groups together."""
        return Group(*(sum(column) for column in zip(*self.groups.values(), strict=True)))


# ----- groups -------------------------------------------------------------------------------------------------------


def group_of(program: Program, instruction: Instruction, rows: int, model: ModelConfig) -> str:
    """The group of a kernel. rows: of a micro-batch, B T."""
    parts = [instruction, *program.members(instruction)]
    owner = program.owners.get(instruction.name)
    place = owner.place if owner else Place("forward", "other")
    if any(program.product_flops(each) for each in parts):
        return "products of the head" if place.operation == "head" else f"products {place.phase}"
    names = " ".join(each.op_name for each in parts)
    if any("mosaic_gpu" in each.rest or "triton_kernel_call" in each.rest for each in parts):
        return _kernel_group(place, names)
    if place.operation in ("gradient", "norm", "adamw"):
        return {"gradient": "gradient in one piece", "norm": "norm", "adamw": "AdamW"}[place.operation]
    if place.operation in ("embedding", "classifier", "weights"):
        return "slices of weights" if place.operation == "weights" else place.operation
    summed = (*LINEAR, *LAYERNORMS, "gelu", "attention")
    if place.phase == "backward" and place.operation in summed and any(each.opcode == "reduce" for each in parts):
        if place.operation == "attention" and elements(instruction.shape) == rows * model.num_heads:
            return "delta of attention"
        largest = max((elements(program.by_name[name].shape) for name in instruction.operands), default=0)
        return "bias gradients" if largest >= rows * model.channels else "sums of partial sums"
    if place.operation in LINEAR:
        return "sums of partial sums" if "dot_general" in instruction.op_name else "bias additions"
    return _kernel_group(place, names)


def _kernel_group(place: Place, names: str) -> str:
    """The group of a handwritten kernel, or of XLA's in its place. What is computed again is a forward."""
    phase = "forward" if place.phase == "forward" or "_forward" in names else "backward"
    if place.operation == "head":  # around a product of ours: what is left of the classifier
        return "classifier"
    known = {"gelu": "GELU", "attention": "attention"} | dict.fromkeys(LAYERNORMS, "layernorm")
    if place.operation in known:
        return f"{known[place.operation]} {phase}"
    return {"adamw": "AdamW", "norm": "norm", "matrices": "optimizer"}.get(
        place.operation, place.operation if place.operation in GROUPS else "other"
    )


# ----- seconds ------------------------------------------------------------------------------------------------------


def kernel_seconds(
    program: Program, instruction: Instruction, moved: int, rates: dict[str, float], here: Hardware
) -> float:
    """Seconds of one kernel but attention's, with the gap behind it."""
    flops, ours = 0, False
    for part in (instruction, *program.members(instruction)):
        if own := program.product_flops(part):
            flops, ours = flops + own, ours or is_own_product(part)
            sides = [int(size) for size in re.findall(r"\d+", re.findall(r"\[([\d,]*)\]", part.shape)[0])]
    if not flops:
        owner = program.owners.get(instruction.name)
        return max(moved / memory_rate(rates, owner.place if owner else None), here.least) + here.gap.typical
    rate, filled = ("products of ours", here.filled_by_own) if ours else ("products", here.filled)
    by_products = flops / (rates[rate] * filled(math.prod(sides[:-1]), sides[-1]))
    return max(by_products, moved / rates["bandwidth"]) + here.gap.typical


def memory_rate(rates: dict[str, float], place: Place | None) -> float:
    """Bytes per second of what waits for memory. place: whose it is."""
    if place is not None and place.operation == "gradient":
        return rates["bandwidth"]  # copies of the pieces
    return rates.get(f"{place.phase} {place.operation}", rates["memory"]) if place else rates["memory"]


# ----- a table ------------------------------------------------------------------------------------------------------


def rates_of(gpu: str, dtype: str, attention: str = "", end: str = "typical") -> dict[str, float]:
    """Return the rates to estimate with. attention: TFLOP/s forward and backward, as 300,250. Raises InputError.

    end: low, typical or high.
    """
    here = hardware_of(gpu, dtype)
    shares = {kind: getattr(share, end) for kind, share in here.shares.items()}
    try:
        forward, backward = (1e12 * float(each) for each in attention.split(",")) if attention else (
            here.flops * shares[kind] for kind in (ATTENTION, ATTENTION_BACKWARD)
        )  # fmt: skip
    except ValueError as error:
        raise InputError(f"--attention {attention}: must be two rates in TFLOP/s, as in 300,250") from error
    return {
        "products": here.flops * shares[PRODUCTS], "products of ours": here.flops * shares[OWN_PRODUCTS],
        "attention_forward": forward, "attention_backward": backward, "bandwidth": here.bandwidth * shares[COPY],
        "memory": here.bandwidth * shares[MEMORY],
        **{name: here.bandwidth * each for name, each in shares.items() if name.startswith(PHASES)},
    }  # fmt: skip


def hardware_of(gpu: str, dtype: str) -> Hardware:
    """Return a GPU by its short name, its products in what a step of a dtype computes them in. Raises InputError."""
    return efficiency.gpu(gpus.known_target(gpu).device_kind, "tf32" if dtype == "fp32" else dtype)  # type: ignore[arg-type]


def make_table(
    case: str, jax: str, text: str, gpu: str, model: ModelConfig, shape: Shape, attention: str = ""
) -> Table:
    """The table of a program's text. gpu: a name of gpus.TARGETS. Raises InputError as `rates_of`."""
    program = Program(text)
    rates, *ends = (rates_of(gpu, shape.dtype, attention, end) for end in ("typical", "high", "low"))
    groups = groups_of(program, gpu, model, shape, rates)
    fast, slow = (sum(each.seconds for each in groups_of(program, gpu, model, shape, end).values()) for end in ends)
    tokens, facts = shape.rows * shape.micro_batches, facts_of(program, text, model, shape)
    return Table(case, jax, tokens, rates, groups, facts, (fast, slow))


def groups_of(
    program: Program, gpu: str, model: ModelConfig, shape: Shape, rates: dict[str, float]
) -> dict[str, Group]:
    """Return what the kernels of each group do in a step, and how long at some rates."""
    here, groups = hardware_of(gpu, shape.dtype), dict.fromkeys(GROUPS, Group())
    for instruction, times in launched(program):
        name = group_of(program, instruction, shape.rows, model)
        known = name in KNOWN_BYTES and "mosaic_gpu" in instruction.rest
        moved = 0 if known or stands_by(program, instruction) else moved_bytes(program, instruction)
        flops = sum(program.product_flops(each) for each in (instruction, *program.members(instruction)))
        seconds = here.gap.typical if known else kernel_seconds(program, instruction, moved, rates, here)
        groups[name] = _added(groups[name], Group(times, times * moved, times * flops, times * seconds))
    for name, (phase, operation) in KNOWN_BYTES.items():
        work = [each for each in step_work(model, shape) if (each.phase, each.operation) == (phase, operation)]
        moved, flops = sum(each.bytes for each in work), sum(each.flops for each in work)
        seconds = moved / memory_rate(rates, Place(phase, operation))
        if operation == "attention":
            seconds = max(seconds, flops / rates[f"attention_{phase}"])
        groups[name] = _added(groups[name], Group(0, moved, flops, seconds))
    return groups


def stands_by(program: Program, instruction: Instruction) -> bool:
    """Return whether a kernel does nothing in a usual step: the head's that run where a sum is too large."""
    parts = (instruction, *program.members(instruction))
    return any(re.search(r"/head_\w+_(again|largest)/", each.op_name) for each in parts)


def _added(one: Group, other: Group) -> Group:
    return Group(*(a + b for a, b in zip(one, other, strict=True)))


def facts_of(program: Program, text: str, model: ModelConfig, shape: Shape) -> Facts:
    """Return what the program copies, what it leaves in float32, and the epilogues of its products."""
    copies = [name for name, _ in copied_arrays(text, LARGE)]
    # The gradient of wte has more elements than a few rows of activations, so rows are looked for.
    of_rows = {rows_at_once(shape), shape.rows}
    wide, epilogues = [], Counter[str]()
    for instruction, times in launched(program):
        for part in (instruction, *program.members(instruction)):
            epilogues.update(times * re.findall(r'"epilogue":"(\w+)"', part.rest))
        for dims in re.findall(r"f32\[([\d,]+)\]", instruction.shape):
            sizes = [int(size) for size in dims.split(",")]
            leading = {math.prod(sizes[:count]) for count in range(1, len(sizes))}
            if shape.dtype != "fp32" and leading & of_rows and sizes[-1] >= model.head_size:
                wide.append(f"{instruction.name} f32[{dims}]")
    return Facts(copies, wide, dict(sorted(epilogues.items())))


def case_of(gpu: str, words: str) -> tuple[str, TrainConfig, ModelConfig]:
    """The name of a case, its configuration, and its model. Raises InputError."""
    config = parse_args(words.split())
    return f"{gpu} {words}", config, parse_descriptor(config.model)


def text_of(gpu: str, words: str, kept: Path | None = None) -> tuple[str, Shape]:
    """A step's program, compiled or as it was kept, and its shape. One GPU in a process. Raises InputError."""
    from tests.aot.cases import StepCase

    _, config, _ = case_of(gpu, words)
    dtype = "bf16" if config.dtype == "auto" else config.dtype
    case = StepCase(config.model, dtype, config.batch_size, config.grad_accumulation, tuple(words.split()))
    return kept.read_text() if kept else case.compile(gpu).hlo, case.plan(gpu).shape


# ----- as text ------------------------------------------------------------------------------------------------------


def as_json(table: Table) -> dict[str, Any]:
    groups = {name: group._asdict() for name, group in table.groups.items()}
    return table._asdict() | {"groups": groups, "facts": table.facts._asdict()}


def from_json(found: dict[str, Any]) -> Table:
    groups = {name: Group(**group) for name, group in found["groups"].items()}
    between = tuple(found["between"])
    return Table(**(found | {"groups": groups, "facts": Facts(**found["facts"]), "between": between}))


def read_tables(path: Path) -> dict[str, Table]:
    """The tables of a file, by case; none where there is no file."""
    return {each["case"]: from_json(each) for each in json.loads(path.read_text())} if path.exists() else {}


def write_tables(path: Path, tables: Iterable[Table]) -> None:
    path.write_text("[\n" + ",\n".join(json.dumps(as_json(table)) for table in tables) + "\n]\n")


def render(now: Table, before: Table | None = None) -> str:
    """A table as Markdown, beside an earlier one of the same case."""
    columns = [before, now] if before else [now]
    head = ["kernels", "GB", "ms"]
    lines = ["| group | " + " | ".join(head * len(columns)) + " |", "|---|" + "---:|" * 3 * len(columns)]
    if before:
        lines.insert(0, "Left before, right now.\n")
    for name in GROUPS:
        groups = [table.groups.get(name, Group()) for table in columns]
        if any(groups_.kernels or groups_.bytes for groups_ in groups):
            lines.append(f"| {name} | {' | '.join(_cells(group) for group in groups)} |")
    lines.append(f"| **all** | {' | '.join(_cells(table.total) for table in columns)} |")
    told = " → ".join(
        f"{table.total.kernels} kernels, {1e3 * table.total.seconds:.1f} ms ({ends_of(table)}), "
        f"{table.tokens / table.total.seconds:,.0f} tokens/s"
        for table in columns
    )
    return "\n".join([*lines, "", f"Estimated: {told}.", *map(_facts_line, columns[-1:])])


def ends_of(table: Table) -> str:
    """Return the milliseconds between which all rates lie."""
    return " to ".join(f"{1e3 * seconds:.1f}" for seconds in table.between)


def _cells(group: Group) -> str:
    return f"{group.kernels} | {group.bytes / 1e9:.2f} | {1e3 * group.seconds:.2f}"


def _facts_line(table: Table) -> str:
    copies, wide, epilogues = table.facts
    said = ", ".join(f"{count} {name}" for name, count in epilogues.items()) or "none"
    return (
        f"Arrays copied: {', '.join(copies) or 'none'}. Activations in float32: {', '.join(wide) or 'none'}. "
        f"Epilogues of cuBLASLt: {said}."
    )


def rates_line(table: Table) -> str:
    rates = table.rates
    return (
        f"products {rates['products'] / 1e12:.0f} TFLOP/s, attention {rates['attention_forward'] / 1e12:.0f} and "
        f"{rates['attention_backward'] / 1e12:.0f} TFLOP/s, a copy {rates['bandwidth'] / 1e9:,.0f} GB/s"
    )


def page(now: dict[str, Table]) -> str:
    """benchmarks/results/step_table.md."""
    method = (__doc__ or "").partition("estimates.\n\n")[2].strip()
    parts = [
        "# Where the time of a step goes, by group of kernels\n\n"
        "`python benchmarks/step_table.py --write`, JAX "
        f"{', '.join(sorted({table.jax for table in now.values()}))}. Nothing was run on a GPU: programs are compiled, "
        f"kernels and bytes counted, times estimated.\n\n{method}"
    ]
    parts.append("| step | kernels | GB | ms | between | tokens/s |\n|---|---:|---:|---:|---|---:|")
    for case, table in now.items():
        kernels, moved, _, seconds = table.total
        parts[-1] += (
            f"\n| {case} | {kernels} | {moved / 1e9:.1f} | {1e3 * seconds:.1f} | {ends_of(table)} | "
            f"{table.tokens / seconds:,.0f} |"
        )
    for case, table in now.items():
        parts.append(f"## {case}\n\nRates: {rates_line(table)}.\n\n{render(table)}")
    return "\n\n".join(parts) + "\n"


# ----- the command --------------------------------------------------------------------------------------------------


def write() -> None:
    """Every step of CASES, a process for each, since one compiles for one kind of GPU."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for gpu, words in CASES:
            output = Path(folder) / "table.json"
            command = [sys.executable, __file__, "--gpu", gpu, "--json", str(output), *words.split()]
            subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
            found += read_tables(output).values()
    write_tables(NOW, found)
    RESULTS.write_text(page({table.case: table for table in found}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(gpus.TARGETS)} (default h200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="show those that --json kept beside them")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the program's text there")
    parser.add_argument("--hlo", type=Path, metavar="FILE", help="of this program's text; compiles nothing")
    parser.add_argument("--attention", default="", metavar="F,B", help="TFLOP/s of attention, forward and backward")
    parser.add_argument("--write", action="store_true", help=f"all of CASES, into {RESULTS.relative_to(ROOT)}")
    options, rest = parser.parse_known_args()
    if options.write:
        write()
        return
    words = " ".join(rest)
    try:
        case, _, model = case_of(options.gpu, words)
        text, shape = text_of(options.gpu, words, options.hlo)
        import jax

        table = make_table(case, jax.__version__, text, options.gpu, model, shape, options.attention)
    except InputError as error:
        parser.exit(2, f"step_table.py: {error}\n")
    if options.keep:
        options.keep.write_text(text)
    if options.json:
        write_tables(options.json, [table])
    kept = read_tables(options.compare) if options.compare else {}
    before = kept.get(case) or (next(iter(kept.values())) if len(kept) == 1 else None)
    print(f"{case}, JAX {table.jax}. Rates: {rates_line(table)}.\n\n{render(table, before)}")


if __name__ == "__main__":
    main()

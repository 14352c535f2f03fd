"""The measured time of a step by group of kernels, beside what results/step_table.md estimated."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

OFF, LEAST = 0.1, 0.05  # share, and milliseconds, by which an estimate may be off before the page says so


class Group(NamedTuple):
    """One group of kernels in a step; milliseconds."""

    name: str
    kernels: int  # that ran
    estimated: float | None  # None: nobody estimated it
    measured: float

    @property
    def off(self) -> float | None:
        """Return the measured time over the estimated one, less one."""
        return self.measured / self.estimated - 1 if self.estimated else None


class Groups(NamedTuple):
    """A traced step."""

    step: str  # train.py's flags
    source: str  # of the estimates; empty: there are none
    step_ms: float
    idle_ms: float  # in which nothing ran
    groups: tuple[Group, ...]


# ----- from a trace -------------------------------------------------------------------------------------------------


def write(trace: Path, words: str, profiled: dict[str, Any], path: Path) -> None:
    """Write what `read` reads. trace: a folder of the profiler's; profiled: what its --json wrote."""
    path.write_text(json.dumps(of_trace(trace, words, profiled)._asdict(), indent=1) + "\n")


def of_trace(folder: Path, words: str, profiled: dict[str, Any]) -> Groups:
    """Return the groups of the step in a trace folder. Raises InputError if it is none."""
    from benchmarks import step_table
    from llmc_jax.machine.hlo import CONTAINERS
    from llmc_jax.models.work import Shape
    from llmc_jax.plan.asked import asked_config, model_of
    from llmc_jax.plan.program import Program
    from llmc_jax.profile.trace import PROGRAM, read_trace, shared_time

    program, shape = Program((folder / PROGRAM).read_text()), Shape(**profiled["shape"])
    model = model_of(asked_config(words).model)
    trace = read_trace(folder, program.name, program.whole)
    containers = {name for name, each in program.by_name.items() if each.opcode in CONTAINERS}
    steps, seconds, calls = max(1, len(trace.steps)), defaultdict[str, float](float), defaultdict[str, int](int)
    for name, use in shared_time(trace.spans, containers).items():
        instruction, group = program.by_name.get(name), "other"
        if instruction is not None and name not in containers:
            group = step_table.group_of(program, instruction, shape.rows, model)
        seconds[group] += use.seconds / steps
        calls[group] += use.calls
    step = sum(end - start for start, end in trace.steps) * 1e-9 / steps if trace.steps else sum(seconds.values())
    estimates, source = estimated(folder, shape, words, profiled["device"]["kind"])
    groups = [
        Group(name, round(calls[name] / steps), estimates.get(name), 1e3 * seconds[name])
        for name in step_table.GROUPS
        if name in seconds or estimates.get(name)
    ]
    return Groups(words, source, 1e3 * step, 1e3 * max(0.0, step - sum(seconds.values())), tuple(groups))


def estimated(folder: Path, traced: Any, words: str, device: str) -> tuple[dict[str, float], str]:
    """Return the milliseconds of each group: as they were committed, else of the very program; and which of these.

    traced: the shape of the step; device: as the driver names it.
    """
    from benchmarks import step_table
    from llmc_jax.machine import gpus
    from llmc_jax.profile.trace import PROGRAM

    gpu = next((name for name, target in gpus.TARGETS.items() if target.device_kind == device), None)
    if gpu is None:
        return {}, ""
    _, config, model = step_table.case_of(gpu, words)
    shape = (config.model, config.batch_size, config.sequence_length, config.recompute)
    for case, table in step_table.read_tables(step_table.NOW).items():
        name, _, flags = case.partition(" ")
        _, other, _ = step_table.case_of(name, flags)
        if name == gpu and shape == (other.model, other.batch_size, other.sequence_length, other.recompute):
            return _milliseconds(table), "results/step_table.md"
    rates = step_table.rates_of(gpu, traced.dtype)
    table = step_table.make_table(words, "", (folder / PROGRAM).read_text(), gpu, model, traced, rates)
    return _milliseconds(table), "step_table.py of this very program"


def _milliseconds(table: Any) -> dict[str, float]:
    return {name: 1e3 * group.seconds for name, group in table.groups.items() if group.seconds}


# ----- on the page --------------------------------------------------------------------------------------------------


def read(path: Path) -> Groups | None:
    """Return what `write` wrote; None where it wrote nothing."""
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    return Groups(**(content | {"groups": tuple(Group(*each) for each in content["groups"])}))


def section(found: Groups, card: str) -> str:
    """Return the part of the page, in Markdown."""
    lines = [
        f"## The step by group of kernels: {card}", "",
        f"`{found.step}`: {found.step_ms:.1f} ms a step under the profiler, {found.idle_ms:.1f} ms of it idle. "
        f"Estimates: {found.source or 'none for this GPU'}.", "",
        "| group | kernels | estimated, ms | measured, ms | off |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    total = Group("**all**", 0, sum(each.estimated or 0 for each in found.groups), 0)
    total = total._replace(
        kernels=sum(each.kernels for each in found.groups), measured=sum(each.measured for each in found.groups)
    )
    for each in (*found.groups, total):
        estimate = f"{each.estimated:.2f}" if each.estimated else ""
        cells = [each.name, f"{each.kernels}", estimate, f"{each.measured:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {'' if each.off is None else f'{100 * each.off:+.0f} %'} |")
    return "\n".join(lines)


def wrong_estimates(found: Groups, card: str) -> list[str]:
    """Return the sentence that says which estimates were off, the most milliseconds first; none without estimates."""
    if not found.source:
        return []
    far = [each for each in found.groups if each.off is not None and abs(each.off) > OFF]
    far = [each for each in far if abs(each.measured - (each.estimated or 0)) > LEAST]
    if not far:
        return [f"{card}: no estimate was off by more than {100 * OFF:.0f} %."]
    far.sort(key=lambda each: -abs(each.measured - (each.estimated or 0)))
    said = ", ".join(f"{each.name} ({each.estimated:.2f} → {each.measured:.2f} ms)" for each in far)
    return [f"{card}, estimates off by more than {100 * OFF:.0f} %: {said}."]

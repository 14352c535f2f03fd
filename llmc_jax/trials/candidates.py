"""What is tried for a run, as plain data: each operation's implementations, and its shapes."""

from itertools import chain, takewhile
from typing import NamedTuple

from llmc_jax import kernels
from llmc_jax.config.model import ModelShape, attention_of
from llmc_jax.kernels.choice import Finding, Implementation, Preferences, Setting, candidates
from llmc_jax.machine.compiling import Options
from llmc_jax.machine.gpus import Machine
from llmc_jax.models.layout import flat_size, head_size, head_spec, letters, widths
from llmc_jax.models.program import replaced


class Case(NamedTuple):
    """A run as the trials see it: what decides shapes, precision and which implementations come into question."""

    model: ModelShape
    batch_size: int  # B of a micro-batch
    sequence_length: int
    accumulation: int
    dtype: str  # fp32, bf16, fp16
    rounding: str
    master_weights: bool
    tf32: bool
    recompute: int
    recompute_blocks: int
    logit_rows: int
    options: Options  # of XLA
    asked: Preferences
    machine: Machine
    other_options: Options = ()  # of XLA, which may be better here than its defaults
    interpret: bool = False  # kernels are simulated on a CPU: for tests

    @property
    def setting(self) -> Setting:
        """Return what an implementation may or may not be able to serve."""
        return Setting(
            self.machine, self.dtype, head_size(self.model), self.interpret, attention=attention_of(self.model),
            widths=widths(self.model), replaced=replaced(self.model),
        )  # fmt: skip


# ----- what is tried ------------------------------------------------------------------------------------------------


def by_operation(case: Case) -> dict[str, list[Implementation]]:
    """Return what may run each operation, in order of preference: the first would run untried, the last is XLA's.

    An operation with only one possible implementation is left out. Attention with the T x T matrix is XLA's alone:
    ours is for who asks for it.
    """
    found = {}
    for operation in kernels.GROUPS:
        rows = candidates(operation, case.asked, case.setting).rows
        rows = [row for row in rows if not row.problem(case.setting) and (row.by == "xla" or not row.makes_matrix)]
        before = list(takewhile(lambda row: row.by != "xla", rows))
        if before:
            found[operation] = rows[: len(before) + 1]
    return found


def listed(case: Case) -> list[Finding]:
    """Return what is tried: all but XLA's, those first that would run."""
    rows = [each[:-1] for each in by_operation(case).values()]
    return [Finding(row.operation, row.name) for row in chain([each[0] for each in rows], *(each[1:] for each in rows))]


# ----- its shapes ---------------------------------------------------------------------------------------------------


def parts(case: Case, operation: str) -> dict[str, list[int]]:
    """Return the functions of an operation as problems of problems.py, with their sizes: the run's own."""
    model, B, T = case.model, case.batch_size, case.sequence_length
    numbers, rows, size = letters(model), B * T, flat_size(model)
    at_once = min(case.logit_rows or rows, rows)
    Vp, C = head_spec(model).shape
    sizes = {
        "layernorm": [rows, C],
        "gelu": [rows, numbers.get("F", 4 * C)],
        "attention": [B, T, numbers.get("NH", 1), head_size(model)],
        "classifier": [at_once, model.vocab_size, Vp],
        "embedding backward": [B, T, C, Vp],
        "adamw": [size],
        "global norm": [size],
        "head": [at_once, C, model.vocab_size, Vp],
        "fc": [rows, C, numbers.get("F", 4 * C)],
        "fcproj": [rows, C, numbers.get("F", 4 * C)],
    }[operation]
    if operation == "attention":
        return {"relu_attention" if attention_of(model).weights == "relu" else "attention": sizes}
    return dict.fromkeys(kernels.GROUPS[operation], sizes)

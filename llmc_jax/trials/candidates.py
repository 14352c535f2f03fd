"""What is tried for a run, as plain data: each operation's implementations, and its shapes."""

import math
from typing import NamedTuple

from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import ATTENTIONS
from llmc_jax.kernels.choice import Implementation, Preferences, Setting, candidates, implementations
from llmc_jax.kernels.findings import Finding
from llmc_jax.machine.compiling import Options
from llmc_jax.machine.target import Machine
from llmc_jax.models.gpt2.tensors import flat_size

LAYERS = 6  # of the step that is compared: a deeper model repeats them, and its compilation takes as much longer


class Case(NamedTuple):
    """A run as the trials see it: what decides shapes, precision and which implementations come into question."""

    model: ModelConfig
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
    gelu_fusion: int
    options: Options  # of XLA
    asked: Preferences
    machine: Machine
    other_options: Options = ()  # of XLA, which may be better here than its defaults
    interpret: bool = False  # kernels are simulated on a CPU: for tests

    @property
    def setting(self) -> Setting:
        """Return what an implementation may or may not be able to serve."""
        return Setting(self.machine, self.dtype, self.model.head_size, self.interpret)


# ----- what is tried ------------------------------------------------------------------------------------------------


def by_operation(case: Case) -> dict[str, list[Finding]]:
    """Return what is to be tried for each operation, in order of preference: the first would run unmeasured.

    An operation with only one possible implementation is left out.
    """
    rows = {operation: _rows(case, operation) for operation in kernels.GROUPS}
    return {
        operation: [Finding(operation, row.name, version) for row in each for version in _versions(case, row)]
        for operation, each in rows.items()
        if any(row.by != "xla" for row in each)
    }


def listed(case: Case) -> list[Finding]:
    """Return all of it, the most important first: what would run, what that is compared with, other versions of it."""
    found = by_operation(case).values()
    others = [finding for each in found for finding in each[1:]]
    return [each[0] for each in found] + sorted(others, key=lambda finding: bool(finding.version))


def _rows(case: Case, operation: str) -> list[Implementation]:
    """Return the rows that may run an operation.

    Of those with the T x T matrix XLA's alone: ours is for who asks for it.
    """
    rows = [row for row in candidates(operation, case.asked, case.setting).rows if not row.problem(case.setting)]
    return [row for row in rows if row.by == "xla" or not row.makes_matrix]


def _versions(case: Case, row: Implementation) -> tuple[str, ...]:
    """Return the versions of a row: its usual one, and of our attention on Hopper, where that is wgmma, the other."""
    ours = row.operation == "attention" and row.by == "pallas"
    return ("", "mma") if ours and case.machine.target == "sm_90" else ("",)


# ----- its shapes ---------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One function of an operation, as a problem of problems.py."""

    function: str
    sizes: list[int]
    calls: int  # in a step


def parts(case: Case, operation: str) -> list[Part]:
    """Return the functions of an operation, at the run's own shapes."""
    model, B, T = case.model, case.batch_size, case.sequence_length
    L, C, rows = model.num_layers, model.channels, B * T
    at_a_time, size = min(case.logit_rows or rows, rows), flat_size(model)
    sizes = {
        "layernorm": [rows, C],
        "gelu": [rows, 4 * C],
        "attention": [B, T, model.num_heads, model.head_size],
        "classifier": [at_a_time, model.vocab_size, model.padded_vocab_size],
        "embedding backward": [B, T, C, model.padded_vocab_size],
        "adamw": [size],
        "global norm": [size],
    }[operation]
    calls = {"gelu": L, "attention": L, "classifier": math.ceil(rows / at_a_time)}.get(operation, 1)
    functions = (ATTENTIONS[case.asked.attention],) if operation == "attention" else kernels.GROUPS[operation]
    return [Part(name, sizes, 2 * L if name.startswith("residual") else calls) for name in functions]


def row_of(finding: Finding) -> Implementation:
    """Return the row that a finding is about."""
    return implementations(finding.operation)[finding.implementation]

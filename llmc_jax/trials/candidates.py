"""What is tried for a run, as plain data: each operation's implementations, versions and tile sizes, and its shapes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import ATTENTIONS
from llmc_jax.kernels.choice import Implementation, Preferences, Setting, candidates, implementations
from llmc_jax.kernels.findings import Finding, Variant
from llmc_jax.machine.compiling import Options
from llmc_jax.machine.target import Machine
from llmc_jax.models.gpt2.tensors import flat_size

# Tile sizes that are tried beside those of pallas_kernels/tuning.py, whose own are left out.
TILES: dict[str, dict[str, tuple[int, ...]]] = {
    "layernorm": {"layernorm_blocks": (2, 3, 4)},
    "gelu": {"gelu_blocks": (4, 6, 8), "gelu_block": (1024, 2048, 4096)},
    "classifier": {"classifier_warpgroups": (1, 2), "classifier_rows": (1, 2, 8)},  # 8: long rows are read twice
    "embedding backward": {"embedding_rows": (16, 32, 64)},
    "adamw": {"adamw_vector": (2, 4, 8)},
}
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


def listed(case: Case) -> list[Finding]:
    """Return what is to be tried, the most important first: what would run, what it is compared with, other forms.

    Where only one implementation is possible, there is nothing to try.
    """
    default, others, forms = [], [], []
    for operation in kernels.GROUPS:
        rows = _rows(case, operation)
        if all(row.by == "xla" for row in rows):
            continue
        default.append(Finding(operation, rows[0].name))
        others += [Finding(operation, row.name) for row in rows[1:]]
        forms += [
            Finding(operation, row.name, variant)
            for row in rows
            if row.by == "pallas" and not row.makes_matrix
            for variant in _variants(case, row)
        ]
    versions = [each for each in forms if each.variant.version]
    return default + others + versions + [each for each in forms if not each.variant.version]


def _rows(case: Case, operation: str) -> list[Implementation]:
    """Return the rows that may run an operation.

    Of those with the T x T matrix XLA's alone: ours is for who asks for it.
    """
    rows = [row for row in candidates(operation, case.asked, case.setting).rows if not row.problem(case.setting)]
    return [row for row in rows if row.by == "xla" or not row.makes_matrix]


def _variants(case: Case, row: Implementation) -> Iterator[Variant]:
    """Yield the forms of a row of our kernels beside its default one."""
    from pallas_kernels import tuning

    target = str(case.machine.target)
    if row.operation == "attention":
        padded = math.ceil(case.model.head_size / 16) * 16
        default = tuning.attention_sizes(target, padded, None).version
        for version in tuning.VERSIONS:
            if version != default and (version == "mma" or target == "sm_90"):
                yield Variant(version)
        return
    table = tuning.sizes(target)._asdict()
    for name, values in TILES.get(row.operation, {}).items():
        for value in values:
            if name in table and table[name] != value:
                yield Variant(sizes=((name, value),))


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

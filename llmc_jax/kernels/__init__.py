"""Which implementation of each operation runs: chosen once, before the run, and said once. No fallback is silent.

functions.py    what is chosen together, and whose functions there are: XLA's, our kernels', cuDNN's; from functions to
                `Operations` and an `Optimizer`
choice.py       every implementation as a row with what it supports, in order of preference
record.py       the choice as plain data, and how it is repeated

Leaves out the kernels themselves and their tile sizes (pallas_kernels/).
"""

from llmc_jax.kernels.choice import (
    MEASURED_HERE,
    Choice,
    Finding,
    Findings,
    Preferences,
    Selection,
    Setting,
    makes_matrix,
)
from llmc_jax.kernels.functions import GROUPS, assembled, pallas_functions
from llmc_jax.kernels.record import MadeFor, Resolved
from llmc_jax.machine.gpus import Machine, this_machine
from llmc_jax.ops.table import XLA

__all__ = [
    "GROUPS",
    "MEASURED_HERE",
    "XLA",
    "Choice",
    "Finding",
    "Findings",
    "Machine",
    "MadeFor",
    "Preferences",
    "Resolved",
    "Selection",
    "Setting",
    "assembled",
    "makes_matrix",
    "pallas_functions",
    "this_machine",
]

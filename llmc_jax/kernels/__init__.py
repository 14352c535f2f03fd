"""Which implementation of each operation runs: chosen once, before the run, and said once. No fallback is silent.

functions.py    what is chosen together, and XLA's functions; from functions to `Operations` and an `Optimizer`
findings.py     what was found out about them on the card at hand, as data
choice.py       every implementation as a row with what it supports, in order of preference
record.py       the choice as plain data, and how it is repeated
ours.py         the handwritten kernels of pallas_kernels/ and llmc_jax/kernels/triton/, by name
cudnn.py        attention by cuDNN

Leaves out the kernels themselves and their tile sizes (pallas_kernels/).
"""

from llmc_jax.kernels.choice import MEASURED_HERE, Choice, Preferences, Selection, Setting, makes_matrix
from llmc_jax.kernels.findings import Finding, Findings
from llmc_jax.kernels.functions import GROUPS, assembled
from llmc_jax.kernels.ours import pallas_functions
from llmc_jax.kernels.record import MadeFor, Resolved
from llmc_jax.machine.target import Machine, this_machine
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

"""The profiler's command line: llmc-jax profile --help. Its flags are train.py's that shape a step, and its own.

Leaves out what each of its modes prints (modes.py).
"""

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode
from llmc_jax.base.kit import command_line, help_page
from llmc_jax.base.options import own
from llmc_jax.config.flags import step_config, take_own

OWN = (
    own("--steps", "N", 10, "steps to time, after two that are not counted"),
    own("--traced", "N", 3, "steps to record for the table"),
    own("--trace", "DIR", None, "keep the trace there, for Perfetto and TensorBoard"),
    own("--json", "FILE", None, "write everything to it as JSON", writes="*"),
    own("--vs", "NAME=VALUE", [], "time another version in turns with this one; may be given several times: a flag of "
        "train.py (kernels=xla, dtype=bf16)"),
)  # fmt: skip


ABOUT = (
    "Where a training step's time, memory and operations go. Takes train.py's flags for the model, the batch, the "
    "optimizer, precision and kernels (--preset -e -b -t -d -r --dtype --kernels --attention and so on; without "
    "--preset and -e: d12), and trains on random tokens. docs/profiling.md explains the table."
)
EXAMPLES = (
    ("-e d12 -b 4 -t 64", "the table of GPT-2 124M's step"),
    ("-e d12 -b 4 -t 64 --trace traces", "and the trace for Perfetto"),
    ("-e d12 -b 4 -t 64 --vs dtype=bf16 --vs recompute=0", "beside two other versions"),
)


@command_line("profile")
def main(words: list[str]) -> int:
    """Run `llmc-jax profile`."""
    if "--help" in words:
        print(help_page(typed("profile"), ABOUT, OWN, EXAMPLES))
        return ExitCode.DONE
    asked, rest = take_own(words, OWN)
    from llmc_jax.profile import modes  # here, because --help does without JAX

    config = step_config(rest)
    return modes.compare(config, rest, asked) if asked.vs else modes.measure(config, asked)

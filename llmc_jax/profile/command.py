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
    own("--layers", "", False, "a line for each layer"),
    own("--trace", "DIR", None, "keep the trace there, for Perfetto and TensorBoard"),
    own("--read", "DIR", None, "only the table of a saved trace; takes --layers and --json"),
    own("--json", "FILE", None, "write everything to it as JSON", writes="*"),
    own("--calculate", "", False, "only FLOPs, bytes and memory, from the shape: needs no device, compiles nothing"),
    own("--device", "NAME", None, "with --calculate: the GPU whose peaks set the floors: h200, 'NVIDIA H200'"),
    own("--vs", "NAME=VALUE", [], "time another version in turns with this one; may be given several times: a flag of "
        "train.py (kernels=xla, dtype=bf16)"),
    own("--rounds", "N", 5, "with --vs: turns"),
)  # fmt: skip


def help_text() -> str:
    """Return what --help prints."""
    return help_page(
        typed("profile"),
        "Where a training step's time, memory and operations go. Takes train.py's flags for the model, the batch, the "
        "optimizer, precision and kernels (--preset -e -b -t -d -r --dtype --kernels --attention and so on; without "
        "--preset and -e: d12), and trains on random tokens. docs/profiling.md explains the table.",
        OWN,
        (
            ("-e d12 -b 4 -t 64", "the table of GPT-2 124M's step"),
            ("-e d12 -b 4 -t 64 --layers --trace traces", "by layer, and the trace for Perfetto"),
            ("-e d12 -b 4 -t 64 --vs dtype=bf16 --vs recompute=0", "beside two other versions"),
            ("-e d12 -b 64 --dtype bf16 --calculate --device 'NVIDIA H200'", "what a GPU would need"),
        ),
    )


@command_line("profile")
def main(words: list[str]) -> int:
    """Run `llmc-jax profile`."""
    if "--help" in words:
        print(help_text())
        return ExitCode.DONE
    if words[:1] == ["--worker"]:
        from llmc_jax.profile.compare import serve

        return serve(words[1:])
    asked, rest = take_own(words, OWN)
    from llmc_jax.profile import modes  # here, because --help does without JAX

    if asked.read:
        return modes.read(asked)
    config, _ = step_config(rest)
    if asked.calculate:
        return modes.calculate(config, asked)
    if asked.vs:
        return modes.compare(rest, asked)
    return modes.measure(config, asked)

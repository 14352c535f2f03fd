"""The plan's flags: those of train.py, and its own. Leaves out what they lead to (plan.py)."""

from llmc_jax.base.commands import typed
from llmc_jax.base.kit import help_page
from llmc_jax.base.options import ABOVE_ZERO, own

STDOUT = "-"  # of --json

OWN = (
    own("--gpu", "NAME", None, "the GPU to plan for: h100, a100, rtx4090 and more (an unknown name lists all), its "
        "driver's name, or a .toml file of your own (docs/plan.md); without it the device at hand"),
    own("--quick", "", False, "compute the memory, compile nothing"),
    own("--operations", "", False, "also a line for each operation: FLOPs, bytes, floor, time", excludes="sweep"),
    own("--neighbours", "", False, "also what is near: other GPUs, numbers of them, -b, -r and -z",
        excludes="sweep"),
    own("--sweep", "NAME=LIST", None, "only a table, over values of gpu or one of train.py's options: devices=1,2,4,8"),
    own("--picture", "FILE", None, "with --sweep: draw it there: .png, .svg, .pdf", needs="sweep",
        why="as in --sweep devices=1,2,4,8", writes=".png .svg .pdf"),
    own("--reproductions", "", False, "only llm.c's four reproductions of GPT-2, beside what llm.c says of them",
        excludes="gpu operations neighbours sweep tokens price network", why="it takes llm.c's launches as they are"),
    own("--tokens", "X", None, "train on this many tokens, such as 10e9, instead of -x", 1),
    own("--price", "X", None, "USD for an hour of one GPU; default: from llmc_jax/plan/prices.toml", 0),
    own("--network", "GBIT", None, "Gbit/s of each GPU between machines (default: 400)", check=ABOVE_ZERO),
    own("--json", "FILE", None, "write everything to it as JSON; - prints it instead of the report", writes="*"),
)  # fmt: skip


def help_text() -> str:
    """Return what --help prints."""
    return help_page(
        typed("plan"),
        "Does it fit, how fast is it, how long does it take, what does it cost: for any GPU and any number of them, "
        "none of which need be here. Takes every flag of train.py (--preset -e -b -t -d -r -z --devices -x and so on; "
        "without --preset and -e: d12); token files need not be here either, nor the checkpoints of presets. Nothing "
        "is trained. The exit status is 0 also where it does not fit. docs/plan.md explains every figure and where it "
        "comes from.",
        OWN,
        (
            ("-e d12 -b 64 -d 524288 --gpu h100 --devices 8", "GPT-2 124M on eight H100s"),
            ("--preset gpt2-1558M --gpu h100 --devices 8 --quick", "llm.c's launch, in two seconds"),
            ("-e d48 -b 4 --gpu rtx4090 --neighbours", "what would fit instead"),
            ("-e d12 --gpu a100 --sweep devices=1,2,4,8 --picture sweep.png", "how it scales"),
            ("--reproductions", "what llm.c's four runs would need"),
            ("-e d12 -b 4 -t 64", "the device at hand; a CPU is measured first, for some twelve seconds"),
        ),
    )

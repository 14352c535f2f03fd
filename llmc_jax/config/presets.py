"""Named sets of flags for `--preset`: the demo, small CPU runs, and llm.c's own trainers and launches.

A preset is only what differs from llm.c's defaults. llm.c's launches stand here with a process for each device, and a
run folder of their own.
"""

from typing import NamedTuple

DEFAULT_PRESET = "demo"  # what `python train.py` without any flag runs


class Preset(NamedTuple):
    """What a preset is, in one line, and its flags as one types them."""

    description: str
    flags: str


def _fineweb(folder: str, prefix: str) -> str:
    """Return the flags of token files as llm.c's dev/data/fineweb.py names them."""
    return f"-i 'dev/data/{folder}/{prefix}_train_*.bin' -j 'dev/data/{folder}/{prefix}_val_*.bin'"


# What the launches of llm.c's scripts/run_gpt2_*.sh have in common.
LLMC_LAUNCH = "-t 1024 -u 700 -c 0.1 -v 250 -h 1 -r 0 -z 1 --batch-order llmc"

ALONE = "--devices 1"  # of what is too small for several, or is a program for one

# train_gpt2.c and train_gpt2_fp32.cu: every parameter treated alike, a constant rate, no clipping.
LLMC_EARLY = f"-e gpt2_124M.bin {ALONE} -k constant --beta2 0.999 --decay all --grad-clip 0"

PRESETS: dict[str, Preset] = {
    # Each micro-batch is one stretch of text: four small ones show more of the corpus.
    "demo": Preset(
        "a small GPT-2 learns Python's own source, byte by byte; on a CPU, without any download",
        f"-i stdlib -j stdlib -e L4-NH4-C128-V257-T128 {ALONE} -b 4 -t 128 -d 2048 -x 850 -l 4e-3 -u 50 -q 0.1 -c 0.1 "
        "-v 100 -m 80 -s 170 -g 128 -r 0 --print-every 20",
    ),
    "tinyshakespeare": Preset(
        "a small GPT-2 on tinyshakespeare, in GPT-2's tokens; for a CPU",
        f"-e L4-NH4-C128-T128 {ALONE} -b 8 -t 128 -x 1000 -l 1e-3 -u 50 -q 0.1 -c 0.1 -v 100 -s 250 -g 128",
    ),
    # The loop of train_gpt2.c runs from step 0 to step 40 and updates in both.
    "llmc-cpu": Preset(
        "train_gpt2.c: 41 updates of GPT-2 124M on tinyshakespeare",
        f"{LLMC_EARLY} -t 64 -x 41 -l 1e-4 -v 10 -m 5 -s 20 --sampling train_gpt2.c",
    ),
    "llmc-fp32": Preset(
        "train_gpt2_fp32.cu: one epoch of GPT-2 124M on tinyshakespeare",
        f"{LLMC_EARLY} --sampling train_gpt2_fp32.cu",
    ),
    "gpt2-124M": Preset(
        "llm.c's run_gpt2_124M.sh: GPT-2 124M from random weights, one epoch of FineWeb 10B",
        f"{LLMC_LAUNCH} {_fineweb('fineweb10B', 'fineweb')} -e d12 -b 64 -d 524288 -l 6e-4 -q 0 -s 20000 -g 144 "
        "-n 5000",
    ),
    "optimizer-race": Preset(
        "the public optimizer benchmark's protocol with GPT-2 124M: change --optimizer, -l and -x",
        f"{_fineweb('fineweb10B', 'fineweb')} -e d12 -b 64 -t 1024 -d 524288 -x 5625 -k wsd -l 1.8e-3 -u 250 -q 0 "
        "-c 0.1 -v 125 -m 160 -s 0 -n 1000 -z 1",
    ),
    "gpt2-350M": Preset(
        "llm.c's run_gpt2_350M.sh: 60,000 steps on FineWeb 100B",
        f"{LLMC_LAUNCH} {_fineweb('fineweb100B', 'fineweb')} -e d24 -b 64 -d 524288 -x 60000 -l 3e-4 -q 0 -s 100000 "
        "-g 144 -n 2000",
    ),
    "gpt2-774M": Preset(
        "llm.c's run_gpt2_774M.sh: 286,102 steps on FineWeb 100B",
        f"{LLMC_LAUNCH} {_fineweb('fineweb100B', 'fineweb')} -e d36 -b 32 -d 524288 -x 286102 -l 2.5e-4 -q 0 -s 300000 "
        "-g 144 -n 4000",
    ),
    "gpt2-1558M": Preset(
        "llm.c's run_gpt2_1558M.sh: 32,000 steps on FineWeb-EDU 100B",
        f"{LLMC_LAUNCH} {_fineweb('edu_fineweb100B', 'edu_fineweb')} -e d48 -b 16 -d 1048576 -x 32000 -l 6e-4 -q 0.1 "
        "-s 300000 -g 384 -n 2000",
    ),
}

"""Every option once: the model's shape (`ModelConfig`) and the run's settings (`TrainConfig`).

The command line, `--help`, the checks, docs/flags.md and config.json are all made from the fields of `TrainConfig`.
Leaves out how words become values (cli/train.py) and named sets of values (presets.py). Imports nothing heavy: `--help`
is instant.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from typing import Any, NamedTuple, Self

from llmc_jax.errors import InputError

GPT2_VOCAB = 50257
LLMC_DEPTH_TO_CHANNELS = {6: 384, 12: 768, 24: 1024, 36: 1280, 48: 1600, 60: 1920, 72: 2880, 84: 3456}
LLMC_DEPTH_TO_HEADS = {6: 6, 12: 12, 24: 16, 36: 20, 48: 25, 60: 30, 72: 30, 84: 36}
# gpt3:cN -> (layers, head size); c5140 stands in llm.c's table, but 5140 is not a multiple of its head size 128
GPT3_CHANNELS_TO_SHAPE = {
    384: (6, 64), 768: (12, 64), 1024: (24, 64), 1536: (24, 96), 2048: (24, 128), 2560: (32, 80),
    4096: (32, 128), 5140: (40, 128), 12288: (96, 128),
}  # fmt: skip


def pad_vocab(vocab_size: int) -> int:
    """The next multiple of 128: llm.c pads the vocabulary so that the head's matrix product tiles evenly."""
    return -(-vocab_size // 128) * 128


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2. Field names are llm.c's (`GPT2Config` in train_gpt2.c).

    max_seq_len: most positions the model knows (maxT, rows of wpe); vocab_size: V; padded_vocab_size: Vp (rows of
    wte; rows V..Vp-1 are zero and stay zero); num_layers: L; num_heads: NH; channels: C.
    """

    max_seq_len: int
    vocab_size: int
    padded_vocab_size: int
    num_layers: int
    num_heads: int
    channels: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InputError(f"model shape: {name} is {value}; it must be at least 1")
        if self.padded_vocab_size < self.vocab_size:
            raise InputError(
                f"model shape: padded vocabulary Vp={self.padded_vocab_size} is smaller than V={self.vocab_size}"
            )
        if self.channels % self.num_heads:
            raise InputError(
                f"model shape: channels C={self.channels} is not a multiple of the number of heads NH={self.num_heads}"
            )

    @property
    def head_size(self) -> int:
        return self.channels // self.num_heads


def _from_depth(depth: int) -> ModelConfig:
    return ModelConfig(
        max_seq_len=1024,
        vocab_size=GPT2_VOCAB,
        padded_vocab_size=pad_vocab(GPT2_VOCAB),
        num_layers=depth,
        num_heads=LLMC_DEPTH_TO_HEADS[depth],
        channels=LLMC_DEPTH_TO_CHANNELS[depth],
    )


def _from_gpt3_channels(channels: int) -> ModelConfig:
    layers, head_size = GPT3_CHANNELS_TO_SHAPE[channels]
    if channels % head_size:
        raise InputError(
            f"-e gpt3:c{channels}: {channels} channels cannot be split into heads of {head_size} "
            "(llm.c lists this size, and its own check refuses it too); take gpt3:c4096 or gpt3:c12288"
        )
    return ModelConfig(
        max_seq_len=2048,
        vocab_size=GPT2_VOCAB,
        padded_vocab_size=pad_vocab(GPT2_VOCAB),
        num_layers=layers,
        num_heads=channels // head_size,
        channels=channels,
    )


def _from_custom(descriptor: str) -> ModelConfig:
    fields: dict[str, int] = {}
    for part in descriptor.split("-"):
        match = re.fullmatch(r"(L|NH|C|V|T)([0-9]{1,9})", part)
        if match is None or match[1] in fields:
            raise InputError(
                f"-e {descriptor}: {part!r} is not understood; write each of L, NH, C and, if wanted, V and T once, "
                "as in L4-NH4-C256-V257-T128"
            )
        fields[match[1]] = int(match[2])
    missing = [name for name in ("L", "NH", "C") if name not in fields]
    if missing:
        raise InputError(f"-e {descriptor}: {', '.join(missing)} missing; write for example L4-NH4-C256")
    zeros = [name for name, value in fields.items() if value == 0]
    if zeros:
        raise InputError(f"-e {descriptor}: {' and '.join(zeros)} must be at least 1, as in L4-NH4-C256-V257-T128")
    channels, heads = fields["C"], fields["NH"]
    if channels % heads:
        raise InputError(
            f"-e {descriptor}: C={channels} channels cannot be split into NH={heads} heads; C must be a multiple of "
            f"NH: write C{-(-channels // heads) * heads}, or another NH"
        )
    vocab = fields.get("V", GPT2_VOCAB)
    return ModelConfig(
        max_seq_len=fields.get("T", 1024),
        vocab_size=vocab,
        padded_vocab_size=pad_vocab(vocab),
        num_layers=fields["L"],
        num_heads=fields["NH"],
        channels=fields["C"],
    )


def parse_descriptor(descriptor: str) -> ModelConfig:
    """The model that a descriptor names: `d12`, `gpt2:d12`, `gpt3:c768`, or a custom `L4-NH4-C256[-V257][-T128]`.

    Custom ones default to V=50257 and T=1024, and pad V to a multiple of 128.
    Raises InputError with the list of known names if it is none of these.
    Source: llm.c train_gpt2.cu, `gpt2_set_hyperparameters` and `gpt3_set_hyperparameters`.
    """
    depth = re.fullmatch(r"(?:gpt2:)?d([0-9]{1,9})", descriptor)
    if depth and int(depth[1]) in LLMC_DEPTH_TO_CHANNELS:
        return _from_depth(int(depth[1]))
    gpt3 = re.fullmatch(r"gpt3:c([0-9]{1,9})", descriptor)
    if gpt3 and int(gpt3[1]) in GPT3_CHANNELS_TO_SHAPE:
        return _from_gpt3_channels(int(gpt3[1]))
    if re.match(r"(L|NH|C|V|T)[0-9]", descriptor):
        return _from_custom(descriptor)
    depths = ", ".join(f"d{n}" for n in LLMC_DEPTH_TO_CHANNELS)
    channels = ", ".join(f"gpt3:c{n}" for n in GPT3_CHANNELS_TO_SHAPE if n != 5140)
    raise InputError(
        f"-e {descriptor}: no such model. Known: {depths} (or gpt2:dN), {channels}, "
        "a custom shape such as L4-NH4-C256-V257-T128, or the path of a .bin checkpoint"
    )


class ExitCode(IntEnum):
    """The exit status of train.py. 1 is Python's own, for an exception that nobody caught."""

    DONE = 0
    BAD_INPUT = 2
    DIVERGED = 3
    STOPPED = 130  # 128 + SIGINT, as shells have it


EXIT_MEANINGS: dict[int, str] = {
    ExitCode.DONE: "the run is complete",
    1: "a mistake in this program, with a traceback",
    ExitCode.BAD_INPUT: "a flag, a file or the machine cannot be used as it stands; one line says why",
    ExitCode.DIVERGED: "the loss or the gradient was not finite --max-nonfinite times in a row",
    ExitCode.STOPPED: "stopped by Ctrl-C, SIGTERM or SIGHUP after a whole step, with all saved; by a second at once",
}


class Check(NamedTuple):
    """What a value must be beyond its type."""

    holds: Callable[[Any], bool]
    words: str  # completes "must be ..."


def at_least(low: float, words: str = "") -> Check:
    return Check(lambda value: value >= low, words or f"at least {low:g}")


def minus_one_or_at_least(low: int, minus_one: str) -> Check:
    return Check(lambda value: value == -1 or value >= low, f"at least {low}, or -1 ({minus_one})")


def parse_slice(text: str) -> tuple[int, int]:
    """`START:STOP` as two step numbers; raises InputError if it is none, or empty."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isascii() and start.isdigit() and stop.isascii() and stop.isdigit()):
        raise InputError(f"--profile {text}: must be START:STOP, two step numbers, as in 10:15")
    if int(start) >= int(stop):
        raise InputError(f"--profile {text}: no step is in it; STOP must be above START, as in 10:15")
    return int(start), int(stop)


def is_slice(text: str) -> bool:
    """Whether a text is what `parse_slice` takes."""
    try:
        parse_slice(text)
    except InputError:
        return False
    return True


ZERO_IS_OFF = at_least(0, "at least 0 (0 = off)")
FRACTION = Check(lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_ONE = Check(lambda value: 0 <= value < 1, "at least 0 and below 1")
ABOVE_ZERO = Check(lambda value: value > 0, "above 0")
NOT_EMPTY = Check(lambda value: value != "", "given, not empty")
SLICE = Check(
    lambda value: not value or is_slice(value), "two step numbers with a colon between, the first the lower: 10:15"
)
INT_MAX = 2**31 - 1  # llm.c's options are C ints, and the step number is an int32 on the device


class Option(NamedTuple):
    """All there is to know about one field of TrainConfig."""

    name: str
    type: type  # int, float, str, or bool (0 or 1 on the command line)
    default: Any
    flags: tuple[str, ...]  # spellings, llm.c's first; the readable one begins with two dashes
    group: str
    meaning: str
    unit: str
    value: str  # how a value is called in --help
    choices: tuple[Any, ...]
    check: Check | None
    switch: bool  # stands alone, without a value

    @property
    def long_flag(self) -> str:
        return next(flag for flag in self.flags if flag.startswith("--"))

    @property
    def noun(self) -> str:
        return self.long_flag.removeprefix("--").replace("-", " ")


def option(
    default: Any,
    flags: str,
    group: str,
    meaning: str,
    *,
    unit: str = "",
    value: str = "",
    choices: tuple[Any, ...] = (),
    check: Check | None = None,
    switch: bool = False,
) -> Any:
    """A field of TrainConfig that carries its own documentation and checks."""
    about = {
        "flags": tuple(flags.split()),
        "group": group,
        "meaning": meaning,
        "unit": unit,
        "value": value,
        "choices": choices,
        "check": check,
        "switch": switch,
    }
    return field(default=default, metadata=about)


DATA = "Data"
MODEL = "Model"
OUTPUT = "Output"
BATCH = "Batch and length"
OPTIMIZER = "Optimizer"
EVALUATION = "Evaluation"
PRECISION = "Precision and memory"
KERNELS = "Kernels"
DEVICES = "Several devices"


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run. Defaults are llm.c's (train_gpt2.cu, `main`); a 0 for an 'every' field means off.

    Constructing one checks nothing; `validate` does.
    """

    # fmt: off
    preset: str = option(
        "", "--preset", "Start", "a named set of values, listed below; other flags override it", value="NAME"
    )

    train_data: str = option(
        "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "-i --train-data", DATA,
        "token files to train on, a path or a glob pattern; stdlib = the source of Python's own library, in bytes",
        value="PATTERN", check=NOT_EMPTY,
    )
    val_data: str = option(
        "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "-j --val-data", DATA,
        "token files to validate on, given likewise", value="PATTERN", check=NOT_EMPTY,
    )
    tokenizer: str = option(
        "auto", "--tokenizer", DATA,
        "turns samples into text: auto (by the vocabulary size), bytes, gpt2, none (prints token ids), "
        "or the path of a tokenizer file",
        value="NAME", check=NOT_EMPTY,
    )
    shuffle: str = option(
        "llmc", "--shuffle", DATA,
        "order of the training batches: llmc = train_gpt2.cu's shuffled order, none = as they stand in the files",
        choices=("llmc", "none"),
    )
    seed: int = option(
        42, "--seed", DATA, "random seed of the data order and of initial weights (llm.c: always 42)", check=at_least(0)
    )
    overfit: bool = option(
        False, "-a --overfit-single-batch", DATA, "1 = train on the first validation batch again and again"
    )

    model: str = option(
        "gpt2_124M_bf16.bin", "-e --model", MODEL,
        "a .bin checkpoint or a folder of Hugging Face's to start from, or a shape for random weights: d12, gpt3:c768, "
        "L4-NH4-C256-V257-T128",
        check=NOT_EMPTY,
    )
    init_from: str = option(
        "", "--init-from", MODEL,
        "start a new run from the weights of a checkpoint: the folder of a run (its newest good one), a state_%08d, or "
        "what -e takes",
        value="PATH",
    )
    v2_order: str = option(
        "auto", "--v2-order", MODEL,
        "where a version 2 checkpoint keeps its layernorm tensors: in place or all at the end; auto = by their values",
        choices=("auto", "in-place", "end"),
    )

    output_dir: str = option(
        "", "-o --output-dir", OUTPUT,
        "folder for logs, samples, picture and checkpoints; empty = a new runs/<date>-<name>", value="DIR",
    )
    reuse: bool = option(
        False, "-y --resume", OUTPUT,
        "1 = continue from the newest good checkpoint in the folder of -o, or begin where there is none; options that "
        "are not given are those of its config.json",
    )
    checkpoint_every: int = option(
        0, "-n --checkpoint-every", OUTPUT,
        "save the training state every N steps, as state_%08d; 0 = only when the run ends", unit="steps",
        check=ZERO_IS_OFF,
    )
    save: bool = option(True, "--no-save", OUTPUT, "save nothing when the run ends or is stopped", switch=True)
    keep_checkpoints: int = option(
        0, "-nk --keep-checkpoints", OUTPUT,
        "keep the latest N checkpoints, and the one of the lowest validation loss; 0 = all", unit="checkpoints",
        check=at_least(0, "at least 0 (0 = keep all)"),
    )
    major_every: int = option(
        0, "-nm --major-every", OUTPUT, "with -nk: never delete those of every N-th step; 0 = off", unit="steps",
        check=ZERO_IS_OFF,
    )
    export_llmc: bool = option(
        False, "--export-llmc", OUTPUT, "beside each also write model_%08d.bin, the weights in llm.c's format",
        switch=True,
    )
    save_failure: str = option(
        "continue", "--save-failure", OUTPUT,
        "when a checkpoint cannot be written (a full disk): continue training and try again at the next, or stop",
        choices=("continue", "stop"),
    )
    gpu_info_every: int = option(
        -1, "-lg --gpu-info-every", OUTPUT,
        "show the GPU's memory, clocks, power and temperature every N steps; 0, -1 = off",
        unit="steps", check=minus_one_or_at_least(0, "off"),
    )
    profile: str = option(
        "", "--profile", OUTPUT,
        "record what the device does from step START up to, but not including, step STOP (docs/profiling.md)",
        value="START:STOP", check=SLICE,
    )
    print_every: int = option(
        -1, "--print-every", OUTPUT,
        "a line on the screen every N steps; 0 = off, 1 = all, -1 = all of up to 100, else 40 to 100 of them and one a "
        "minute (the log files have every step)", unit="steps", check=minus_one_or_at_least(0, "auto"),
    )

    batch_size: int = option(
        4, "-b --batch-size", BATCH, "micro-batch B: rows that one forward and backward pass takes at once",
        unit="sequences", check=at_least(1),
    )
    sequence_length: int = option(
        1024, "-t --sequence-length", BATCH, "T: tokens in a row", unit="tokens", check=at_least(1)
    )
    total_batch_size: int = option(
        -1, "-d --total-batch-size", BATCH,
        "tokens of one update, a multiple of B*T (gradient accumulation); -1 = B*T", unit="tokens",
        check=minus_one_or_at_least(1, "one micro-batch"),
    )
    max_steps: int = option(
        -1, "-x --max-steps", BATCH,
        "updates to make; 0 = evaluate, and save only with -n or --export-llmc; -1 = one pass over the training data",
        unit="steps", check=minus_one_or_at_least(0, "one epoch"),
    )

    schedule: str = option(
        "cosine", "-k --schedule", OPTIMIZER, "course of the learning rate: cosine, linear, constant, wsd, step",
        value="NAME", choices=("cosine", "linear", "constant", "wsd", "step"),
    )
    learning_rate: float = option(3e-4, "-l --learning-rate", OPTIMIZER, "highest learning rate", check=at_least(0))
    warmup_steps: int = option(
        0, "-u --warmup-steps", OPTIMIZER, "steps of linear rise to it (all schedules but constant)", unit="steps",
        check=at_least(0),
    )
    final_lr_fraction: float = option(
        1.0, "-q --final-lr-fraction", OPTIMIZER,
        "the last rate as a part of the highest (cosine, linear, wsd); 1 = no decay", check=FRACTION,
    )
    step_every: int = option(
        1000, "--step-every", OPTIMIZER, "with -k step: lower the rate every N steps", unit="steps", check=ZERO_IS_OFF
    )
    step_factor: float = option(
        0.1, "--step-factor", OPTIMIZER, "with -k step: multiply it by X",
        check=Check(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    )
    weight_decay: float = option(0.0, "-c --weight-decay", OPTIMIZER, "AdamW's decoupled decay", check=at_least(0))
    decay: str = option(
        "matrices", "--decay", OPTIMIZER,
        "what decays: matrices = wte, wpe and the linear weights (train_gpt2.cu), all = layernorms and biases too "
        "(train_gpt2.c)",
        choices=("matrices", "all"),
    )
    beta1: float = option(0.9, "--beta1", OPTIMIZER, "decay of AdamW's mean of gradients", check=BELOW_ONE)
    beta2: float = option(
        0.95, "--beta2", OPTIMIZER, "decay of its mean of squares (train_gpt2.c and train_gpt2_fp32.cu: 0.999)",
        check=BELOW_ONE,
    )
    eps: float = option(1e-8, "--eps", OPTIMIZER, "added to the root of that mean", check=ABOVE_ZERO)
    grad_clip: float = option(
        1.0, "--grad-clip", OPTIMIZER, "scale the gradient down to this norm where it is larger; 0 = off",
        check=ZERO_IS_OFF,
    )
    max_nonfinite: int = option(
        10, "--max-nonfinite", OPTIMIZER,
        "stop after N steps in a row whose loss or gradient is not finite; 0 = never. They update nothing, and AdamW "
        "does not count them; in llm.c the parameters become NaN",
        unit="steps", check=ZERO_IS_OFF,
    )
    skip_loss_z: float = option(
        0.0, "-sl --skip-loss-z", OPTIMIZER,
        "skip updates whose loss is an outlier above this z-score; 0 = off. AdamW's bias correction counts them, as in "
        "llm.c",
        unit="standard deviations", check=ZERO_IS_OFF,
    )
    skip_norm_z: float = option(
        0.0, "-sg --skip-norm-z", OPTIMIZER, "likewise for the norm of the gradient; 0 = off",
        unit="standard deviations", check=ZERO_IS_OFF,
    )

    val_every: int = option(
        20, "-v --val-every", EVALUATION, "validation loss every N steps and at the end; 0 = off", unit="steps",
        check=ZERO_IS_OFF,
    )
    val_batches: int = option(
        20, "-m --val-batches", EVALUATION,
        "batches of B*T tokens in one validation, after the last one the first again; -1 = as many as there are tokens "
        "/ (B*T), rounded down",
        unit="batches", check=minus_one_or_at_least(1, "all"),
    )
    sample_every: int = option(
        20, "-s --sample-every", EVALUATION, "write a sample every N steps and at the end; 0 = off", unit="steps",
        check=ZERO_IS_OFF,
    )
    sampling: str = option(
        "train_gpt2.cu", "--sampling", EVALUATION,
        "draw samples as this trainer of llm.c does: train_gpt2.cu = each with the same random numbers; "
        "train_gpt2_fp32.cu = each with the next ones; train_gpt2.c = likewise, and none at the end",
        choices=("train_gpt2.cu", "train_gpt2_fp32.cu", "train_gpt2.c"),
    )
    sample_tokens: int = option(
        64, "-g --sample-tokens", EVALUATION, "length of a sample, its first end-of-text token included",
        unit="tokens", check=at_least(1),
    )
    hellaswag: bool = option(False, "-h --hellaswag", EVALUATION, "1 = HellaSwag accuracy at every validation")

    dtype: str = option(
        "auto", "--dtype", PRECISION,
        "what the model computes in: fp32, bf16, fp16; auto = bf16 on GPUs that have it, else fp32. Statistics, sums, "
        "the loss and AdamW are fp32 always",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    tf32: bool = option(True, "-f --tf32", PRECISION, "1 = fp32 matrix products may use TF32 (NVIDIA GPUs)")
    master_weights: bool = option(
        True, "-w --master-weights", PRECISION, "with bf16 or fp16: 1 = keep the weights in fp32 too, 0 = do not"
    )
    rounding: str = option(
        "auto", "--rounding", PRECISION,
        "how updated weights become bf16: nearest, or stochastic as in llm.c; auto = nearest with -w 1, stochastic "
        "with -w 0",
        choices=("auto", "nearest", "stochastic"),
    )
    loss_scale: float = option(
        128.0, "--loss-scale", PRECISION, "fp16: what the loss is multiplied by at first", check=ABOVE_ZERO
    )
    loss_scale_steps: int = option(
        100, "--loss-scale-steps", PRECISION, "fp16: after N steps without overflow the loss scale grows", unit="steps",
        check=at_least(1),
    )
    loss_scale_factor: float = option(
        2.0, "--loss-scale-factor", PRECISION, "fp16: by this it grows, and after an overflow is divided",
        check=Check(lambda value: value >= 1, "at least 1 (1 = the scale stays)"),
    )
    gelu_fusion: int = option(
        -1, "-ge --gelu-fusion", PRECISION,
        "GELU in the matrix product before it, by NVIDIA's library: 1 = forward (needs -r 0, since it has other bits "
        "than one computed again; no product by Triton), 0 = not, -1 = not, until it has been measured; 2 (llm.c: its "
        "gradient too) is refused: XLA has no form of that",
        choices=(-1, 0, 1, 2),
    )
    recompute: int = option(
        1, "-r --recompute", PRECISION,
        "computed again in the backward pass to save memory: 0 = nothing, 1 = GELU, 2 = GELU and layernorms",
        choices=(0, 1, 2),
    )
    recompute_blocks: int = option(
        0, "--recompute-blocks", PRECISION,
        "keep only the input of every N-th layer and compute all else again: a third more work, far less memory; "
        "0 = off",
        unit="layers", check=ZERO_IS_OFF,
    )
    logit_rows: int = option(
        -1, "--logit-rows", PRECISION,
        "make the logits of so many tokens at a time, never those of the whole batch; 0 = of all, -1 = on a GPU as "
        "many as its memory has room for, never fewer than 8192, on a CPU all", unit="tokens",
        check=minus_one_or_at_least(0, "auto"),
    )

    kernels: str = option(
        "auto", "--kernels", KERNELS,
        "what computes the operations on a GPU: xla, pallas (handwritten kernels), triton; auto = the fastest for "
        "each; the start-up table says which",
        choices=("auto", "xla", "pallas", "triton"),
    )
    strict_kernels: bool = option(
        False, "--strict-kernels", KERNELS, "an operation that cannot run as --kernels or --attention say is an error",
        switch=True,
    )
    attention: str = option(
        "auto", "--attention", KERNELS,
        "naive = with the T x T matrix, flash = without, by our kernels, cudnn = without, by NVIDIA's; relu = "
        "max(score, 0) in place of the softmax: another model; auto = the fastest of the first three",
        choices=("auto", "naive", "flash", "cudnn", "relu"),
    )

    kernels_from: str = option(
        "", "--kernels-from", KERNELS,
        "run the operations as another run did, instead of choosing: its folder, one of its checkpoints, or its "
        "kernels.json; other flags of this group count more (docs/resuming.md)",
        value="PATH",
    )
    no_kernel_check: bool = option(
        False, "--no-kernel-check", KERNELS,
        "do not check and time the kernels when this GPU, or these versions or shapes, are new (it takes up to two "
        "minutes, once): they run as the tables that are shipped say",
        switch=True,
    )
    triton_gemm: str = option(
        "auto", "--triton-gemm", KERNELS,
        "whether XLA may make matrix products itself, with Triton, which leaves adding a bias to a kernel of its own: "
        "on; off = NVIDIA's library makes them all and adds the bias in them; auto = off on Hopper GPUs (compute "
        "capability 9.0), elsewhere XLA's default or what was faster on the card. What XLA_FLAGS says counts more",
        choices=("auto", "on", "off"),
    )

    zero_stage: int = option(
        0, "-z --zero-stage", DEVICES, "ZeRO: what is split over the processes: 0 = nothing, 1 = optimizer state",
        choices=(0, 1, 2, 3),
    )
    num_processes: int = option(1, "-pn --num-processes", DEVICES, "processes that train together", check=at_least(1))
    process_rank: int = option(0, "-pr --process-rank", DEVICES, "number of this one, from 0", check=at_least(0))
    gpus_per_node: int = option(8, "-pg --gpus-per-node", DEVICES, "GPUs of one machine", check=at_least(1))
    init_method: str = option(
        "mpi", "-pi -pm --init-method", DEVICES, "how processes find each other", choices=("mpi", "tcp", "fs")
    )
    server_ip: str = option("", "-ps --server-ip", DEVICES, "with -pi tcp: address of process 0", value="ADDRESS")
    fs_path: str = option("", "-pf -pp --fs-path", DEVICES, "with -pi fs: a folder that all see", value="DIR")
    # fmt: on

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all micro-batches and processes."""
        return self._tokens_at_once if self.total_batch_size == -1 else self.total_batch_size

    @property
    def grad_accumulation(self) -> int:
        """Micro-batches of B*T tokens that one process takes per update."""
        return self.tokens_per_step // self._tokens_at_once

    @property
    def samples_begin_anew(self) -> bool:
        """Whether each sample is drawn with the same random numbers."""
        return self.sampling == "train_gpt2.cu"

    @property
    def samples_at_end(self) -> bool:
        """Whether the last step is followed by a sample even where -s does not divide it."""
        return self.sampling != "train_gpt2.c"

    @property
    def saves_at_end(self) -> bool:
        """Whether the state is saved when the run ends. Without updates it is what was read: only if asked for."""
        return self.save and (self.max_steps != 0 or self.export_llmc or self.checkpoint_every > 0)

    @property
    def _tokens_at_once(self) -> int:
        return self.batch_size * self.sequence_length * self.num_processes

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The configuration that `to_json` gave. Fields that are not there have their defaults.

        Raises InputError with every unknown name and every value that its field cannot have.
        """
        known = {about.name: about for about in OPTIONS}
        problems = [f"configuration: there is no option {name!r}" for name in values if name not in known]
        for name, value in values.items():
            words = value_problem(known[name], value) if name in known else None
            if words:
                problems.append(f"configuration: {name} is {value!r}; it {words}")
        raise_problems(problems)
        fit: dict[str, Any] = {name: known[name].type(value) for name, value in values.items()}  # 1 stands for 1.0
        return cls(**fit)


OPTIONS: tuple[Option, ...] = tuple(
    Option(name=each.name, type=each.type, default=each.default, **each.metadata)  # type: ignore[arg-type]
    for each in fields(TrainConfig)
)


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one InputError that lists all problems, one a line; return if there are none."""
    lines = list(dict.fromkeys(problems))
    if len(lines) == 1:
        raise InputError(lines[0])
    if lines:
        raise InputError("\n  ".join([f"{len(lines)} problems:", *lines]))


TYPE_WORDS = {int: "a whole number", float: "a number", bool: "0 or 1", str: "text"}


def value_problem(about: Option, value: object) -> str | None:
    """Why an option cannot have this value ("must be …"), or None if it can."""
    expected = (int, float) if about.type is float else about.type
    if not isinstance(value, expected) or (isinstance(value, bool) and about.type is not bool):
        return f"must be {TYPE_WORDS[about.type]}"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    if isinstance(value, int) and value > INT_MAX:
        return f"must be at most {INT_MAX}"
    if about.choices and value not in about.choices:
        return f"must be one of {', '.join(map(str, about.choices))}"
    if about.check and not about.check.holds(value):
        return f"must be {about.check.words}"
    return None


def show_value(value: object) -> str:
    """A value as it is written on the command line; quoted where it would not be visible."""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _given(config: TrainConfig, name: str) -> str:
    """A flag and its value as one would type them: `-b 4`."""
    about = next(each for each in OPTIONS if each.name == name)
    return f"{about.flags[0]} {show_value(getattr(config, name))}"


class NotBuilt(NamedTuple):
    """A value of llm.c's that this program understands but cannot do yet."""

    name: str
    asked: Callable[[TrainConfig], bool]
    would: str
    without: str


NOT_BUILT = (
    NotBuilt(
        "hellaswag",
        lambda config: config.hellaswag,
        "measure HellaSwag accuracy at every validation",
        "leave -h out: the validation loss is measured all the same",
    ),
    NotBuilt(
        "num_processes",
        lambda config: config.num_processes > 1,
        "split every batch over several processes, one device each",
        "leave out -pn and -pr: one process makes the same updates, with more gradient accumulation for the same -d",
    ),
    NotBuilt(
        "zero_stage",
        lambda config: config.zero_stage > 1 or (config.zero_stage == 1 and config.num_processes > 1),
        "split the optimizer's state over the processes",
        "write -z 0: the results are the same, with more memory per device",
    ),
)


def validate(config: TrainConfig) -> list[str]:
    """Check a configuration as far as that is possible without its files and devices.

    Returns notes for the user: what has no effect, or another one than in llm.c.
    Raises one InputError that lists every value out of range, every contradiction, and every value that asks for
    something not built yet.
    """
    problems = []
    for about in OPTIONS:
        words = value_problem(about, getattr(config, about.name))
        if words:
            problems.append(f"{_given(config, about.name)}: {about.noun} {words}")
    raise_problems(problems)  # what follows counts on sane values
    raise_problems([*_contradictions(config), *_not_built(config)])
    return _notes(config)


def _contradictions(config: TrainConfig) -> list[str]:
    problems = []
    unit = config._tokens_at_once
    if config.tokens_per_step % unit:
        below, above = config.tokens_per_step // unit * unit, -(-config.tokens_per_step // unit) * unit
        choice = f"-d {below} or -d {above}" if below else f"-d {above}, or a smaller -b or -t"
        product = f"{_given(config, 'batch_size')} times {_given(config, 'sequence_length')}"
        if config.num_processes > 1:
            product += f" times {_given(config, 'num_processes')}"
        problems.append(
            f"{_given(config, 'total_batch_size')}: an update's tokens must be a multiple of {unit} ({product}); "
            f"take {choice}"
        )
    if config.gelu_fusion == 2:
        problems.append(
            "-ge 2: XLA cannot let NVIDIA's library compute GELU's gradient in a product; write -ge 1: GELU itself is "
            "computed in one, its gradient by a kernel"
        )
    if config.gelu_fusion == 1 and config.recompute and not config.recompute_blocks:
        problems.append(
            f"-ge 1: GELU in the product has other bits than one that {_given(config, 'recompute')} computes again; "
            "write -r 0, which takes more memory, or leave -ge out"
        )
    if config.gelu_fusion == 1 and config.triton_gemm == "on":
        problems.append(
            "-ge 1: GELU is computed in a product of NVIDIA's library, not in one by Triton; leave --triton-gemm out"
        )
    if config.dtype == "fp16" and config.rounding == "stochastic":
        problems.append("--rounding stochastic: is for bf16 only; with --dtype fp16 weights are rounded to nearest")
    if config.process_rank >= config.num_processes:
        problems.append(
            f"{_given(config, 'process_rank')}: process rank must be below the number of processes "
            f"({_given(config, 'num_processes')}); ranks count from 0"
        )
    if config.schedule == "step" and config.step_every == 0:
        problems.append("--step-every 0: -k step needs at least 1; for a rate that never falls write -k constant")
    return problems


def _not_built(config: TrainConfig) -> list[str]:
    return [
        f"{_given(config, missing.name)}: not built yet; it would {missing.would}. To go on, {missing.without}"
        for missing in NOT_BUILT
        if missing.asked(config)
    ]


def _notes(config: TrainConfig) -> list[str]:
    notes = []
    notes += _precision_notes(config)
    if config.reuse and not config.output_dir:
        notes.append("-y 1 without -o: this run gets a new folder of its own; name one with -o to go on in it")
    notes += _saving_notes(config)
    notes += _device_notes(config)
    if config.warmup_steps and config.schedule == "constant":
        notes.append(f"{_given(config, 'warmup_steps')}: has no effect with -k constant, which does not warm up")
    elif 0 < config.max_steps <= config.warmup_steps:
        notes.append(
            f"{_given(config, 'warmup_steps')}: the run of {_given(config, 'max_steps')} ends before the learning rate "
            "reaches -l"
        )
    defaults = TrainConfig()
    for name in ("step_every", "step_factor"):
        if config.schedule != "step" and getattr(config, name) != getattr(defaults, name):
            notes.append(f"{_given(config, name)}: has no effect without -k step")
    # a preset names the rule of its trainer for whoever adds -c
    if config.decay != defaults.decay and config.weight_decay == 0 and not config.preset:
        notes.append(f"{_given(config, 'decay')}: has no effect with -c 0, where nothing decays")
    return notes


def _saving_notes(config: TrainConfig) -> list[str]:
    """Settings of checkpoints that have no effect."""
    notes = []
    if config.major_every and not config.keep_checkpoints:
        notes.append(f"{_given(config, 'major_every')}: has no effect without -nk, where every checkpoint is kept")
    if not config.save and (not config.checkpoint_every or config.max_steps == 0):
        why = "-x 0" if config.checkpoint_every else "without -n"
        if config.export_llmc:
            notes.append(f"--export-llmc: has no effect with --no-save and {why}, where nothing is saved")
        if config.reuse:
            notes.append(f"-y 1: nothing is saved with --no-save and {why}, so the next start begins anew too")
    return notes


def _device_notes(config: TrainConfig) -> list[str]:
    """Settings for several processes, which mean nothing to one."""
    about_devices = [about for about in OPTIONS if about.group == DEVICES]
    given = [about.name for about in about_devices if getattr(config, about.name) != about.default]
    if not given:
        return []
    flags = ", ".join(_given(config, name) for name in given)
    return [f"{flags}: no effect, since this is one process; training on several devices is not built yet"]


def _precision_notes(config: TrainConfig) -> list[str]:
    """Settings of precision that have no effect. What -e or the device decides is not known here."""
    notes = []
    defaults = TrainConfig()
    if config.dtype != "fp16":
        for name in ("loss_scale", "loss_scale_steps", "loss_scale_factor"):
            if getattr(config, name) != getattr(defaults, name):
                notes.append(f"{_given(config, name)}: has no effect without --dtype fp16")
    if config.dtype == "fp32" and not config.master_weights:
        notes.append("-w 0: has no effect with --dtype fp32, where the weights are in fp32 anyway")
    if config.dtype == "fp32" and config.rounding == "stochastic":
        notes.append("--rounding stochastic: has no effect with --dtype fp32, where nothing is rounded")
    if config.dtype == "bf16" and not config.master_weights and config.rounding == "nearest":
        notes.append("--rounding nearest: with -w 0 small updates round to nothing and training may stall")
    if config.dtype == "fp16" and not config.master_weights:
        notes.append("-w 0: with --dtype fp16 small updates round to nothing and training may stall")
    if config.recompute_blocks and config.recompute != defaults.recompute:
        notes.append(f"{_given(config, 'recompute')}: has no effect with --recompute-blocks, which computes all again")
    return notes


def check_model_fit(config: TrainConfig, model: ModelConfig) -> list[str]:
    """Check the settings that depend on the model's shape, once it is known. Returns notes for the user.

    Raises InputError if rows (-t) or samples (-g) are longer than the positions that the model knows.
    """
    known = f"the model knows {model.max_seq_len} positions"
    problems = []
    if config.sequence_length > model.max_seq_len:
        problems.append(f"{_given(config, 'sequence_length')}: {known}; take -t {model.max_seq_len} or less")
    if config.sample_every and config.sample_tokens > model.max_seq_len:
        problems.append(
            f"{_given(config, 'sample_tokens')}: {known}; take -g {model.max_seq_len} or less, or -s 0 for no samples"
        )
    raise_problems(problems)
    if config.sequence_length < model.max_seq_len:
        return [f"{_given(config, 'sequence_length')}: {known}; those from {config.sequence_length} on do not train"]
    return []

"""Every option once: the run's settings (`TrainConfig`).

The command line, `--help`, the checks, docs/flags.md and config.json are all made from its fields. Leaves out what an
option is (options.py), which settings go together (checks.py), how words become values (flags.py) and named sets of
values (presets.py). Imports nothing heavy: `--help` is instant.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from llmc_jax.base.errors import raise_problems
from llmc_jax.base.options import (
    ABOVE_ZERO,
    ADDRESS,
    BELOW_ONE,
    FRACTION,
    NOT_EMPTY,
    RATES,
    SLICE,
    TRACKED,
    ZERO_IS_OFF,
    Check,
    Option,
    at_least,
    field_problem,
    minus_one_or_at_least,
    option,
)
from llmc_jax.config.schedules import SCHEDULES

START = "Start"
DATA = "Data"
MODEL = "Model"
OUTPUT = "Output"
TRACKERS = "Trackers"
BATCH = "Batch and length"
OPTIMIZER = "Optimizer"
EVALUATION = "Evaluation"
PRECISION = "Precision and memory"
KERNELS = "Kernels"
DEVICES = "Several devices"
PROCESSES = "Several processes"

AUTO_BATCH = -1  # of batch_size: the largest that fits, until that is known
# By name, the file in training/rules/ that defines an optimizer: "muon-polar" as MUON_POLAR.
OPTIMIZERS = {
    "adamw": "adamw", "adam": "adamw", "sgd": "sgd", "momentum": "sgd", "nesterov": "sgd", "adagrad": "adagrad",
    "rmsprop": "rmsprop", "muon": "muon", "muon-polar": "muon",
}  # fmt: skip
ATTENTIONS = ("auto", "naive", "flash", "cudnn")  # how GPT-2's attention may be computed


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run. Defaults are llm.c's (train_gpt2.cu, `main`); a 0 for an 'every' field means off.

    Constructing one checks nothing; `validate` does.
    """

    # fmt: off
    preset: str = option(
        "", "--preset", START, {"process"}, "free",
        "a named set of values, listed below; other flags override it", value="NAME"
    )

    train_data: str = option(
        "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "-i --train-data", DATA, {"data"}, "free",
        "token files to train on, a path or a glob pattern; stdlib = the source of Python's own library, in bytes",
        value="PATTERN", check=NOT_EMPTY, is_path=True,
    )
    val_data: str = option(
        "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "-j --val-data", DATA, {"data", "process"}, "free",
        "token files to validate on, named in the same way", value="PATTERN", check=NOT_EMPTY, is_path=True,
    )
    tokenizer: str = option(
        "auto", "--tokenizer", DATA, {"process"}, "free",
        "turns samples into text: auto (that of the data or the model, else by the vocabulary's size), bytes, gpt2, "
        "none (prints token ids), or the path of a tokenizer file or of a folder of Hugging Face's",
        value="NAME", check=NOT_EMPTY, is_path=True,
    )
    shuffle: str = option(
        "llmc", "--shuffle", DATA, {"data"}, "must match",
        "order of the training batches: llmc = train_gpt2.cu's shuffled order, none = as they stand in the files",
        choices=("llmc", "none"),
    )
    seed: int = option(
        42, "--seed", DATA, {"numbers", "data"}, "must match",
        "random seed of the data order and of initial weights (llm.c: always 42)", check=at_least(0)
    )
    overfit: bool = option(
        False, "-a --overfit-single-batch", DATA, {"data"}, "must match",
        "1 = train on the first validation batch over and over"
    )

    model_file: str = option(
        "", "--model", MODEL, {"program", "numbers"}, "free",
        "the Python file of a model of your own, which -e then names a shape of (docs/models.md); empty = GPT-2",
        value="FILE.py", is_path=True, of_this_start=True,
    )
    model_changed: bool = option(
        False, "--model-changed", MODEL, {"process"}, "free",
        "resume although the file of --model is not the one that the checkpoint was made with", switch=True,
        of_this_start=True,
    )
    model: str = option(
        "gpt2_124M_bf16.bin", "-e --weights", MODEL, {"program", "numbers"}, "free",
        "weights to start from: a checkpoint of any format (docs/checkpoints.md), or of a run's folder the newest good "
        "one; gpt2, gpt2-medium, gpt2-large, gpt2-xl or hf:OWNER/NAME from Hugging Face; or a shape for random "
        "weights: d12, gpt3:c768, L4-NH4-C256-V257-T128",
        check=NOT_EMPTY, is_path=True,
    )
    init_from: str = option(
        "", "--init-from", MODEL, {"program", "numbers"}, "free",
        "start a new run from the weights of this checkpoint, as -e does, which may name their shape beside it",
        value="PATH", is_path=True,
    )

    attention_window: int = option(
        0, "--attention-window", MODEL, {"program", "numbers"}, "free",
        "each position attends to the last N alone, itself among them; 0 = all before it", unit="positions",
        check=at_least(0),
    )
    attention_prefix: int = option(
        0, "--attention-prefix", MODEL, {"program", "numbers"}, "free",
        "the first N positions are seen by all, and have no loss but the last of them; 0 = none", unit="positions",
        check=at_least(0),
    )
    documents: bool = option(
        False, "--documents", MODEL, {"program", "numbers"}, "free",
        "no position attends to another document: one begins with the end-of-text token", switch=True,
    )
    attention_bias: str = option(
        "", "--attention-bias", MODEL, {"program", "numbers"}, "free",
        "alibi = scores fall with the distance, for each head by another slope; empty = none", value="NAME",
        choices=("", "alibi"),
    )
    attention_softcap: float = option(
        0.0, "--attention-softcap", MODEL, {"program", "numbers"}, "free",
        "scores x become N tanh(x / N), which stays below N; 0 = they stay", value="N",
        check=at_least(0),
    )

    output_dir: str = option(
        "", "-o --output-dir", OUTPUT, {"process"}, "free",
        "folder for logs, samples, curves and checkpoints; empty = a new runs/<date>-<name>", value="DIR",
        of_this_start=True, is_path=True,
    )
    reuse: bool = option(
        False, "-y --resume", OUTPUT, {"process"}, "free",
        "1 = resume from the newest good checkpoint in the folder of -o, or start if there is none; options that are "
        "not given are taken from its config.json", of_this_start=True,
    )
    checkpoint_every: int = option(
        0, "-n --checkpoint-every", OUTPUT, {"process"}, "free",
        "save the training state every N steps, as state_%08d; 0 = only when the run ends", unit="steps",
        check=ZERO_IS_OFF,
    )
    save: bool = option(
        True, "--no-save", OUTPUT, {"process"}, "free",
        "save nothing when the run ends or is stopped", switch=True, off_in_test=True, of_this_start=True
    )
    keep_checkpoints: int = option(
        0, "-nk --keep-checkpoints", OUTPUT, {"process"}, "free",
        "keep the latest N checkpoints and the one with the lowest validation loss; 0 = all", unit="checkpoints",
        check=at_least(0, "at least 0 (0 = keep all)"),
    )
    major_every: int = option(
        0, "-nm --major-every", OUTPUT, {"process"}, "free",
        "with -nk: never delete the checkpoint of every N-th step; 0 = off", unit="steps", check=ZERO_IS_OFF,
    )
    export_llmc: bool = option(
        False, "--export-llmc", OUTPUT, {"process"}, "free",
        "with each checkpoint also write model_%08d.bin, the weights in llm.c's format", switch=True, off_in_test=True,
    )
    gpu_info_every: int = option(
        -1, "-lg --gpu-info-every", OUTPUT, {"process"}, "free",
        "show the GPU's memory, clocks, power and temperature every N steps; 0, -1 = off",
        unit="steps", check=minus_one_or_at_least(0, "off"),
    )
    report_every: float = option(
        3.0, "--report-every", OUTPUT, {"process"}, "free",
        "write report.html, a page about the run, every X minutes and at the end; 0 = off (docs/report.md)",
        unit="minutes", check=ZERO_IS_OFF,
    )
    profile: str = option(
        "", "--profile", OUTPUT, {"process"}, "free",
        "record a trace of the device from step START up to, but not including, step STOP (docs/profiling.md)",
        value="START:STOP", check=SLICE,
    )
    print_every: int = option(
        -1, "--print-every", OUTPUT, {"process"}, "free",
        "print a line every N steps; 0 = off, 1 = every step, -1 = 40 to 100 lines (the log files have every step)",
        unit="steps", check=minus_one_or_at_least(0, "auto"),
    )

    tensorboard: bool = option(
        False, "--tensorboard", TRACKERS, {"process"}, "free",
        "log the run to TensorBoard: event files in the run's folder, in tensorboard (docs/trackers.md)", switch=True,
    )
    wandb: str = option(
        "", "--wandb", TRACKERS, {"process"}, "free",
        "log the run to Weights & Biases: PROJECT or ENTITY/PROJECT; WANDB_MODE=offline keeps it in the run's folder",
        value="PROJECT", check=TRACKED, hides=True,
    )
    mlflow: str = option(
        "", "--mlflow", TRACKERS, {"process"}, "free",
        "log the run to an experiment of MLflow, at MLFLOW_TRACKING_URI",
        value="EXPERIMENT", check=TRACKED, hides=True,
    )

    batch_size: int = option(
        4, "-b --batch-size", BATCH, {"program", "data"}, "must match",
        "micro-batch B: rows of one forward and backward pass on one device; auto = as many as fit in the device's "
        "memory (docs/resuming.md)", unit="sequences",
        check=at_least(1, "at least 1, or auto"), auto=AUTO_BATCH,
    )
    sequence_length: int = option(
        1024, "-t --sequence-length", BATCH, {"program", "data"}, "must match",
        "T: sequence length", unit="tokens", check=at_least(1)
    )
    total_batch_size: int = option(
        -1, "-d --total-batch-size", BATCH, {"program", "data"}, "free",
        "tokens of one update over all devices, a multiple of B*T on each (gradient accumulation); -1 = B*T on each",
        unit="tokens",
        check=minus_one_or_at_least(1, "one micro-batch"),
    )
    max_steps: int = option(
        -1, "-x --max-steps", BATCH, {"numbers", "process"}, "free",
        "number of updates; 0 = evaluate, and save only with -n or --export-llmc; -1 = one pass over the training data",
        unit="steps", check=minus_one_or_at_least(0, "one epoch"),
    )

    optimizer: str = option(
        "adamw", "--optimizer", OPTIMIZER, {"program", "numbers"}, "free",
        f"what makes updates of gradients: {', '.join(OPTIMIZERS)}; or the Python file of one of your own "
        "(docs/optimizers.md)",
        value="NAME", is_path=True,
        check=Check(
            lambda value: value in OPTIMIZERS or value.endswith(".py"), f"one of {', '.join(OPTIMIZERS)}, or FILE.py"
        ),
    )
    schedule: str = option(
        "cosine", "-k --schedule", OPTIMIZER, {"program"}, "said",
        f"learning-rate schedule: {', '.join(SCHEDULES)}", value="NAME", choices=tuple(SCHEDULES),
    )
    learning_rate: float = option(
        3e-4, "-l --learning-rate", OPTIMIZER, {"numbers"}, "said", "peak learning rate", check=at_least(0)
    )
    warmup_steps: int = option(
        0, "-u --warmup-steps", OPTIMIZER, {"numbers"}, "said",
        "steps of linear warmup to the peak (all schedules but constant)", unit="steps", check=at_least(0),
    )
    final_lr_fraction: float = option(
        1.0, "-q --final-lr-fraction", OPTIMIZER, {"numbers"}, "said",
        "final learning rate as a fraction of the peak (cosine, linear, wsd); 1 = no decay", check=FRACTION,
    )
    step_every: int = option(
        1000, "--step-every", OPTIMIZER, {"numbers"}, "said",
        "with -k step: lower the rate every N steps", unit="steps", check=ZERO_IS_OFF
    )
    step_factor: float = option(
        0.1, "--step-factor", OPTIMIZER, {"numbers"}, "said", "with -k step: multiply it by X",
        check=Check(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    )
    find_lr: bool = option(
        False, "--find-lr", OPTIMIZER, {"program", "numbers", "process"}, "must match",
        "do not train, but look for a learning rate: raise it from step to step, see where the loss falls and where it "
        "explodes, and suggest one (docs/find_lr.md). The model is not kept",
        switch=True,
    )
    find_lr_range: str = option(
        "1e-6:1", "--find-lr-range", OPTIMIZER, {"numbers"}, "must match",
        "with --find-lr: the first and the last rate", value="LOW:HIGH", check=RATES,
    )
    find_lr_steps: int = option(
        100, "--find-lr-steps", OPTIMIZER, {"numbers", "process"}, "must match",
        "with --find-lr: steps from the first rate to the last, in place of -x",
        unit="steps", check=Check(lambda value: 10 <= value <= 10_000, "from 10 to 10000"),
    )
    weight_decay: float = option(
        0.0, "-c --weight-decay", OPTIMIZER, {"program", "numbers"}, "said",
        "weight decay: of the parameters themselves (AdamW, Muon), or added to the gradient (the others)",
        check=at_least(0),
    )
    decay: str = option(
        "matrices", "--decay", OPTIMIZER, {"program"}, "said",
        "which tensors decay: matrices = wte, wpe and the linear weights (train_gpt2.cu), all = layernorms and biases "
        "too (train_gpt2.c)",
        choices=("matrices", "all"),
    )
    beta1: float = option(
        0.9, "--beta1", OPTIMIZER, {"numbers"}, "said",
        "decay of the first moment, the mean of gradients (AdamW, Adam)", check=BELOW_ONE,
    )
    beta2: float = option(
        0.95, "--beta2", OPTIMIZER, {"numbers"}, "said",
        "decay of the second moment, the mean of squares (AdamW, Adam, RMSProp; train_gpt2.c and train_gpt2_fp32.cu: "
        "0.999)",
        check=BELOW_ONE,
    )
    eps: float = option(
        1e-8, "--eps", OPTIMIZER, {"numbers"}, "said", "added to the square root of the second moment", check=ABOVE_ZERO
    )
    momentum: float = option(
        0.95, "--momentum", OPTIMIZER, {"numbers"}, "said",
        "how much of the update before goes into the next one (momentum, Nesterov, Muon)", check=BELOW_ONE,
    )
    grad_clip: float = option(
        1.0, "--grad-clip", OPTIMIZER, {"numbers"}, "said",
        "clip the gradient to this norm; 0 = off", check=ZERO_IS_OFF,
    )
    max_nonfinite: int = option(
        10, "--max-nonfinite", OPTIMIZER, {"process"}, "free",
        "stop after N steps in a row whose loss or gradient is not finite; 0 = never. Such a step updates nothing, and "
        "it does not count in AdamW's bias correction; in llm.c the parameters become NaN",
        unit="steps", check=ZERO_IS_OFF, off_in_test=True,
    )
    skip_loss_z: float = option(
        0.0, "-sl --skip-loss-z", OPTIMIZER, {"numbers"}, "said",
        "skip updates whose loss is an outlier above this z-score; 0 = off. AdamW's bias correction counts them, as in "
        "llm.c",
        unit="standard deviations", check=ZERO_IS_OFF, off_in_test=True,
    )
    skip_norm_z: float = option(
        0.0, "-sg --skip-norm-z", OPTIMIZER, {"numbers"}, "said", "the same for the norm of the gradient; 0 = off",
        unit="standard deviations", check=ZERO_IS_OFF, off_in_test=True,
    )

    val_every: int = option(
        20, "-v --val-every", EVALUATION, {"process"}, "free",
        "validation loss every N steps and at the end; 0 = off", unit="steps", check=ZERO_IS_OFF, off_in_test=True,
    )
    val_batches: int = option(
        20, "-m --val-batches", EVALUATION, {"process"}, "free",
        "batches of B*T tokens per validation, over all devices, or with --batch-order llmc on each; starts over where "
        "the data end; -1 = all: tokens / (B*T), rounded down",
        unit="batches", check=minus_one_or_at_least(1, "all"),
    )
    sample_every: int = option(
        20, "-s --sample-every", EVALUATION, {"process"}, "free",
        "write a sample every N steps and at the end; 0 = off", unit="steps", check=ZERO_IS_OFF, off_in_test=True,
    )
    sampling: str = option(
        "train_gpt2.cu", "--sampling", EVALUATION, {"process"}, "free",
        "draw samples as this trainer of llm.c does: train_gpt2.cu = each with the same random numbers; "
        "train_gpt2_fp32.cu = each with the next ones; train_gpt2.c = the same, summed in float32, and none at the end",
        choices=("train_gpt2.cu", "train_gpt2_fp32.cu", "train_gpt2.c"),
    )
    sample_tokens: int = option(
        64, "-g --sample-tokens", EVALUATION, {"process"}, "free",
        "length of a sample, including its first end-of-text token", unit="tokens", check=at_least(1),
    )
    patience: int = option(
        0, "--patience", EVALUATION, {"process"}, "free",
        "stop early after N validations in a row without a new lowest loss; 0 = off. The schedule still spans -x "
        "(docs/early_stopping.md)", unit="validations", check=ZERO_IS_OFF,
        off_in_test=True,
    )
    patience_delta: float = option(
        0.0, "--patience-delta", EVALUATION, {"process"}, "free",
        "with --patience: only a loss lower by more than X nats counts as new", check=at_least(0)
    )
    hellaswag: bool = option(
        False, "-h --hellaswag", EVALUATION, {"process"}, "free",
        "1 = HellaSwag accuracy at every validation but the one before the first step", off_in_test=True
    )
    hellaswag_file: str = option(
        "dev/data/hellaswag/hellaswag_val.bin", "--hellaswag-file", EVALUATION, {"process"}, "free",
        "with -h 1: its questions, an evaluation file of llm.c's, or the published jsonl or parquet", value="PATH",
        check=NOT_EMPTY, is_path=True,
    )

    dtype: str = option(
        "auto", "--dtype", PRECISION, {"program"}, "free",
        "precision that the model computes in: fp32, bf16, fp16; auto = bf16 on GPUs that have it, else fp32. "
        "Statistics, sums, the loss and AdamW are always fp32",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    tf32: bool = option(
        True, "-f --tf32", PRECISION, {"program"}, "said", "1 = fp32 matrix products may use TF32 (NVIDIA GPUs)"
    )
    master_weights: bool = option(
        True, "-w --master-weights", PRECISION, {"program"}, "free",
        "with bf16 or fp16: 1 = keep fp32 master weights, 0 = do not"
    )
    rounding: str = option(
        "auto", "--rounding", PRECISION, {"program"}, "free",
        "how updated weights are rounded to bf16: nearest, or stochastic as in llm.c; auto = nearest with -w 1, "
        "stochastic with -w 0",
        choices=("auto", "nearest", "stochastic"),
    )
    loss_scale: float = option(
        128.0, "--loss-scale", PRECISION, {"numbers"}, "said",
        "fp16: the initial loss scale", check=ABOVE_ZERO
    )
    loss_scale_steps: int = option(
        100, "--loss-scale-steps", PRECISION, {"numbers"}, "said",
        "fp16: the loss scale grows after N steps without overflow", unit="steps", check=at_least(1),
    )
    loss_scale_factor: float = option(
        2.0, "--loss-scale-factor", PRECISION, {"numbers"}, "said",
        "fp16: the factor by which the loss scale grows, and shrinks after an overflow",
        check=Check(lambda value: value >= 1, "at least 1 (1 = the scale stays)"),
    )
    gelu_fusion: int = option(
        -1, "-ge --gelu-fusion", PRECISION, {"program"}, "said",
        "compute GELU in the matrix product before it (by handwritten kernels for Hopper GPUs, in bf16): 0 = no, 1 = "
        "in the forward pass, 2 = its gradient too, in the product before that; -1 = as --products has it",
        choices=(-1, 0, 1, 2),
    )
    recompute: int = option(
        1, "-r --recompute", PRECISION, {"program"}, "said",
        "what the backward pass recomputes to save memory: 0 = nothing, 1 = GELU, 2 = GELU and layernorms",
        choices=(0, 1, 2),
    )
    recompute_blocks: int = option(
        0, "--recompute-blocks", PRECISION, {"program"}, "said",
        "keep only the input of every N-th layer and recompute the rest: a third more work, far less memory; 0 = off",
        unit="layers", check=ZERO_IS_OFF,
    )
    logit_rows: int = option(
        -1, "--logit-rows", PRECISION, {"program"}, "said",
        "compute the logits of N tokens at a time; 0 = of the whole batch at once, -1 = on a GPU as many as fit in its "
        "memory, at least 8192, on a CPU all", unit="tokens",
        check=minus_one_or_at_least(0, "auto"),
    )

    kernels: str = option(
        "auto", "--kernels", KERNELS, {"program"}, "said",
        "what computes the operations on a GPU: xla, pallas (handwritten kernels), triton; auto = the fastest for "
        "each; the start-up table says which",
        choices=("auto", "xla", "pallas", "triton"),
    )
    products: str = option(
        "auto", "--products", KERNELS, {"program"}, "said",
        "what computes three matrix products, of the head, of fc forward and of fcproj backward: pallas (handwritten "
        "for Hopper GPUs, in bf16: they do the classifier's and GELU's work as well), xla (NVIDIA's library); auto = "
        "the faster on the card, xla until that is known", choices=("auto", "xla", "pallas"),
    )
    strict_kernels: bool = option(
        False, "--strict-kernels", KERNELS, {"process"}, "free",
        "stop if an operation cannot run as --kernels, --products or --attention ask", switch=True, of_this_start=True,
    )
    attention: str = option(
        "auto", "--attention", KERNELS, {"program"}, "said",
        "naive = with the T x T matrix; flash = our kernels, without it; cudnn = NVIDIA's, without it; relu = "
        "max(score, 0) in place of the softmax, a different model; auto = the fastest of the first three",
        choices=(*ATTENTIONS, "relu"),
    )

    kernels_from: str = option(
        "", "--kernels-from", KERNELS, {"program"}, "free",
        "use the kernels of another run instead of choosing: its folder, one of its checkpoints, or its kernels.json; "
        "other flags of this group take precedence (docs/resuming.md)",
        value="PATH", of_this_start=True, is_path=True,
    )
    no_kernel_check: bool = option(
        False, "--no-kernel-check", KERNELS, {"program"}, "free",
        "do not check and time the kernels when the GPU, the versions or the shapes are new (up to two minutes, once); "
        "use the built-in tables",
        switch=True, of_this_start=True,
    )
    triton_gemm: str = option(
        "auto", "--triton-gemm", KERNELS, {"program"}, "said",
        "on = XLA may compute matrix products with Triton, where adding a bias is a kernel of its own; off = NVIDIA's "
        "library computes them all and adds the bias; auto = off on Hopper GPUs (compute capability 9.0), elsewhere "
        "XLA's default or what was faster on the card. XLA_FLAGS takes precedence",
        choices=("auto", "on", "off"),
    )

    algorithms: str = option(
        "", "--algorithms", KERNELS, {"program"}, "said",
        "on a GPU NVIDIA's library makes the matrix products by the algorithms in this file, which "
        "`benchmarks/gpu_check.sh algorithms` writes; for products that are not in it, and without a file, XLA times "
        "some and takes the fastest. XLA_FLAGS takes precedence (docs/resuming.md)",
        value="FILE", is_path=True,
    )

    devices: int = option(
        0, "--devices", DEVICES, {"program", "data"}, "free",
        "train on N devices over all processes, each with its part of the batch; 0 = all GPUs, on a CPU one per "
        "process (with N the CPU acts as N devices)",
        unit="devices", check=at_least(0, "at least 0 (0 = all)"),
    )
    zero_stage: int = option(
        0, "-z --zero-stage", DEVICES, {"program"}, "free",
        "ZeRO: what is split over the devices: 0 = nothing, 1 = optimizer state and master weights, 2 = gradients too, "
        "3 = weights too (not built yet)",
        choices=(0, 1, 2, 3),
    )
    reduction: str = option(
        "auto", "--reduction", DEVICES, {"program"}, "said",
        "order of sums over micro-batches and devices: auto = the fastest; fixed = one order, with the same bits on "
        "any number of devices (docs/devices.md)",
        choices=("auto", "fixed"),
    )
    batch_order: str = option(
        "global", "--batch-order", DEVICES, {"data"}, "must match",
        "which tokens an update or a validation takes: global = the same on any number of devices, in the order of "
        "one; llmc = those of as many processes of llm.c, each in an order of its own",
        choices=("global", "llmc"),
    )
    num_processes: int = option(
        0, "-pn --num-processes", PROCESSES, {"process"}, "free",
        "processes that train together; 0 = as many as mpirun, srun or torchrun started, else 1 (llm.c: 1)",
        unit="processes", check=at_least(0, "at least 0 (0 = as the launcher says)"), of_this_start=True,
    )
    process_rank: int = option(
        -1, "-pr --process-rank", PROCESSES, {"process"}, "free",
        "rank of this process, from 0; -1 = as the launcher says (llm.c: 0)",
        check=minus_one_or_at_least(0, "as the launcher says"), of_this_start=True,
    )
    gpus_per_node: int = option(
        8, "-pg --gpus-per-node", PROCESSES, set(), "free",
        "no effect (llm.c: which GPU a process takes): the processes of a host share its GPUs evenly",
        unit="GPUs", check=at_least(1), of_this_start=True,
    )
    init_method: str = option(
        "mpi", "-pi -pm --init-method", PROCESSES, {"process"}, "free",
        "how processes find each other: mpi = as the launcher says (MPI or another one); tcp = by -ps; fs = by -pf",
        choices=("mpi", "tcp", "fs"), of_this_start=True,
    )
    server_ip: str = option(
        "", "-ps --server-ip", PROCESSES, {"process"}, "free",
        "the host of process 0, as HOST or HOST:PORT; without -pi if the launcher does not say it. Port: 12345, or "
        "under a launcher one from 20000 to 29999, by its job",
        value="ADDRESS", check=ADDRESS, of_this_start=True,
    )
    fs_path: str = option(
        "", "-pf -pp --fs-path", PROCESSES, {"process"}, "free",
        "with -pi fs: a folder that all processes share, for the address of process 0",
        value="DIR", of_this_start=True, is_path=True,
    )
    peer_timeout: int = option(
        120, "--peer-timeout", PROCESSES, {"process"}, "free",
        "a process that is silent for so long counts as lost, and all others exit", value="SECONDS",
        unit="seconds", check=at_least(1), of_this_start=True,
    )
    # fmt: on

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one update, over all micro-batches and devices."""
        return self.tokens_at_once if self.total_batch_size == -1 else self.total_batch_size

    @property
    def grad_accumulation(self) -> int:
        """Return the micro-batches of B*T tokens that one device takes per update."""
        return self.tokens_per_step // self.tokens_at_once

    @property
    def micro_batches(self) -> int:
        """Return A, the micro-batches of B*T tokens that all devices take per update."""
        return self.tokens_per_step // self.micro_batch_tokens

    @property
    def reading_processes(self) -> int:
        """Return the processes of llm.c that batches are read as, each in an order of its own."""
        return max(1, self.devices) if self.batch_order == "llmc" and not self.overfit else 1

    @property
    def micro_batch_tokens(self) -> int:
        """Return B*T; T while -b auto is not resolved, because every B goes with a multiple of that."""
        return max(1, self.batch_size) * self.sequence_length

    @property
    def saves_at_end(self) -> bool:
        """Return whether the state is saved at the end; without updates it is what was read: only if asked for."""
        return self.save and (self.max_steps != 0 or self.export_llmc or self.checkpoint_every > 0)

    @property
    def tokens_at_once(self) -> int:
        """Return the tokens of one micro-batch of every device; of one while `devices` is not known."""
        return self.micro_batch_tokens * max(1, self.devices)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_json` gave. Fields that are not there have their defaults.

        Raises InputError with every unknown name and every value that its field cannot have.
        """
        problems = [f"configuration: there is no option {name!r}" for name in values if name not in BY_NAME]
        for name, value in values.items():
            if name in BY_NAME and (words := field_problem(BY_NAME[name], value)):
                shown = BY_NAME[name].show(value) if BY_NAME[name].hides else repr(value)
                problems.append(f"configuration: {name} is {shown}; it {words}")
        raise_problems(problems)
        fit: dict[str, Any] = {name: BY_NAME[name].type(value) for name, value in values.items()}  # 1 stands for 1.0
        return cls(**fit)


OPTIONS: tuple[Option, ...] = tuple(
    Option(name=each.name, type=each.type, default=each.default, **each.metadata)  # type: ignore[arg-type]
    for each in fields(TrainConfig)
)
BY_NAME = {about.name: about for about in OPTIONS}


def differing(then: TrainConfig, now: TrainConfig) -> Iterator[tuple[Option, str]]:
    """Yield the options in which two configurations differ, and how: `-b 4 -> 8`."""
    for about in OPTIONS:
        a, b = getattr(then, about.name), getattr(now, about.name)
        if a != b:
            yield about, f"{about.flags[0]} {about.show(a)} -> {about.show(b)}"


def of_test(config: TrainConfig) -> TrainConfig:
    """Return the configuration that a learning-rate range test runs with; that of any other run as it is.

    A test looks at training losses alone, and leaves no model. A loss that is not finite ends it, and an update that is
    an outlier is what it looks for.
    """
    off = {about.name: about.type() for about in OPTIONS if about.off_in_test}
    return replace(config, **off, max_steps=config.find_lr_steps) if config.find_lr else config

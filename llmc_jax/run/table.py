"""The start-up table: what the run is, in rows named as llm.c names them. Leaves out how it is drawn (console.py)."""

import re
from pathlib import Path
from typing import Any

from llmc_jax import cluster, kernels
from llmc_jax.cluster.start import ranks_text
from llmc_jax.config.model import CAUSAL, ModelShape, attention_of
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.device import device_label, gib
from llmc_jax.models.family import family_of
from llmc_jax.models.layout import head_spec, letters, num_parameters
from llmc_jax.plan.moments import state_kinds
from llmc_jax.plan.plan import Plan
from llmc_jax.run.state import Setup

NAMES = {"L": "num_layers L", "NH": "num_heads NH", "C": "channels C"}


def table(setup: Setup, folder: Path) -> list[list[tuple[str, Any]]]:
    """Return the sections of the start-up table, its rows named as llm.c names them."""
    plan, data = setup.plan, setup.data
    numbers = letters(plan.model)
    machine = [
        ("device", device_label(setup.device, plan.parallel.devices)),
        *process_rows(setup),
        *device_rows(plan),
        ("precision", precision_text(plan)),
        *kernel_rows(plan.choices),
        *option_rows(plan),
    ]
    model = [
        ("weights", weights_text(setup)),
        ("max_sequence_length T", plan.model.max_seq_len),
        ("vocab_size V", plan.model.vocab_size),
        ("padded_vocab_size Vp", head_spec(plan.model).shape[0]),
        *((name, numbers[letter]) for letter, name in NAMES.items() if numbers.get(letter)),
        *family_rows(plan.model),
        ("num_parameters", num_parameters(plan.model)),
    ]
    counts = [
        ("train tokens", data.train.num_tokens if data.train else "not read"),
        ("train_num_batches", setup.steps),
        ("val_num_batches", setup.val_batches),
        ("tokens per validation", setup.val_batches * setup.config.micro_batch_tokens),
        ("run hellaswag", f"yes, {len(setup.questions)} questions" if setup.questions else "no"),
    ]
    return [_settings(setup, folder), machine, model, counts]


def family_rows(model: ModelShape) -> list[tuple[str, Any]]:
    """Return what attention sees where that is not GPT-2's, and a family in a file of its own."""
    family, spec = family_of(model), attention_of(model)
    kind = [] if spec == CAUSAL else [("attention kind", spec.words)]
    file = f"{family.name}, of {family.path} (sha256 {model.source[:12]})"
    return [*kind, *([("family", file)] if model.source else [])]


def _settings(setup: Setup, folder: Path) -> list[tuple[str, Any]]:
    config, data, shape = setup.config, setup.data, setup.plan.shape
    train_data = config.val_data if config.overfit else config.train_data
    return [
        ("train data pattern", train_data if data.train else "not read"),
        ("val data pattern", config.val_data if data.val else "not read"),
        ("output log dir", folder),
        ("checkpoint_every", config.checkpoint_every),
        ("micro batch size B", batch_text(setup)),
        ("sequence length T", config.sequence_length),
        ("total batch size", config.tokens_per_step),
        ("grad_accum_steps", config.grad_accumulation),
        *rate_rows(config),
        ("weight decay", f"{config.weight_decay:e}"),
        ("decay", config.decay),
        *optimizer_rows(setup.plan),
        ("grad_clip", config.grad_clip),
        ("max_steps", config.max_steps),
        ("val_loss_every", config.val_every),
        ("val_max_steps", config.val_batches),
        ("sample_every", config.sample_every),
        ("genT", config.sample_tokens),
        ("overfit_single_batch", int(config.overfit)),
        ("recompute", f"blocks of {shape.recompute_blocks}" if shape.recompute_blocks else shape.recompute),
        *([("logit_rows", setup.plan.execution.logit_rows)] if setup.plan.execution.logit_rows else []),
        *([("algorithms", config.algorithms)] if config.algorithms else []),
        ("seed", config.seed),
        ("shuffle", config.shuffle),
    ]


def optimizer_rows(plan: Plan) -> list[tuple[str, Any]]:
    """Return the optimizer, the memory that it takes of a device, and its numbers but for the weight decay."""
    optimizer, size = plan.optimizer, state_kinds(plan.model, plan.shape)["optimizer"]
    kept = f"{gib(size)} in {' and '.join(optimizer.buffers)}" if size else "keeps nothing"
    numbers = ((name, getattr(plan.config, name)) for name in optimizer.numbers)
    return [("optimizer", f"{optimizer.key}, {kept}"), *((n, f"{x:e}" if n == "eps" else x) for n, x in numbers)]


def rate_rows(config: TrainConfig) -> list[tuple[str, Any]]:
    """Return the course of the learning rate."""
    if config.find_lr:
        return [("LR scheduler", "rising, a range test"), ("learning rate (LR)", config.find_lr_range)]
    steps_down = [("step_every", config.step_every), ("step_factor", config.step_factor)]
    return [
        ("LR scheduler", config.schedule),
        ("learning rate (LR)", f"{config.learning_rate:e}"),
        ("warmup iterations", config.warmup_steps),
        ("final LR fraction", f"{config.final_lr_fraction:e}"),
        *(steps_down if config.schedule == "step" else []),
    ]


def batch_text(setup: Setup) -> str:
    """Return B, and how much memory -b auto found it to take."""
    size, fitted = setup.config.batch_size, setup.fitted
    if fitted is None:
        return str(size)
    return f"{size} (auto: {gib(fitted.bytes)} of {gib(fitted.limit)})"


def process_rows(setup: Setup) -> list[tuple[str, str]]:
    """Return which process has what, host by host; nothing of one process."""
    group, each = cluster.here(), setup.plan.parallel.devices // cluster.here().size
    if group.size == 1:
        return []
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(group.hosts):
        hosts.setdefault(host, []).append(rank)
    devices = "1 device" if each == 1 else f"{each} devices"
    rows = [
        (f"  on {host}", f"{ranks_text(ranks)}, {devices}{' each' if len(ranks) > 1 else ''}")
        for host, ranks in hosts.items()
    ]
    return [("processes", f"{group.size}, started by {group.launcher}"), *rows]


def device_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return what is split over the devices, and the order of sums; nothing on one device as it comes."""
    parallel = plan.parallel
    if parallel.alone:
        return []
    split = ("nothing", "optimizer state", "optimizer state and gradients")[parallel.stage]
    rows = [("split over devices", f"{split} (ZeRO {parallel.stage})")] if parallel.devices > 1 else []
    return [*rows, ("order of sums", "fixed" if parallel.fixed else "as is fastest")]


def weights_text(setup: Setup) -> str:
    """Return where the weights come from."""
    if setup.earlier is not None:
        return str(setup.earlier.folder)
    return str(setup.weights or f"random, seed {setup.config.seed}")


def kernel_rows(choices: tuple[kernels.Choice, ...]) -> list[tuple[str, str]]:
    """Return what runs where: one row where the same runs everything."""
    told = {(choice.by, choice.why) for choice in choices}
    if len(told) == 1:
        ((by, why),) = told
        return [("kernels", f"{by} ({why})")]
    return [(choice.operation, f"{choice.implementation} ({choice.why})") for choice in choices]


def option_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the options that XLA compiles the run's programs with; none where it has its defaults."""
    wish, flags = plan.config.triton_gemm, plan.xla_flags
    found_out = "as before" if plan.repeat else kernels.MEASURED_HERE
    why = dict.fromkeys(compiling.onednn(plan.dtype, plan.machine, flags), "bf16 on a CPU with AMX") | dict.fromkeys(
        compiling.triton_gemm(wish, plan.machine.target, flags),
        compiling.decided_by(wish, plan.machine.target, flags),
    )
    return [
        (
            re.sub("^xla_(gpu_enable|cpu_use)_", "", name),
            f"{'on' if value else 'off'} ({why.get((name, value), found_out)})",
        )
        for name, value in compiling.of_one_device(plan.execution.compiler_options)
    ]


def precision_text(plan: Plan) -> str:
    """Return the precision in words: of the products, of the weights, and how these are rounded."""
    if plan.dtype == "fp32":
        return "fp32, products in TF32" if plan.product_precision == "tf32" else "fp32"
    weights = "fp32 master weights" if plan.config.master_weights else "no master weights"
    rounded = f"rounded {'stochastically' if plan.rounding == 'stochastic' else 'to nearest'}"
    scaled = f", loss scale {plan.config.loss_scale:g}" if plan.dtype == "fp16" else ""
    return f"{plan.dtype}, {weights}, {rounded}{scaled}"

"""The start-up table: what the run is, in rows named as llm.c names them. Leaves out how it is drawn (console.py)."""

from pathlib import Path
from typing import Any, cast

from llmc_jax import kernels
from llmc_jax.machine import compiling, gpus
from llmc_jax.machine import device as hardware
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.plan import asked_of, resolve_rounding, triton_gemm_wish
from llmc_jax.run.prepare import Setup


def table(setup: Setup, folder: Path) -> list[list[tuple[str, Any]]]:
    """The sections of the start-up table, its rows named as llm.c names them."""
    config, model, data = setup.config, setup.model, setup.data
    shape = model.config
    steps_down = config.schedule == "step"
    settings = [
        (
            "train data pattern",
            (config.val_data if config.overfit else config.train_data) if data.train else "not read",
        ),
        ("val data pattern", config.val_data if data.val else "not read"),
        ("output log dir", folder),
        ("checkpoint_every", config.checkpoint_every),
        ("micro batch size B", config.batch_size),
        ("sequence length T", config.sequence_length),
        ("total batch size", config.tokens_per_step),
        ("grad_accum_steps", config.grad_accumulation),
        ("LR scheduler", config.schedule),
        ("learning rate (LR)", f"{config.learning_rate:e}"),
        ("warmup iterations", config.warmup_steps),
        ("final LR fraction", f"{config.final_lr_fraction:e}"),
        *([("step_every", config.step_every), ("step_factor", config.step_factor)] if steps_down else []),
        ("weight decay", f"{config.weight_decay:e}"),
        ("decay", config.decay),
        ("beta1", config.beta1),
        ("beta2", config.beta2),
        ("eps", f"{config.eps:e}"),
        ("grad_clip", config.grad_clip),
        ("max_steps", config.max_steps),
        ("val_loss_every", config.val_every),
        ("val_max_steps", config.val_batches),
        ("sample_every", config.sample_every),
        ("genT", config.sample_tokens),
        ("overfit_single_batch", int(config.overfit)),
        ("recompute", f"blocks of {config.recompute_blocks}" if config.recompute_blocks else config.recompute),
        *([("logit_rows", setup.execution.logit_rows)] if setup.execution.logit_rows else []),
        ("seed", config.seed),
        ("shuffle", config.shuffle),
    ]
    machine = [
        ("device", hardware.device_label(setup.device)),
        ("precision", precision_text(setup)),
        *kernel_rows(setup.choices),
        *repeat_rows(setup),
        *option_rows(setup),
    ]
    shapes = [
        ("weights", weights_text(setup)),
        ("max_sequence_length T", shape.max_seq_len),
        ("vocab_size V", shape.vocab_size),
        ("padded_vocab_size Vp", shape.padded_vocab_size),
        ("num_layers L", shape.num_layers),
        ("num_heads NH", shape.num_heads),
        ("channels C", shape.channels),
        ("num_parameters", num_parameters(shape)),
    ]
    counts = [
        ("train tokens", data.train.num_tokens if data.train else "not read"),
        ("train_num_batches", setup.steps),
        ("val_num_batches", setup.val_batches),
    ]
    return [settings, machine, shapes, counts]


def weights_text(setup: Setup) -> str:
    """Where the weights come from."""
    if setup.earlier is not None:
        return str(setup.earlier.folder)
    if setup.config.init_from:
        return setup.config.init_from
    return str(setup.model.path or f"random, seed {setup.config.seed}")


def kernel_rows(choices: tuple[kernels.Choice, ...]) -> list[tuple[str, str]]:
    """What runs where, for the table: one row where the same runs everything."""
    told = {(choice.by, choice.why) for choice in choices}
    if len(told) == 1:
        ((by, why),) = told
        return [("kernels", f"{by} ({why})")]
    return [(choice.operation, f"{choice.text} ({choice.why})") for choice in choices]


def repeat_rows(setup: Setup) -> list[tuple[str, Any]]:
    """Where the kernels were taken from, for the table; on a CPU, which has one way to compute, only if asked for."""
    shown = setup.repeat is not None and (setup.device.platform != "cpu" or setup.config.kernels_from)
    return [("kernels as in", setup.repeat.place)] if setup.repeat is not None and shown else []


def option_rows(setup: Setup) -> list[tuple[str, str]]:
    """The options that XLA compiles the run's programs with, for the table; none where it has its defaults."""
    wish = triton_gemm_wish(asked_of(setup.config))
    made = setup.resolved.made_for if setup.resolved else None  # the profile keeps nothing
    target = made.target if made else kernels.this_machine().target
    by_default = compiling.triton_gemm(wish, target)
    found_out = "as before" if setup.repeat else kernels.MEASURED_HERE
    return [
        (
            option[0].removeprefix("xla_gpu_enable_"),
            f"{'on' if option[1] else 'off'} ({compiling.decided_by(wish) if option in by_default else found_out})",
        )
        for option in setup.execution.compiler_options
    ]


def precision_text(setup: Setup) -> str:
    """The precision in words: of the products, of the weights, and how these are rounded."""
    config = setup.config
    if setup.dtype == "fp32":
        return "fp32, products in TF32" if product_precision(setup) == "tf32" else "fp32"
    weights = "fp32 master weights" if config.master_weights else "no master weights"
    rounded = f"rounded {'stochastically' if resolve_rounding(config, setup.dtype) == 'stochastic' else 'to nearest'}"
    scaled = f", loss scale {config.loss_scale:g}" if setup.dtype == "fp16" else ""
    return f"{setup.dtype}, {weights}, {rounded}{scaled}"


def product_precision(setup: Setup) -> gpus.Precision:
    """In what the matrix products are computed."""
    if setup.dtype != "fp32":
        return cast(gpus.Precision, setup.dtype)
    return "tf32" if setup.has_tf32 and setup.config.tf32 else "fp32"

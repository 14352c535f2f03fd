"""What a configuration comes to on a machine: precision, kernels, memory and the step's numbers, decided without them.

Nothing here opens a file, asks a device or holds an array, so every decision can be made, and tested, for a machine
that is not there. Leaves out the data, the checkpoint and the state (run/prepare.py).
"""

import jax.numpy as jnp
import numpy as np

from llmc_jax import kernels
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.errors import InputError
from llmc_jax.kernels import record
from llmc_jax.machine import compiling, gpus
from llmc_jax.machine import device as hardware
from llmc_jax.models.gpt2.model import Execution
from llmc_jax.training.adamw import AdamWNumbers
from llmc_jax.training.schedule import ScheduleNumbers
from llmc_jax.training.step import LossScaleNumbers, StepNumbers

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def resolve_dtype(config: TrainConfig, machine: kernels.Machine) -> str:
    """What --dtype comes to on a machine: fp32, bf16 or fp16."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if machine.target is not None else "fp32"


def resolve_rounding(config: TrainConfig, dtype: str) -> str:
    """How updated weights become 16-bit: nearest or stochastic."""
    if dtype != "bf16":
        return "nearest"
    if config.rounding == "auto":
        return "nearest" if config.master_weights else "stochastic"
    return config.rounding


def choose_execution(
    config: TrainConfig,
    model: ModelConfig,
    machine: kernels.Machine,
    dtype: str,
    before: kernels.Resolved | None = None,
    findings: kernels.Findings | None = None,
) -> tuple[Execution, tuple[kernels.Choice, ...]]:
    """How the model will be computed, and what runs each operation. Raises InputError as --strict-kernels has it.

    before: an earlier choice, which is repeated but for what cannot run here and what flags now ask for otherwise.
    findings: what was found out on this card, which decides the rest. Raises InputError, too, where GELU would be in
    the product and other options do not go with that.
    """
    asked, before = asked_of(config), record.here(before, machine)
    setting = kernels.Setting(machine, dtype, model.head_size)
    selection = record.choose_again(before, asked, config.strict_kernels, setting, findings)
    if before is not None and record.still(before, asked, "logit_rows"):
        rows = before.logit_rows
    else:
        rows = logit_rows_of(config, model, machine, storage_of(config, machine, dtype, 0, selection.choices))
    options = _options(asked, machine, before)
    if findings is not None and before is None:  # an earlier choice has its own
        options = tuple((dict(options) | dict(findings.options)).items())
    if selection.gelu_fusion:
        _check_gelu_in_product(config, options)
    execution = Execution(selection.op, config.recompute, config.recompute_blocks, rows, selection.gelu_fusion, options)
    return execution, selection.choices


def _options(asked: kernels.Asked, machine: kernels.Machine, before: kernels.Resolved | None) -> compiling.Options:
    """XLA's options: as before, but for those that a flag or XLA_FLAGS sets."""
    options = compiling.triton_gemm(triton_gemm_wish(asked), machine.target)
    if before is None:
        return options
    flags = compiling.user_flags()
    again = {name: flags.get(name, value) for name, value in before.options}
    set_now = compiling.TRITON_GEMM in flags or not record.still(before, asked, "triton_gemm", "gelu_fusion")
    return tuple((again | (dict(options) if set_now else {})).items())


def _check_gelu_in_product(config: TrainConfig, options: compiling.Options) -> None:
    """Raise InputError where GELU would be computed again, or the product by XLA. config/train.py has checked flags."""
    if config.recompute and not config.recompute_blocks:
        raise InputError(
            f"-r {config.recompute}: the repeated choice of kernels has GELU in the product, with other bits than "
            "one that is computed again; write -r 0 or -ge 0"
        )
    if dict(options).get(compiling.TRITON_GEMM) is not False:
        raise InputError(
            "-ge 1: NVIDIA's library must make the products, and XLA_FLAGS has "
            f"--{compiling.TRITON_GEMM}=true; take that out, or write -ge 0"
        )


def triton_gemm_wish(asked: kernels.Asked) -> str:
    """What --triton-gemm comes to before the GPU is known: GELU is computed in a product by NVIDIA's library alone."""
    return "off" if asked.gelu_fusion == 1 and asked.triton_gemm == "auto" else asked.triton_gemm


def asked_of(config: TrainConfig) -> kernels.Asked:
    """Return the options that bear on what was chosen."""
    return kernels.Asked(**{name: getattr(config, name) for name in kernels.Asked._fields})


def made_for(config: TrainConfig, model: ModelConfig, machine: kernels.Machine, dtype: str) -> kernels.MadeFor:
    """Return what a run's choice of kernels is made for."""
    return kernels.MadeFor(
        record.target_of(machine), dtype, config.batch_size, config.sequence_length, model.num_layers, model.num_heads,
        model.channels, model.padded_vocab_size,
    )  # fmt: skip


def resolved_of(
    config: TrainConfig, made: kernels.MadeFor, execution: Execution, choices: tuple[kernels.Choice, ...]
) -> kernels.Resolved:
    """Return all that was chosen, as it is kept in the run's folder and its checkpoints."""
    return kernels.Resolved(
        made_for=made,
        asked=asked_of(config),
        choices=choices,
        logit_rows=execution.logit_rows,
        gelu_fusion=execution.gelu_fusion,
        options=execution.compiler_options,
        sources=record.sources_of(choices),
    )


def logit_rows_of(config: TrainConfig, model: ModelConfig, machine: kernels.Machine, storage: hardware.Storage) -> int:
    """What --logit-rows comes to on a machine; storage: what the run needs but for them."""
    if config.logit_rows >= 0 or machine.platform != "gpu":
        return max(config.logit_rows, 0)
    memory = gpus.card_memory_bytes(machine.kind)
    B, T = config.batch_size, config.sequence_length
    return hardware.chosen_logit_rows(model, B, T, storage, config.recompute, memory)


def storage_of(
    config: TrainConfig,
    machine: kernels.Machine,
    dtype: str,
    logit_rows: int,
    choices: tuple[kernels.Choice, ...],
) -> hardware.Storage:
    """What decides how much memory the run needs."""
    return hardware.Storage(
        bytes_per_value=4 if dtype == "fp32" else 2,
        master_weights=config.master_weights,
        accumulation=config.grad_accumulation,
        attention_weights=kernels.makes_matrix(choices),
        recompute_blocks=config.recompute_blocks,
        logit_rows=logit_rows,
        sliced_weights=machine.platform == "cpu",
    )


def notes_on_bits(choices: tuple[kernels.Choice, ...]) -> list[str]:
    """Return a note where what runs need not give the same bits twice, though a kernel of ours would."""
    return [
        f"{choice.operation} by cuDNN need not repeat its bits, so a run that is continued may differ from one without "
        "a break by a rounding; --attention flash repeats them"
        for choice in choices
        if choice.by == "cudnn"
    ]


def step_numbers(config: TrainConfig, steps: int) -> StepNumbers:
    """The traced numbers of the step."""
    schedule = ScheduleNumbers(
        learning_rate=float(config.learning_rate),
        warmup_steps=config.warmup_steps,
        total_steps=steps,
        final_fraction=float(config.final_lr_fraction),
        step_every=config.step_every,
        step_factor=float(config.step_factor),
    )
    adamw = AdamWNumbers(float(config.beta1), float(config.beta2), float(config.eps), float(config.weight_decay))
    moves = LossScaleNumbers(config.loss_scale_steps, float(config.loss_scale_factor))
    return StepNumbers(
        schedule,
        adamw,
        float(config.grad_clip),
        moves,
        np.uint32(config.seed),
        skip_loss_z=float(config.skip_loss_z),
        skip_norm_z=float(config.skip_norm_z),
    )

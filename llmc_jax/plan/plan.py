"""A plan: how a configuration runs on a machine. Precision, kernels and the step's numbers.

Making one opens no file, asks no device and makes no array, so each decision can be made, and tested, for a machine
that is not there. Leaves out data, checkpoints and the state (run/), and how kernels are tried (trials/).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from llmc_jax import kernels
from llmc_jax.base import own_file
from llmc_jax.base.errors import InputError
from llmc_jax.base.options import parse_rates
from llmc_jax.config.model import ModelShape, attention_of
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.kernels import record
from llmc_jax.kernels.functions import PRODUCTS
from llmc_jax.machine import compiling, gpus
from llmc_jax.models.execution import Execution
from llmc_jax.models.layout import head_size, head_spec, letters, widths
from llmc_jax.models.memory import Needed, chosen_logit_rows, required_memory_bytes
from llmc_jax.models.program import program_of, replaced
from llmc_jax.models.work import Shape
from llmc_jax.training.optimizer import LossScaleNumbers, Optimizer, frozen_ranges, numbers_of, ranges_of
from llmc_jax.training.parallel.gradient import sums_kept
from llmc_jax.training.parallel.stage import Parallel
from llmc_jax.training.schedule import RISING, ScheduleNumbers
from llmc_jax.training.step import StepNumbers, StepOptions


class Repeat(NamedTuple):
    """A choice of kernels that was made before."""

    place: Path  # of the file or checkpoint that holds it
    resolved: kernels.Resolved


class Plan(NamedTuple):
    """How a configuration runs on a machine."""

    config: TrainConfig
    model: ModelShape
    machine: kernels.Machine
    xla_flags: Mapping[str, Any]  # options of XLA that the user has set, which count more than ours
    dtype: str  # what the model computes in: fp32, bf16 or fp16
    execution: Execution
    optimizer: Optimizer
    choices: tuple[kernels.Choice, ...]  # what runs each operation
    made_for: kernels.MadeFor
    repeat: Repeat | None  # an earlier choice that these were taken from
    problems: tuple[str, ...]  # why it cannot be repeated
    shape: Shape  # what the work and the memory of a step are computed from
    available: int | None  # bytes that a device can hold; None: not known

    @property
    def resolved(self) -> kernels.Resolved:
        """Return all that was chosen, as the run's folder and checkpoints keep it. Reads our kernels' sources."""
        return kernels.Resolved(
            made_for=self.made_for,
            asked=asked_of(self.config),
            choices=self.choices,
            logit_rows=self.execution.logit_rows,
            options=compiling.without_files(self.execution.compiler_options),
            sources=record.sources_of(self.choices),
        )

    @property
    def needed(self) -> Needed:
        """Return the bytes that a step takes at least."""
        return required_memory_bytes(self.model, self.shape, sliced_weights=self.machine.platform == "cpu")

    @property
    def implementations(self) -> dict[str, str]:
        """Return what runs each operation, by name. The bits of a result depend on it."""
        return {choice.operation: choice.implementation for choice in self.choices}

    @property
    def parallel(self) -> Parallel:
        """Return how the run is spread over devices."""
        return parallel_of(self.config)

    @property
    def rounding(self) -> str:
        """Return how updated weights become 16-bit: nearest or stochastic."""
        if self.dtype != "bf16":
            return "nearest"
        if self.config.rounding == "auto":
            return "nearest" if self.config.master_weights else "stochastic"
        return self.config.rounding

    @property
    def master_weights(self) -> bool:
        """Return whether the parameters are kept in fp32."""
        return self.config.master_weights or self.dtype == "fp32"

    @property
    def product_precision(self) -> gpus.Precision:
        """Return what the matrix products are computed in."""
        if self.dtype != "fp32":
            return cast(gpus.Precision, self.dtype)
        return "tf32" if self.machine.version >= (8, 0) and self.config.tf32 else "fp32"

    @property
    def step_options(self) -> StepOptions:
        """Return the choices that shape the step's program."""
        decay = self.config.decay if self.config.weight_decay else "none"
        schedule = RISING if self.config.find_lr else self.config.schedule
        return StepOptions(schedule, decay, self.execution, self.rounding, self.optimizer, self.parallel)

    @property
    def runs_ahead(self) -> bool:
        """Return whether a step is begun before the one before it has been read, so that a GPU never waits."""
        return self.machine.platform != "cpu"

    @property
    def notes_on_repeat(self) -> list[str]:
        """Return a note on what of an earlier choice is not repeated."""
        named = self.config.kernels_from
        what = f"--kernels-from {named}: not repeated" if named else "not bit-exact from here"
        return [f"{what}: {', '.join(self.problems)}"] if self.problems else []

    @property
    def notes_on_bits(self) -> list[str]:
        """Return a note where what runs need not give the same bits twice, though a kernel of ours would."""
        return [
            f"{choice.operation} by cuDNN may not repeat its bits, so a run that is continued may differ from one "
            "without a break by a rounding; --attention flash repeats them"
            for choice in self.choices
            if choice.by == "cudnn"
        ]


def make_plan(
    config: TrainConfig,
    model: ModelShape,
    machine: kernels.Machine,
    *,
    findings: kernels.Findings | None = None,
    before: Repeat | None = None,
    memory: int | None = None,
    xla_flags: Mapping[str, Any] | None = None,
) -> Plan:
    """Decide how a configuration of a model is computed on a machine.

    findings: what was found out about the kernels on this card, which decides what `before` does not. before: an
    earlier choice, which is repeated but for what cannot run here and what flags now ask for otherwise. memory: bytes
    that a device can hold; None: not known. xla_flags: `compiling.user_flags()`.
    Raises InputError as --strict-kernels has it. Whether it fits is another question (fits.py).
    """
    assert config.batch_size != AUTO_BATCH
    dtype = resolve_dtype(config, machine)
    parallel = parallel_of(config)
    numbers, (Vp, C) = letters(model), head_spec(model).shape
    setting = kernels.Setting(
        machine,
        dtype,
        head_size(model),
        spread=parallel.splits or parallel.fixed,
        attention=attention_of(model),
        optimizer=config.optimizer,
        widths=widths(model),
        replaced=replaced(model),
    )
    made_for = kernels.MadeFor(
        record.target_of(machine), dtype, config.batch_size, config.sequence_length, numbers["L"],
        numbers.get("NH", 1), C, Vp,
    )  # fmt: skip
    repeat, problems = _repeated(config, before, made_for, setting)
    recorded = None if repeat is None else record.here(repeat.resolved, machine)
    selection = record.choose_again(recorded, asked_of(config), config.strict_kernels, setting, findings)
    frozen_ranges(model)  # raises InputError for what is no tensor of it
    with own_file.inside(selection.optimizer.path or Path(selection.optimizer.name), "--optimizer"):
        ranges_of(model, selection.optimizer)
    recompute, blocks = _recomputed(config, model)
    shape = Shape(
        config.batch_size, config.sequence_length, config.grad_accumulation, recompute, blocks, dtype=dtype,
        master_weights=config.master_weights, flash=not kernels.makes_matrix(selection.choices),
        optimizer=selection.optimizer.scope, buffers=len(selection.optimizer.buffers),
        products=max(rule.products for rule in selection.optimizer.rules), devices=parallel.devices,
        stage=parallel.stage, sums=sums_kept(config.grad_accumulation) if parallel.fixed else 0,
        fused=fused_of(selection),
    )  # fmt: skip
    rows = _logit_rows(config, model, machine, shape, recorded)
    options = _options(config, machine, dtype, recorded, findings, xla_flags or {})
    execution = Execution(selection.op, recompute, blocks, rows, options)
    return Plan(
        config, model, machine, xla_flags or {}, dtype, execution, selection.optimizer, selection.choices, made_for,
        repeat, problems, shape._replace(logit_rows=rows), memory,
    )  # fmt: skip


def fused_of(selection: kernels.Selection) -> tuple[str, ...]:
    """Return the operations whose products, of ours, do what would be a pass over their result."""
    choices = selection.choices
    return tuple(each.operation for each in choices if each.operation in PRODUCTS and each.by == "pallas")


def recomputes(model: ModelShape) -> bool:
    """Return whether a model's backward can compute something again: JAX's own keeps all."""
    return program_of(model).loss is not None


def _recomputed(config: TrainConfig, model: ModelShape) -> tuple[int, int]:
    """Return what -r and --recompute-blocks come to: nothing is computed again where JAX makes the backward."""
    if recomputes(model):
        return config.recompute, config.recompute_blocks
    if config.recompute > 1 or config.recompute_blocks:
        flag = f"--recompute-blocks {config.recompute_blocks}" if config.recompute_blocks else f"-r {config.recompute}"
        raise InputError(f"{flag}: JAX makes the backward of the family {model.family}, and keeps all; leave it out")
    return 0, 0


# ----- precision ------------------------------------------------------------------------------------------------------


def resolve_dtype(config: TrainConfig, machine: kernels.Machine) -> str:
    """Return what --dtype resolves to on a machine: fp32, bf16 or fp16."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if machine.target is not None else "fp32"


# ----- several devices ------------------------------------------------------------------------------------------------


def parallel_of(config: TrainConfig) -> Parallel:
    """Return how a run is spread over devices; over one while their number is not known."""
    devices = max(1, config.devices)
    return Parallel(devices, config.zero_stage if devices > 1 else 0, config.reduction == "fixed")


# ----- an earlier choice ----------------------------------------------------------------------------------------------


def asked_of(config: TrainConfig) -> kernels.Preferences:
    """Return the options that bear on what is chosen."""
    return kernels.Preferences(**{name: getattr(config, name) for name in kernels.Preferences._fields})


def _repeated(
    config: TrainConfig, before: Repeat | None, made_for: kernels.MadeFor, setting: kernels.Setting
) -> tuple[Repeat | None, tuple[str, ...]]:
    """Return the earlier choice if it counts here, and why it cannot be repeated.

    That of a start with other shapes, which made no checkpoint, was one of another run. Raises InputError as
    --strict-kernels has it of --kernels-from.
    """
    if before is None:
        return None, ()
    if not config.kernels_from and before.resolved.made_for._replace(target=made_for.target) != made_for:
        return None, ()
    problems = record.cannot_repeat(before.resolved, asked_of(config), setting)
    if problems and config.kernels_from and config.strict_kernels:
        raise InputError(f"--strict-kernels: --kernels-from {config.kernels_from}: {'; '.join(problems)}")
    return before, problems


# ----- memory ---------------------------------------------------------------------------------------------------------


def _logit_rows(
    config: TrainConfig,
    model: ModelShape,
    machine: kernels.Machine,
    shape: Shape,
    recorded: kernels.Resolved | None,
) -> int:
    """Return what --logit-rows resolves to. shape: the step's but for them."""
    if recorded is not None and record.still(recorded, asked_of(config), "logit_rows"):
        return recorded.logit_rows
    if config.logit_rows >= 0 or machine.platform != "gpu":
        return max(config.logit_rows, 0)
    return chosen_logit_rows(model, shape, gpus.card_memory_bytes(machine.kind))


# ----- XLA's options --------------------------------------------------------------------------------------------------


def _options(
    config: TrainConfig,
    machine: kernels.Machine,
    dtype: str,
    recorded: kernels.Resolved | None,
    findings: kernels.Findings | None,
    flags: Mapping[str, Any],
) -> compiling.Settings:
    """Return XLA's options: as before, but for those that a flag or XLA_FLAGS sets; else with what was found out.

    Those of several devices, and a file of algorithms, are of this start: it may have others than the recorded one.
    """
    own = (
        *compiling.overlap(machine.target, max(1, config.devices), flags),
        *compiling.pinned(config.algorithms, machine.target, flags),
    )
    options = dict(compiling.triton_gemm(config.triton_gemm, machine.target, flags))
    options |= compiling.onednn(dtype, machine, flags)
    if recorded is None:
        return (*(options | dict(findings.options if findings else ())).items(), *own)
    again = {name: flags.get(name, value) for name, value in compiling.of_one_device(recorded.options)}
    still = record.still(recorded, asked_of(config), "triton_gemm")
    return (*(again if still and compiling.TRITON_GEMM not in flags else again | options).items(), *own)


# ----- the step's numbers ---------------------------------------------------------------------------------------------


def step_numbers(config: TrainConfig, optimizer: Optimizer, steps: int) -> StepNumbers:
    """Return the traced numbers of the step. steps: of the whole run, over which the learning rate takes its course."""
    highest, fraction = float(config.learning_rate), float(config.final_lr_fraction)
    if config.find_lr:
        low, highest = parse_rates(config.find_lr_range) or (highest, highest)
        fraction = low / highest
    schedule = ScheduleNumbers(
        learning_rate=highest,
        warmup_steps=config.warmup_steps,
        total_steps=steps,
        final_fraction=fraction,
        step_every=config.step_every,
        step_factor=float(config.step_factor),
    )
    moves = LossScaleNumbers(config.loss_scale_steps, float(config.loss_scale_factor))
    return StepNumbers(
        schedule,
        numbers_of(optimizer, config),
        float(config.grad_clip),
        moves,
        np.uint32(config.seed),
        skip_loss_z=float(config.skip_loss_z),
        skip_norm_z=float(config.skip_norm_z),
    )

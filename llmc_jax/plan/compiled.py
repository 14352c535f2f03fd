"""The step of a plan, compiled for GPUs that are not there: one, or several of one machine that share the training.

Everything comes from the plan, so it is the program that a run on those GPUs would compile. Leaves out running it, and
what is read out of it (machine/deviceless.py, program.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

from llmc_jax.base.errors import InputError
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import compiling, deviceless, gpus
from llmc_jax.machine.compiling import Settings
from llmc_jax.machine.gpus import Machine, machine_of
from llmc_jax.models.family import chosen, parsed
from llmc_jax.models.layout import flat_size
from llmc_jax.models.units import split_size
from llmc_jax.plan.asked import with_attention
from llmc_jax.plan.memory import CPU
from llmc_jax.plan.plan import Plan, make_plan, step_numbers
from llmc_jax.training.parallel.stage import AXIS, EVERYWHERE, SPLIT, state_specs
from llmc_jax.training.state import DTYPES, TrainState, initial_state
from llmc_jax.training.step import StepNumbers, train_step

STEPS = 1000  # of the learning rate's course: any number is the same program


def plan_for(target: str, config: TrainConfig | str, model: ModelShape | None = None) -> Plan:
    """Return the plan of a configuration, or of train.py's flags for one, on GPUs that are not there.

    target: a key of `gpus.TARGETS`; or CPU, this machine's processor. model: None: that of -e. Raises InputError for
    one that is not known, and as `make_plan` does.
    """
    config = parse_args(config.split()) if isinstance(config, str) else config
    machine = Machine("cpu", CPU) if target == CPU else machine_of(gpus.known_target(target).device_kind)
    found = model or with_attention(parsed(config.model, chosen(config.model_file)), config)
    return make_plan(config, found, machine)


def state_of(plan: Plan) -> TrainState:
    """Return the shapes of a run's state over all its devices."""
    flat = jax.ShapeDtypeStruct((flat_size(plan.model),), jnp.float32)
    scale = float(plan.config.loss_scale) if plan.dtype == "fp16" else None
    state: TrainState = jax.eval_shape(
        lambda flat: initial_state(
            flat, DTYPES[plan.dtype], master_weights=plan.master_weights, loss_scale=scale, optimizer=plan.optimizer
        ),
        flat,
    )
    split = split_size(plan.model, plan.parallel.devices)

    def over_devices(leaf: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct((split,), leaf.dtype) if spec == SPLIT else leaf

    return jax.tree.map(over_devices, state, state_specs(state, plan.parallel))


def arguments(plan: Plan) -> tuple[TrainState, Any, Any, StepNumbers]:
    """Return the shapes of what the step takes: state, inputs, targets (A, B, T), numbers."""
    config = plan.config
    tokens = jax.ShapeDtypeStruct((config.micro_batches, config.batch_size, config.sequence_length), jnp.int32)
    numbers = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, step_numbers(config, plan.optimizer, STEPS)))
    return state_of(plan), tokens, tokens, numbers


def compile_step(plan: Plan, target: str, options: Settings | None = None) -> deviceless.Program:
    """Compile a plan's step for as many GPUs of one machine as it has devices. Memory is that of one of them.

    target: what the plan was made for. options: XLA's; None: the plan's. Raises InputError as `deviceless.compile_for`,
    and for several devices of a processor.
    """
    options = plan.execution.compiler_options if options is None else options
    given = (*arguments(plan), plan.model, plan.step_options)
    if target == CPU:
        if plan.parallel.devices > 1:
            raise InputError(
                f"--devices {plan.parallel.devices}: for several devices that a processor pretends to have nothing is "
                "compiled here"
            )
        found = compiling.compiled(train_step.lower(*given), options)
        return deviceless.Program("cpu", deviceless.memory_use(found), found)
    if plan.parallel.devices == 1:
        return deviceless.compile_for(train_step, given, target, compiler_options=options)
    mesh = deviceless.gpu_mesh(target, (plan.parallel.devices,), (AXIS,))
    specs = (state_specs(given[0], plan.parallel), SPLIT, SPLIT, EVERYWHERE, EVERYWHERE, EVERYWHERE)
    return deviceless.compile_for(train_step, given, target, mesh=mesh, specs=specs, compiler_options=options)

"""What this machine is, and what is known of its kernels: all that a plan is made from beside flags and model.

train, profile and kernels share it. Leaves out deciding (plan/plan.py), and how kernels are tried (start.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from llmc_jax import cluster, kernels
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.cluster.agreement import of_all
from llmc_jax.config.checks import with_devices
from llmc_jax.config.model import ModelShape
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.algorithms import check_made_for
from llmc_jax.machine.device import Device, describe_device
from llmc_jax.machine.driver import seen_cards
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, Repeat, make_plan
from llmc_jax.plan.search import limit_of, sizes_up_to
from llmc_jax.trials import candidates, start


class Facts(NamedTuple):
    """What a plan on this machine is made from, the same in all processes of a run but for the device."""

    device: Device  # this process's
    machine: kernels.Machine
    devices: int  # of the whole run
    memory: int | None  # of one device, bytes: the least that any process has; None: not known
    xla_flags: Mapping[str, Any]  # options of XLA that the user has set
    findings: kernels.Findings  # what process 0 knows of the kernels


def facts(config: TrainConfig, findings: kernels.Findings | None) -> Facts:
    """Return the facts of this machine; of several processes all meet here once. JAX has a device from now on.

    findings: this process's, if it has any. Raises InputError where there are fewer devices than
    the run asks for, and for a file of --algorithms that XLA does not read or use.
    """
    group, device, machine = cluster.here(), describe_device(), kernels.this_machine()

    def own() -> dict[str, Any]:
        # JAX may have been told to see fewer than the driver counts
        devices = with_devices(config, device.local_devices, device.platform, group.size).devices
        check_algorithms(config, machine)
        # the devices that a CPU pretends to have share its memory, those of several processes too
        sharing = devices // group.size * group.local_size if device.platform == "cpu" else 1
        memory = device.memory_bytes and device.memory_bytes // sharing
        known = to_json(findings or kernels.Findings()) if group.rank == 0 else None
        return {"devices": devices, "memory": memory, "findings": known}

    found = of_all("facts of the machine", own)
    known: kernels.Findings = from_json(kernels.Findings, found[0]["findings"])
    memory = [each["memory"] for each in found]
    least = None if None in memory else min(memory)
    return Facts(device, machine, found[0]["devices"], least, compiling.user_flags(), known)


def check_algorithms(config: TrainConfig, machine: kernels.Machine) -> None:
    """Let XLA read the kept file of --algorithms, before anything is written. Raises InputError."""
    options = compiling.pinned(config.algorithms, machine.target, compiling.user_flags())
    if options:
        check_made_for(config.algorithms, machine.version)
        compiling.compiled(jax.jit(lambda: 0).lower(), options)


def plan_with(facts: Facts, config: TrainConfig, model: ModelShape, before: Repeat | None = None) -> Plan:
    """Return the plan of a configuration on this machine. See `make_plan`, which raises the same."""
    return make_plan(
        replace(config, devices=facts.devices), model, facts.machine, findings=facts.findings, before=before,
        memory=facts.memory, xla_flags=facts.xla_flags,
    )  # fmt: skip


def available_devices() -> tuple[int, str]:
    """Return how many devices JAX has, and their platform. Of NVIDIA's it asks the driver, not JAX."""
    if cards := seen_cards():
        return len(cards), cards[0].machine.platform
    device = describe_device()
    return device.num_devices, device.platform


# ----- kernels --------------------------------------------------------------------------------------------------------


def try_kernels(
    config: TrainConfig, model: ModelShape, before: Repeat | None = None, most_rows: int = 0
) -> kernels.Findings:
    """Return what is known of this GPU's kernels, found out now if need be. Call it before JAX has a device.

    Nothing where there is no NVIDIA GPU, where all of the earlier choice `before` can run, or with --no-kernel-check.
    With -b auto they are tried with the largest number up to most_rows that fits by estimate: compiling, which decides
    it, takes the GPU.
    """
    cards = [] if config.no_kernel_check else seen_cards()
    if not cards:
        return kernels.Findings()
    here, flags = cards[0], compiling.user_flags()
    if config.batch_size == AUTO_BATCH:
        limit = limit_of("gpu", int(MEMORY_SHARE * here.memory))
        config = replace(config, batch_size=first_guess(config, model, here.machine, limit, most_rows))
    plan = make_plan(config, model, here.machine, before=before, xla_flags=flags)
    if plan.repeat is not None and not plan.problems:
        return kernels.Findings()
    return start.find_out(case_of(make_plan(config, model, here.machine, xla_flags=flags)), here)


def first_guess(config: TrainConfig, model: ModelShape, machine: kernels.Machine, limit: int, most: int) -> int:
    """Return the largest -b that fits by estimate, or the smallest there is."""

    def needs(size: int) -> int:
        return computed(make_plan(replace(config, batch_size=size), model, machine)).program

    sizes = sizes_up_to(most, config)
    return next((size for size in sizes if needs(size) <= limit), sizes[-1])


def case_of(plan: Plan) -> candidates.Case:
    """Return a run as the trials of its kernels see it."""
    config, options = plan.config, compiling.of_one_device(plan.execution.compiler_options)
    undecided = plan.machine.target is not None and compiling.TRITON_GEMM not in dict(options)
    return candidates.Case(
        model=plan.model,
        batch_size=config.batch_size,
        sequence_length=config.sequence_length,
        accumulation=min(config.grad_accumulation, 2),  # a step over several repeats what it does of one
        dtype=plan.dtype,
        rounding=plan.rounding,
        master_weights=config.master_weights,
        tf32=config.tf32,
        recompute=config.recompute,
        recompute_blocks=config.recompute_blocks,
        logit_rows=plan.execution.logit_rows,
        options=options,
        asked=kernels.Preferences(config.kernels, config.attention, config.gelu_fusion, products=config.products),
        machine=plan.machine,
        # without Triton's products, for which XLA would time each of them for minutes first
        other_options=((compiling.TRITON_GEMM, False),) if undecided else (),
    )

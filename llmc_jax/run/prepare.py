"""Before a run: everything that can be known beforehand is checked, the data opened, the parameters put on the device.

Writes nothing, so that a run that cannot begin leaves nothing behind; with -y 1 it clears away what a killed process
left half-written, and writes the DONE_ files of checkpoints that lost them. Leaves out the run itself (loop.py).
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from llmc_jax import cluster
from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import to_json
from llmc_jax.checkpoint.contents import OURS, Counters, Identity, Metadata, fingerprint, stops_early
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.cluster.agreement import Agreed, alike, of_all
from llmc_jax.config.train import AUTO_BATCH, TrainConfig
from llmc_jax.machine import compiling
from llmc_jax.machine.device import Device, devices_of
from llmc_jax.machine.nvml import open_monitor
from llmc_jax.models.check import check_step
from llmc_jax.models.layout import num_parameters
from llmc_jax.plan.fits import check_fits as check_memory
from llmc_jax.plan.plan import Plan
from llmc_jax.plan.search import limit_of
from llmc_jax.run import fitting
from llmc_jax.run.fitting import Fitted
from llmc_jax.run.inputs import (
    Data,
    Inputs,
    Model,
    continued_data,
    inputs,
    most_rows,
    open_data,
    total_steps,
    validation_batches,
)
from llmc_jax.run.processes import Share, connect, first_exchange, introduced
from llmc_jax.run.resume import changes, check_fits, environment
from llmc_jax.run.state import Setup
from llmc_jax.run.trackers import require_trackers
from llmc_jax.run.weights import drawn_beside, starting_weights
from llmc_jax.training.parallel.placement import placement
from llmc_jax.training.state import DTYPES, TrainState
from llmc_jax.trials import here
from llmc_jax.trials.here import Facts

LARGE_MODEL = 100_000_000  # parameters from which a run says what bf16 would save


def prepare(config: TrainConfig, notes: list[str]) -> tuple[Setup, TrainState]:
    """Check everything that can be known before the run, and put the parameters on the device.

    Raises InputError for whatever cannot be used.
    """
    require_trackers(config)
    own = introduced(config)
    given = inputs(config, lambda: here.available_devices() if own is None else (own.devices, own.platform))
    named = given.tokenizer.named
    if len(set(filter(None, of_all("tokenizer", lambda: named and named.sha256)))) > 1:
        raise Agreed("the processes found unlike tokenizers beside the data or the model; give all the same files")
    drawing = drawn_beside(given) if given.earlier is None and given.model.source is None else None
    found = facts(given, own)
    plan, fitted = make_plan(given, found)
    setup, state = starting_state(given, found, plan, fitted, drawing)
    setup.notes[:0] = notes
    return setup, state


def facts(given: Inputs, own: Share | None) -> Facts:
    """Return what is known of this machine and its kernels, which are tried where need be; connect the processes.

    JAX has a device from now on.
    """
    findings = None
    if given.earlier is None and cluster.here().rank == 0:
        findings = here.try_kernels(given.config, given.model.config, given.before, most_rows(given.data))
    connect(own)
    return here.facts(given.config, findings)


def make_plan(given: Inputs, found: Facts) -> tuple[Plan, Fitted | None]:
    """Return the run's plan, and how -b auto came to its number. All processes make the same one of the same facts.

    Raises InputError as `plan.make_plan` does, and where the memory is too small.
    """

    def plan_with(size: int) -> Plan:
        return here.plan_with(found, replace(given.config, batch_size=size), given.model.config, given.before)

    if given.config.batch_size != AUTO_BATCH:
        plan = plan_with(given.config.batch_size)
        check_memory(plan)
        return plan, None
    if found.memory is None:
        raise InputError("-b auto: nothing says how much memory the device has; give -b a number")
    limit = limit_of(found.machine.platform, found.memory)
    fitted = fitting.fitted(given.config, most_rows(given.data), limit, plan_with)
    return fitted.plan, fitted


def starting_state(
    given: Inputs, found: Facts, plan: Plan, fitted: Fitted | None, drawing: "Future[np.ndarray] | None"
) -> tuple[Setup, TrainState]:
    """Return the run as it begins, and its state on the devices. drawing: its random weights, if it begins with such.

    Raises InputError where the checkpoint is of another run.
    """
    config, model, earlier = plan.config, given.model, given.earlier
    place = placement(model.config, plan.parallel, devices_of(plan.parallel.devices))
    first_exchange(place, plan)
    with alike("state"):
        if model.config.source:  # before anything is written
            tokens = config.batch_size, config.sequence_length
            check_step(model.config, tokens, DTYPES[plan.dtype], plan.execution, splits=plan.parallel.splits)
        data = given.data if fitted is None else open_data(config, model.config)
        metadata = begun_metadata(plan, data, found.device, origin_of(earlier, model))
        if earlier is not None:
            check_fits(earlier, config, metadata.identity)
        steps = total_steps(config, data.train)
        state, doubts = starting_weights(plan, place, given, drawing)
        data = continued_data(config, earlier, data)
        setup = Setup(
            plan=plan,
            name=config.preset or model.name or config.model,
            weights=model.path,
            place=place,
            data=data,
            questions=given.questions,
            steps=steps,
            val_batches=validation_batches(config, data.val),
            tokenizer=given.tokenizer,
            device=found.device,
            fitted=fitted,
            asked=given.asked,
            earlier=earlier,
            metadata=replace(metadata, total_steps=steps, tokenizer=given.tokenizer.named),
            monitor=open_monitor() if config.gpu_info_every > 0 and cluster.here().rank == 0 else None,
            notes=list(given.notes),
            warnings=[*given.warnings, *doubts],
        )
    setup.notes.extend([*notes_on_start(setup), *found.findings.notes, *plan.notes_on_bits])
    tokenizer = given.tokenizer
    if tokenizer.tokenizer is not None and tokenizer.tokenizer.vocab_size < model.config.vocab_size:
        setup.notes.append(f"tokenizer {tokenizer.note}: the other rows are padding, which no sample draws")
    return setup, state


def begun_metadata(plan: Plan, data: Data, device: Device, origin: Mapping[str, Any]) -> Metadata:
    """Return what the run's checkpoints hold of it, but for the number of its steps."""
    files = None if data.train is None else fingerprint(data.train.paths)
    return Metadata(
        step=0,
        identity=Identity(plan.model, plan.dtype, plan.master_weights, plan.rounding, files, plan.optimizer.key),
        options=plan.config.to_json(),
        val_data=None if data.val is None else fingerprint(data.val.paths),
        environment=environment(device, plan.implementations),
        kernels=to_json(plan.resolved),
        origin=origin,
    )


def origin_of(earlier: Checkpoint | None, model: Model) -> Mapping[str, Any]:
    """Return the origin that the run's checkpoints hold: that of the checkpoint it resumes from, or its own.

    Its own keeps the ids that begin and end a text, where it is known of the weights.
    """
    if earlier is not None:
        return earlier.metadata.origin
    special = model.source and model.source.special
    return {**OURS, **({} if special is None else {"special": special._asdict()})}


def notes_on_start(setup: Setup) -> Iterator[str]:
    """Say what the run begins with, and how it differs from the one that it resumes."""
    config, plan, earlier = setup.config, setup.plan, setup.earlier
    if earlier is not None:
        more = f"; the run is already complete: an -x above {setup.steps} continues it"
        complete = more if earlier.step >= setup.steps else ""
        if not complete and stops_early(config, earlier.metadata.counters or Counters()):
            complete = "; it stopped early, and continues only with a larger --patience"
        yield f"resumed from {earlier.folder}, after step {earlier.step} of {setup.steps}{complete}"
        yield from changes(earlier, plan, setup.metadata)
    elif config.reuse and config.output_dir:
        yield f"-y 1: there is no checkpoint in {config.output_dir}, so a new run starts"
    if config.algorithms and compiling.PINNED not in dict(plan.execution.compiler_options):
        why = "XLA_FLAGS names another" if plan.machine.target else "it is for NVIDIA's library"
        yield f"--algorithms: the file does nothing here: {why}"
    large = num_parameters(plan.model) >= LARGE_MODEL and (config.dtype, earlier) == ("auto", None)
    if large and plan.dtype == "fp32" and compiling.onednn("bf16", plan.machine, plan.xla_flags):
        share = f"{compiling.ONEDNN_SHARE:.0%} of the time that one in fp32 takes"
        yield f"--dtype bf16 is faster on this CPU, which has AMX: a step of GPT-2 124M takes {share}"
    if earlier is None or config.kernels_from:  # else `changes` has said it
        yield from plan.notes_on_repeat

"""A run that can begin, as plain data, and what its checkpoints hold of it from the beginning."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.plain import to_json
from llmc_jax.checkpoint.contents import OURS, Counters, Identity, Metadata, fingerprint
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.config.checks import notes_on_devices
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.items import Item
from llmc_jax.data.tokenizers import Choice
from llmc_jax.machine.device import Device
from llmc_jax.machine.nvml import GpuMonitor
from llmc_jax.plan.plan import Plan
from llmc_jax.run.early import stops_early
from llmc_jax.run.fitting import Fitted
from llmc_jax.run.inputs import Data, Model
from llmc_jax.run.resume import changes, environment
from llmc_jax.training.parallel.placement import Placement


class Setup(NamedTuple):
    """A run that can begin."""

    plan: Plan
    name: str
    weights: Path | None  # the checkpoint that they come from
    place: Placement  # of its arrays
    data: Data
    questions: Sequence[Item]  # of HellaSwag; none: it is not evaluated
    steps: int
    val_batches: int  # of one validation
    tokenizer: Choice
    device: Device
    fitted: Fitted | None  # how -b auto came to its number
    asked: TrainConfig  # the configuration before devices were counted, and before --find-lr did without some of it
    earlier: Checkpoint | None  # the checkpoint that the run resumes from
    metadata: Metadata  # of its checkpoints, as it begins
    monitor: GpuMonitor | None  # of -lg
    notes: list[str]
    warnings: list[str]

    @property
    def config(self) -> TrainConfig:
        return self.plan.config

    @property
    def model(self) -> ModelConfig:
        return self.plan.model


def begun_metadata(plan: Plan, data: Data, device: Device, origin: Mapping[str, Any]) -> Metadata:
    """Return what the run's checkpoints hold of it, but for the number of its steps."""
    files = None if data.train is None else fingerprint(data.train.paths)
    return Metadata(
        step=0,
        identity=Identity(plan.model, plan.dtype, plan.master_weights, plan.rounding, files),
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
    yield from notes_on_devices(config)
    if earlier is not None:
        complete = "; the run is already complete" if earlier.step >= setup.steps else ""
        if not complete and stops_early(config, earlier.metadata.counters or Counters()):
            complete = "; it stopped early, and continues only with a larger --patience"
        yield f"resumed from {earlier.folder}, after step {earlier.step} of {setup.steps}{complete}"
        yield from changes(earlier, plan, setup.metadata)
    elif config.reuse and config.output_dir:
        yield f"-y 1: there is no checkpoint in {config.output_dir}, so a new run starts"
    if earlier is None or config.kernels_from:  # else `changes` has said it
        yield from plan.notes_on_repeat

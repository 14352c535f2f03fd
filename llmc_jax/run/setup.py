"""A run that can begin, as plain data, and what its checkpoints hold of it from the beginning."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llmc_jax.checkpoint.contents import Metadata
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.items import Item
from llmc_jax.data.tokenizers import Choice
from llmc_jax.machine.device import Device
from llmc_jax.machine.nvml import GpuMonitor
from llmc_jax.plan.plan import Plan
from llmc_jax.run.fitting import Fitted
from llmc_jax.run.inputs import Data
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

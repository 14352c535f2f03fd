"""What a checkpoint contains beside its arrays: typed metadata, made from JSON and turned into it here alone.

Leaves out the arrays (run/saver.py, run/weights.py), how both are stored (store.py), and whether a checkpoint fits a
run (run/resume.py).
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import quoted
from llmc_jax.base.own_file import kept_copy
from llmc_jax.config.model import CAUSAL, RELU, ModelShape, attention_of
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.tokenizers import Named
from llmc_jax.models.family import UnknownFamily, loaded_families, shape_from_json, shape_to_json
from llmc_jax.models.layout import tensor_specs

FORMAT = 2  # of the metadata and of the manifest beside it, as they are written
DTYPES = ("fp32", "bf16", "fp16")  # in which a model computes
NOTHING: Mapping[str, Any] = MappingProxyType({})
OURS: Mapping[str, Any] = MappingProxyType({"kind": "llmc-jax"})  # origin of a state that began here
SAMPLED_BYTES = 4096  # of each token file's beginning and end: enough to tell one file from another


class Counters(NamedTuple):
    """What the loop knows beside the state, and needs again."""

    skipped: int = 0  # steps that updated nothing
    skipped_in_a_row: int = 0  # of these the last ones, because something was not finite
    val_loss: float | None = None  # the last one, nats per token
    validated: int = -1  # the step before which it was measured; -1: never
    sampled: int = -1  # the step before which the last sample was drawn
    drawn: int = 0  # random numbers that samples have taken; older checkpoints do not say
    evaluated: int = -1  # the step before which HellaSwag was last evaluated; older ones do not say
    # of early stopping; in older checkpoints it begins anew
    best_loss: float | None = None  # the lowest validation loss
    best_step: int = -1  # the step before which it was measured
    improved: float | None = None  # the loss of the last validation that was an improvement
    stale: int = 0  # validations since then


class Identity(NamedTuple):
    """What makes a run this run: with another one of these its checkpoint cannot be continued."""

    model: ModelShape
    dtype: str  # one of DTYPES
    master_weights: bool
    rounding: str | None = None  # nearest, stochastic; None: another program's state, which does not say
    data: str | None = None  # fingerprint of the training data; None where there is none
    optimizer: str = "adamw"  # its name, of one in a user's file with an @ and the file's digest


def fingerprint(paths: Iterable[Path]) -> str:
    """Return what tells data files apart, hexadecimal: of each one's length, beginning and end, in their order."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True)
class Metadata:
    """All that a checkpoint holds beside its arrays."""

    step: int
    identity: Identity
    total_steps: int | None = None  # that the run was to make; None: converted, not trained here
    counters: Counters | None = None  # None: unknown, so they begin anew
    options: Mapping[str, Any] = NOTHING  # of the run, as JSON; empty where converted
    val_data: str | None = None  # fingerprint of the validation data
    loader: Mapping[str, Any] | None = None  # its position
    environment: Mapping[str, Any] = NOTHING  # what the bits of a result may depend on
    kernels: Mapping[str, Any] | None = None  # what ran each operation, as JSON; older checkpoints do not say
    range_test: Mapping[str, Any] | None = None  # rates and losses of a test that --find-lr makes
    origin: Mapping[str, Any] = OURS  # of the weights, or of another program's run: what it takes to hand that back
    tokenizer: Named | None = None  # whose ids the model knows; None: not known, and older checkpoints do not say

    def to_json(self) -> dict[str, Any]:
        """Return what is stored, as JSON can hold it."""
        stored = {
            "format": FORMAT,
            "step": self.step,
            **self.identity._asdict(),
            "model": shape_to_json(self.identity.model),
            "val_data": self.val_data,
            "options": dict(self.options),
            "total_steps": self.total_steps,
            "val_loss": self.counters and self.counters.val_loss,
            "progress": self.counters._asdict() if self.counters else {},
            "loader": self.loader,
            "environment": dict(self.environment),
            "kernels": self.kernels,
            "origin": dict(self.origin),
        }
        if self.range_test is not None:
            stored["range_test"] = dict(self.range_test)
        if self.identity.model.source:
            stored["tensors"] = names_and_shapes(self.identity.model)
        return stored if self.tokenizer is None else stored | {"tokenizer": self.tokenizer._asdict()}

    @staticmethod
    def from_json(stored: Mapping[str, Any], folder: Path) -> "Metadata":
        """Return the metadata of a checkpoint. What older or converted ones lack has its default.

        The manifest holds the digest of it, so what a program has written is what it was.
        Raises FormatError, which names the folder, if this is no metadata of a training state.
        """
        names = ("options", "environment", "origin", "loader", "kernels", "range_test", "total_steps", "val_data")
        rest = {name: stored[name] for name in names if stored.get(name) is not None}
        model, tensors = shape_of(stored.get("model"), folder), stored.get("tensors")
        if model is None or stored.get("dtype") not in DTYPES:
            raise FormatError(f"{folder}: its run.json is not that of a training state of llmc-jax")
        if tensors is not None and tensors != (now := names_and_shapes(model)):
            words = f"its tensors are {tensors}, those of the family {model.family} now {now}"
            raise InputError(f"{folder}: {words}; give the file that it was trained with")
        if rest.get("options", NOTHING).get("attention") == "relu" and attention_of(model) == CAUSAL:
            model = replace(model, attention=RELU)  # an older one says it among the options alone
        master, rounding, data = stored.get("master_weights", True), stored.get("rounding"), stored.get("data")
        known = {name: value for name, value in (stored.get("progress") or {}).items() if name in Counters._fields}
        tokenizer = Named(**stored["tokenizer"]) if stored.get("tokenizer") else None
        identity = Identity(model, stored["dtype"], master, rounding, data, stored.get("optimizer", "adamw"))
        counters = Counters(**known) if known else None
        return Metadata(stored["step"], identity, counters=counters, tokenizer=tokenizer, **rest)


def names_and_shapes(model: ModelShape) -> list[list[Any]]:
    """Return name and shape of each tensor of a model: the same flat buffer may hold others."""
    return [[spec.name, *spec.shape] for spec in tensor_specs(model)]


def shape_of(found: Any, folder: Path) -> Any:
    """Return a model's shape that stands in JSON; None where none does.

    folder: of the checkpoint. Raises InputError where its family is not known, with the copy that the run keeps of it.
    """
    try:
        return shape_from_json(found)
    except UnknownFamily as error:
        copy = folder.parent / kept_copy(error.source)
        words = f"give the run's copy: --model {quoted(copy)}" if copy.is_file() else "give it: --model FILE.py"
        if loaded := [family for family in loaded_families() if family.name == error.name]:
            words = f"{loaded[0].path} has changed since: {words}; or train with --model-changed"
        raise InputError(f"{folder}: {UnknownFamily(error.name, error.source, words)}") from None
    except InputError:
        raise
    except ValueError:
        return None


# ----- early stopping -----------------------------------------------------------------------------------------------

# It follows from the validation losses, which are the same in every process, and lies in each checkpoint. So all
# processes stop at the same step, and so does a run that was killed and resumed.


def judged(counters: Counters, step: int, loss: float, delta: float) -> Counters:
    """Return the counters after a validation before step `step`.

    It is an improvement where the loss lies more than `delta` below that of the last improvement; NaN and infinity are
    none. So small gains count together once they add up to more than delta.
    """
    counters = counters._replace(val_loss=loss, validated=step)
    if math.isfinite(loss) and (counters.best_loss is None or loss < counters.best_loss):
        counters = counters._replace(best_loss=loss, best_step=step)
    if math.isfinite(loss) and (counters.improved is None or loss < counters.improved - delta):
        return counters._replace(improved=loss, stale=0)
    return counters._replace(stale=counters.stale + 1)


def stops_early(config: TrainConfig, counters: Counters) -> bool:
    """Return whether so many validations in a row were no improvement that the run ends."""
    return 0 < config.patience <= counters.stale

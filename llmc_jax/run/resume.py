"""Continuing a run: what a checkpoint must hold for that, whether it fits the run that asks, and the state out of it.

Leaves out how a checkpoint is stored (checkpoint/store.py) and when one is made (saver.py, loop.py).
"""

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import kernels
from llmc_jax.checkpoint import store
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.options import show_value
from llmc_jax.config.train import OPTIONS, TrainConfig
from llmc_jax.data.loader import Loader
from llmc_jax.errors import FormatError, InputError
from llmc_jax.kernels import record
from llmc_jax.machine import device as hardware
from llmc_jax.machine.versions import git_state, versions
from llmc_jax.models.gpt2.tensors import Params, flat_size, tensor_specs, views
from llmc_jax.run.folder import KERNELS, MAIN_LOG, config_file, read_kernels
from llmc_jax.training.step import TrainState

BUFFERS = ("params", "m", "v", "copy")  # of TrainState, flat; stored as the 16 tensors of each
SAMPLED_BYTES = 4096  # of each token file's beginning and end: enough to tell one file from another

# Options whose value must be the one that the checkpoint was made with.
BINDING = ("batch_size", "sequence_length", "tokens_per_step", "seed", "shuffle", "overfit")
# Options that do not reach the weights: they may differ, and nothing is said about it.
FREE = frozenset({
    "preset", "model", "init_from", "v2_order", "train_data", "val_data", "tokenizer", "output_dir", "reuse", "save",
    "checkpoint_every", "keep_checkpoints", "major_every", "export_llmc", "save_failure", "gpu_info_every", "profile",
    "print_every", "max_nonfinite", "val_every", "val_batches", "sample_every", "sampling", "sample_tokens",
    "hellaswag", "strict_kernels", "kernels_from", "no_kernel_check", "total_batch_size", "dtype",
    "master_weights", "rounding",
})  # fmt: skip


# ----- what a checkpoint holds ----------------------------------------------------------------------------------------


def named_arrays(state: TrainState, model: ModelConfig) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint, by name: `params/wte`, `m/wte`, …, `step`. On a CPU views of the device's buffers."""
    arrays: dict[str, np.ndarray] = {}
    for buffer in BUFFERS:
        flat = getattr(state, buffer)
        if flat is not None:
            tensors = views(np.asarray(flat), model)
            arrays |= {f"{buffer}/{name}": tensor for name, tensor in tensors._asdict().items()}
    arrays |= {name: np.asarray(value) for name, value in _small(state)}
    return arrays


def _small(state: TrainState) -> Iterator[tuple[str, Any]]:
    """The small arrays of a state by name."""
    yield "step", state.step
    yield "updates", state.updates
    for group in ("loss_scale", "outliers"):
        values = getattr(state, group)
        if values is not None:
            yield from ((f"{group}/{name}", value) for name, value in values._asdict().items())


class Counters(NamedTuple):
    """What the loop knows beside the state, and needs again."""

    skipped: int = 0  # steps that updated nothing
    skipped_in_a_row: int = 0  # of these the last ones, because something was not finite
    val_loss: float | None = None  # the last one, nats per token
    validated: int = -1  # the step before which it was measured; -1: never
    sampled: int = -1  # the step before which the last sample was drawn
    drawn: int = 0  # random numbers that samples have taken; older checkpoints do not say


class Identity(NamedTuple):
    """What makes a run this run: with another one of these its checkpoint cannot be continued."""

    model: ModelConfig
    dtype: str  # fp32, bf16, fp16
    master_weights: bool
    rounding: str  # nearest, stochastic
    data: str | None  # fingerprint of the training data; None where there is none


def fingerprint(loader: Loader) -> str:
    """What tells training data apart, hexadecimal: each file's length, beginning and end, in their order."""
    digest = hashlib.sha256()
    for path in loader.paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(0, size - SAMPLED_BYTES))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def environment(device: hardware.Device, implementations: Mapping[str, str]) -> dict[str, Any]:
    """What the bits of a result may depend on. implementations: what runs each operation."""
    packages = {name: version for name, version in versions().items() if name != "python"}
    commit = git_state()
    packages["source"] = "released" if commit is None else commit["commit"][:12] + "+" * commit["modified"]
    place = {"platform": device.platform, "device": device.kind, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    if device.platform == "cpu":
        place["threads"] = str(device.cpu_cores)  # XLA splits sums among them
    else:
        packages |= _gpu_packages()
    return {**packages, **place, **{f"kernel of {name}": words for name, words in implementations.items()}}


def _gpu_packages() -> dict[str, str]:
    """The installed packages that compute on a GPU, CUDA's libraries among them, and their versions."""
    found = ((dist.metadata["Name"] or "", dist.version) for dist in importlib.metadata.distributions())
    return {name: version for name, version in sorted(found) if re.match(r"nvidia-|jax-cuda|triton", name)}


def make_facts(
    step: int,
    config: TrainConfig,
    identity: Identity,
    counters: Counters,
    *,
    total_steps: int,
    loader: dict[str, Any] | None,
    environment: Mapping[str, Any],
    val_data: str | None = None,
    origin: Mapping[str, Any] | None = None,
    resolved: kernels.Resolved | None = None,
) -> dict[str, Any]:
    """All that a checkpoint holds beside its arrays, as JSON can hold it.

    loader: its position; val_data: fingerprint of the validation data; origin: of its weights, or of the run that
    another program began, what must be kept to hand it back; resolved: what runs each operation.
    """
    return {
        "format": store.FORMAT,
        "step": step,
        "model": asdict(identity.model),
        "dtype": identity.dtype,
        "master_weights": identity.master_weights,
        "rounding": identity.rounding,
        "data": identity.data,
        "val_data": val_data,
        "options": config.to_json(),
        "total_steps": total_steps,
        "val_loss": counters.val_loss,
        "progress": counters._asdict(),
        "loader": loader,
        "environment": dict(environment),
        "kernels": record.to_json(resolved),
        "origin": {"kind": "llmc-jax"} if origin is None else dict(origin),
    }


# ----- which checkpoint -----------------------------------------------------------------------------------------------


class Earlier(NamedTuple):
    """A checkpoint to go on from."""

    folder: Path
    step: int
    facts: Mapping[str, Any]

    @property
    def model(self) -> ModelConfig:
        return stored_model(self.facts, self.folder)

    @property
    def counters(self) -> Counters:
        return stored_counters(self.facts, self.folder)


def stored_model(facts: Mapping[str, Any], folder: Path) -> ModelConfig:
    """The model's shape as a checkpoint has it. Raises FormatError if it is none."""
    shape = facts.get("model")
    names = set(ModelConfig.__dataclass_fields__)
    if not isinstance(shape, Mapping) or set(shape) != names or not all(type(each) is int for each in shape.values()):
        raise FormatError(f"{folder}: the facts hold no model shape; is this a checkpoint of llmc-jax?")
    return ModelConfig(**shape)


def stored_counters(facts: Mapping[str, Any], folder: Path) -> Counters:
    """The loop's counters as a checkpoint has them; those that it lacks (a converted one) begin anew."""
    found = facts.get("progress") or {}
    kinds = {"val_loss": (float, int, type(None))}
    for name, least in Counters()._asdict().items():
        value = found.get(name, least)
        sound = isinstance(value, kinds.get(name, (int,))) and not isinstance(value, bool)
        if not sound or (least is not None and value < least):
            raise FormatError(f"{folder}: the facts hold {name}={value!r}, which is no count")
    return Counters(**{name: found[name] for name in Counters._fields if name in found})


def find_earlier(config: TrainConfig, report: Callable[[str], None]) -> Earlier | None:
    """The checkpoint that -y 1 goes on from: the newest good one in -o; None where there is none at all.

    The run folder must be this process's alone: what a killed one left half-done in it is cleared away first, and
    DONE_ files that a copy lost are written again. report is told of each bad one. Raises InputError where there are
    checkpoints, but none is good, and where there are only models, which hold no training state.
    """
    run = Path(config.output_dir)
    if not config.reuse or not config.output_dir or not run.is_dir():
        return None
    store.clean(run)
    store.restore_done(run)
    good = store.newest_good(run, report)
    if good is not None:
        return Earlier(good.folder, good.step, store.read_facts(good.folder))
    if store.steps(run):
        raise InputError(
            f"-y 1: no checkpoint in {run} is good (`python -m llmc_jax.checkpoint verify {run}` lists what is wrong "
            "with each); to begin anew give another -o"
        )
    states = sorted(run.glob("state_*_*.bin"))
    if states:
        raise InputError(
            f"-y 1: {run} is a run of llm.c; `python convert_checkpoint.py convert {run} NEW --to state` makes a "
            "folder of it that -y 1 -o NEW continues"
        )
    models = [path for path in sorted(run.glob("model_*.bin")) if not store.state_folder(run, _step_of(path)).exists()]
    if models:
        raise InputError(
            f"-y 1: {run} holds models but no training state, so nothing can be continued; to start from the weights "
            f"give -e {models[-1]} and another -o"
        )
    if (run / MAIN_LOG).exists() and config_file(run) is None:
        raise InputError(f"-y 1: {run} holds the {MAIN_LOG} of another program, which would be lost; give another -o")
    return None


def _step_of(model: Path) -> int:
    digits = model.stem.removeprefix("model_")
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def open_checkpoint(name: str, report: Callable[[str], None]) -> Earlier:
    """The checkpoint that --init-from names: a state_%08d, or of a run's folder the newest good one."""
    folder = Path(name)
    if not folder.is_dir():
        raise InputError(f"--init-from {name}: no such folder; give the folder of a run, or a state_%08d in it")
    if (folder / store.MANIFEST).exists():
        problem = store.check(folder)
        if problem is not None:
            raise InputError(f"--init-from {folder}: {problem}; take another checkpoint")
        facts = store.read_facts(folder)
        return Earlier(folder, int(facts["step"]), facts)
    good = store.newest_good(folder, report)
    if good is None:
        raise InputError(
            f"--init-from {name}: there is no good checkpoint in it; `python -m llmc_jax.checkpoint verify {name}` "
            "lists what there is. An llm.c model file is given with -e"
        )
    return Earlier(good.folder, good.step, store.read_facts(good.folder))


# ----- which choice of kernels is repeated ---------------------------------------------------------------------------


class Repeat(NamedTuple):
    """A choice of kernels that was made before."""

    place: Path  # of the file or checkpoint that holds it
    resolved: kernels.Resolved


def repeated(config: TrainConfig, earlier: Earlier | None) -> Repeat | None:
    """Return the choice that a run takes instead of making one; None where there is none. Touches no device.

    It is that of --kernels-from, else with -y 1 that of the checkpoint it goes on from, or of the run's last start.
    Checkpoints of earlier versions hold none. Raises InputError, or FormatError for a file that is no choice.
    """
    if config.kernels_from:
        return _named_choice(config.kernels_from)
    if earlier is not None and (found := _choice_in(earlier.folder, earlier.facts)) is not None:
        return found
    path = Path(config.output_dir) / KERNELS
    if not config.reuse or not config.output_dir or not path.is_file():
        return None
    try:
        return _choice_of(path)
    except FormatError as error:
        raise FormatError(f"{error}; remove the file, and the kernels are chosen anew") from error


def _named_choice(name: str) -> Repeat:
    """The choice that --kernels-from names."""
    flag, path = f"--kernels-from {name}", Path(name)
    try:
        if path.is_file():
            return _choice_of(path)
        if (path / store.MANIFEST).exists():
            found = _choice_in(path, store.read_facts(path))
        else:
            found = _choice_of(path / KERNELS) if (path / KERNELS).is_file() else None
    except InputError as error:
        raise type(error)(f"{flag}: {error}") from error
    if found is None and path.is_dir():
        raise InputError(f"{flag}: holds no {KERNELS}; give the folder of a run, one of its checkpoints, or that file")
    if found is None:
        raise InputError(f"{flag}: no such file or folder")
    return found


def _choice_of(path: Path) -> Repeat:
    """The choice in a kernels.json."""
    return Repeat(path, record.from_json(read_kernels(path), str(path)))


def _choice_in(folder: Path, facts: Mapping[str, Any]) -> Repeat | None:
    """The choice in a checkpoint; None in one of an earlier version, or of another program."""
    found = facts.get("kernels")
    return None if found is None else Repeat(folder, record.from_json(found, str(folder)))


# ----- whether it fits ------------------------------------------------------------------------------------------------


def check_fits(earlier: Earlier, config: TrainConfig, identity: Identity) -> None:
    """Raises InputError with every difference that makes this another run than the one the checkpoint is of."""
    found = list(_differences(earlier.facts, config, identity))
    if found:
        first = f"-y 1: the checkpoint {earlier.folder} was made by another run than this:"
        advice = "give the flags of that run, or another -o; --init-from starts a new run from its weights"
        raise InputError("\n  ".join([first, *found, advice]))


def _differences(facts: Mapping[str, Any], config: TrainConfig, identity: Identity) -> Iterator[str]:
    """What differs in the model, the precision, the batch and the data, a line each."""
    shape = facts["model"]
    for name, ours in asdict(identity.model).items():
        if shape[name] != ours:
            yield f"model: {name} is {shape[name]} there, {ours} here"
    for name, words in (("dtype", "--dtype"), ("master_weights", "-w"), ("rounding", "--rounding")):
        theirs, ours = facts.get(name), getattr(identity, name)
        matters = name == "dtype" or identity.dtype != "fp32"
        if theirs is not None and theirs != ours and matters:
            yield f"precision: {words} is {show_value(theirs)} there, {show_value(ours)} here"
    options = facts.get("options") or {}
    theirs_of = _known(options)
    if theirs_of is not None:
        for name in BINDING:
            theirs, ours = getattr(theirs_of, name), getattr(config, name)
            if theirs != ours:
                yield f"batch and order: {_flag(name)} is {show_value(theirs)} there, {show_value(ours)} here"
        if (theirs_of.attention == "relu") != (config.attention == "relu"):
            yield f"model: --attention is {theirs_of.attention} there, {config.attention} here"
    if facts.get("data") is not None and identity.data is not None and facts["data"] != identity.data:
        yield "data: the training files (-i) are not those of the checkpoint"


def _known(options: Mapping[str, Any]) -> TrainConfig | None:
    """The options of a checkpoint; None where it has none. Those that this version does not know are left out."""
    names = {about.name for about in OPTIONS}
    known = {name: value for name, value in options.items() if name in names}
    return TrainConfig.from_json(known) if known else None


def _flag(name: str) -> str:
    flags = {about.name: about.flags[0] for about in OPTIONS}
    return flags.get(name, "-d")  # tokens_per_step is what -d comes to


def changes(
    earlier: Earlier,
    config: TrainConfig,
    total_steps: int,
    now: Mapping[str, Any],
    val_data: str | None = None,
    resolved: kernels.Resolved | None = None,
    problems: Sequence[str] = (),
) -> list[str]:
    """Notes on what makes the continuation differ from the run without a break: options, and the environment.

    resolved: what runs each operation now; problems: why it is not what ran before.
    """
    theirs = _known(earlier.facts.get("options") or {})
    notes = []
    if theirs is None:
        notes.append(f"the checkpoint comes from {earlier.facts['origin'].get('kind')}: its options are not known")
        return notes
    moved = [
        f"{about.flags[0]} {show_value(getattr(theirs, about.name))} -> {show_value(getattr(config, about.name))}"
        for about in OPTIONS
        if about.name not in FREE
        and about.name not in (*BINDING, "max_steps")
        and getattr(theirs, about.name) != getattr(config, about.name)
    ]
    planned = earlier.facts.get("total_steps")
    if planned != total_steps:
        moved.append(f"steps {planned} -> {total_steps}")
    if moved:
        notes.append(f"changed since the checkpoint, so another run from here: {', '.join(moved)}")
    val_then = earlier.facts.get("val_data")
    if None not in (val_then, val_data) and val_then != val_data:
        notes.append("the validation data is not that of the checkpoint: losses before and after do not compare")
    then = earlier.facts.get("environment") or {}
    other = [
        f"{name} {then.get(name)} -> {now.get(name)}" for name in {**then, **now} if then.get(name) != now.get(name)
    ]
    before = _choice_in(earlier.folder, earlier.facts)
    if before is not None and resolved is not None:
        other += record.differences(before.resolved, resolved)
    if other or problems:
        notes.append(f"not bit-exact from here: {', '.join([*other, *problems])}")
    return notes


# ----- the state out of it --------------------------------------------------------------------------------------------


def read_weights(earlier: Earlier) -> np.ndarray:
    """The parameters alone as a flat buffer (flat_size,) float32: the master weights where there are any."""
    return _flat(earlier, "params").astype(np.float32)


def _flat(earlier: Earlier, buffer: str) -> np.ndarray:
    """A buffer of TrainState (flat_size,) with its padding, from the stored tensors."""
    model = earlier.model
    flat: np.ndarray | None = None
    for spec in tensor_specs(model):
        values = store.read_array(earlier.folder, f"{buffer}/{spec.name}")
        if values.shape != spec.shape:
            raise FormatError(
                f"{earlier.folder}: {buffer}/{spec.name} has the shape {values.shape}; the model's has {spec.shape}"
            )
        if flat is None:
            flat = np.zeros(flat_size(model), values.dtype)
        flat[spec.offset : spec.offset + spec.size] = values.reshape(-1)
    assert flat is not None
    return flat


def read_state(earlier: Earlier, fresh: TrainState) -> TrainState:
    """The stored state on the device.

    fresh: a state of the run with buffers of one element. It says which buffers and dtypes the run has, and what begins
    anew where a converted checkpoint lacks it (loss scale, outliers).
    Raises FormatError if the checkpoint holds no such state.
    """
    stored = store.array_specs(earlier.folder)
    buffers = [name for name in BUFFERS if getattr(fresh, name) is not None]
    wanted = ["step", "updates", *(f"{buffer}/{name}" for buffer in buffers for name in Params._fields)]
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise FormatError(f"{earlier.folder}: holds no {missing[0]} ({len(missing)} arrays of the state are missing)")

    def checked(name: str, value: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> jax.Array:
        if (value.shape, value.dtype) != (shape, dtype):
            found, expected = f"{value.dtype}{value.shape}", f"{dtype}{shape}"
            raise FormatError(f"{earlier.folder}: {name} is {found}; this run has {expected}")
        return jnp.array(value)

    def small(name: str, like: jax.Array) -> jax.Array:
        return checked(name, store.read_array(earlier.folder, name), like.dtype, like.shape)

    def group(name: str) -> Any:
        like = getattr(fresh, name)
        if like is None or any(f"{name}/{field}" not in stored for field in like._fields):
            return like
        return type(like)(*(small(f"{name}/{field}", value) for field, value in like._asdict().items()))

    size = (flat_size(earlier.model),)
    flat = {name: checked(name, _flat(earlier, name), getattr(fresh, name).dtype, size) for name in buffers}
    return fresh._replace(
        **flat,
        step=small("step", fresh.step),
        updates=small("updates", fresh.updates),
        loss_scale=group("loss_scale"),
        outliers=group("outliers"),
    )

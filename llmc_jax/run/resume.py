"""Continuing a run: which checkpoint, which choice of kernels is repeated, whether it fits the run, and what changed.

Leaves out what a checkpoint contains (checkpoint/contents.py), the state out of it (weights.py), and when one
is made (saver.py, loop.py).
"""

import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_jax import cluster
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import FormatError, InputError, naming
from llmc_jax.base.files import quoted, read_json_object
from llmc_jax.base.options import show_value
from llmc_jax.base.own_file import kept_copy
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import Identity, Metadata
from llmc_jax.checkpoint.manifest import MANIFEST
from llmc_jax.checkpoint.store import Checkpoint, open_checkpoint
from llmc_jax.cluster.agreement import of_first
from llmc_jax.config.train import AUTO_BATCH, BY_NAME, OPTIONS, TrainConfig, differing
from llmc_jax.kernels import record
from llmc_jax.logs.files import KERNELS, LARGEST, MAIN_LOG, METRICS, config_file
from llmc_jax.logs.state import read_state
from llmc_jax.machine.device import Device, git_state, versions
from llmc_jax.plan.plan import Plan, Repeat, parallel_of

# ----- which checkpoint -----------------------------------------------------------------------------------------------


def find_earlier(config: TrainConfig, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint that -y 1 resumes from: the newest good one in -o; None where there is none at all.

    The run folder must be this run's alone: what a killed process left half-done in it is cleared away first, and DONE_
    files that a copy lost are written again. report is told of each bad one. Several processes each read a share of a
    checkpoint to find out whether it is good. Raises InputError where there are checkpoints, but none is good, and
    where there are only models, which hold no training state.
    """
    if not config.reuse or not config.output_dir:
        return None

    def in_order() -> str | None:
        run = Path(config.output_dir)
        if not run.is_dir():
            return None
        store.clean(run)
        store.restore_done(run)
        return str(run if cluster.here().size == 1 else run.absolute())

    folder = of_first("folder of -y 1", in_order)
    if folder is None:
        return None
    run = Path(folder)
    good = _newest_good(run, report)
    if good is not None:
        if cluster.here().rank == 0 and config_file(run) is not None and read_state(run).started is None:
            report(f"{run / METRICS}: has no start of the run: it was cut, and what was logged before that is lost")
        return open_checkpoint(good)
    of_first("no checkpoint", lambda: _refuse_without(run))
    return None


def _newest_good(run: Path, report: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a run folder that is good, in each of the processes that share the reading."""
    for step in reversed(of_first("steps", lambda: store.steps(run))):
        problem = store.entry(run, step, share=(cluster.here().rank, cluster.here().size)).problem
        problems = [each for each in cluster.here().meet(f"checkpoint {step}", problem) if each is not None]
        if not problems:
            return store.state_folder(run, step)
        report(f"{store.state_folder(run, step)}: {problems[0]}")
    return None


def _refuse_without(run: Path) -> None:
    """Raise InputError where a run folder without a good checkpoint holds what would be lost, or what is no run."""
    if store.steps(run):
        raise InputError(
            f"-y 1: no checkpoint in {run} is good (`{typed('checkpoint')} verify {quoted(run)}` lists "
            "what is wrong with each); to start over, give another -o"
        )
    if models := sorted(run.glob("model_*.bin")):
        raise InputError(
            f"-y 1: {run} holds models but no training state of ours, so nothing can be continued; to start from the "
            f"weights give -e {quoted(models[-1])} and another -o; to continue a run of llm.c first `python "
            f"convert_checkpoint.py convert {quoted(run)} NEW --to state`"
        )
    if (run / MAIN_LOG).exists() and config_file(run) is None:
        raise InputError(f"-y 1: {run} holds the {MAIN_LOG} of another program, which would be lost; give another -o")


# ----- which choice of kernels is repeated ---------------------------------------------------------------------------


def repeated(config: TrainConfig, earlier: Checkpoint | None) -> Repeat | None:
    """Return the choice that a run takes instead of making one; None where there is none. Touches no device.

    It is that of --kernels-from, else with -y 1 that of the checkpoint it resumes from, or of the run's last start.
    Checkpoints of earlier versions hold none. Raises InputError, or FormatError for a file that is no choice.
    """
    if config.kernels_from:
        with naming("--kernels-from"):
            return _named_choice(Path(config.kernels_from))
    if earlier is not None and (found := _choice_in(earlier)) is not None:
        return found
    path = Path(config.output_dir) / KERNELS
    if not config.reuse or not config.output_dir or not path.is_file():
        return None
    try:
        return _choice_of(path)
    except FormatError as error:
        raise FormatError(f"{error}; remove the file, and the kernels are chosen again") from error


def _named_choice(path: Path) -> Repeat:
    """Return the choice that --kernels-from names."""
    file = path if path.is_file() else path / KERNELS
    if (path / MANIFEST).exists():
        found = _choice_in(open_checkpoint(path))
    else:
        found = _choice_of(file) if file.is_file() else None
    if found is None:
        raise InputError(f"{path}: has no {KERNELS}; give the folder of a run, one of its checkpoints, or that file")
    return found


def _choice_of(path: Path) -> Repeat:
    """Return the choice in a kernels.json."""
    return Repeat(path, record.from_json(read_json_object(path, LARGEST), str(path)))


def _choice_in(checkpoint: Checkpoint) -> Repeat | None:
    """Return the choice in a checkpoint; None in one of an earlier version, or of another program."""
    found, folder = checkpoint.metadata.kernels, checkpoint.folder
    return None if found is None else Repeat(folder, record.from_json(found, str(folder)))


# ----- whether it fits ------------------------------------------------------------------------------------------------


def with_batch_of(earlier: Checkpoint | None, config: TrainConfig) -> TrainConfig:
    """Return the configuration with the -b of the checkpoint it resumes from, where it is to be auto: others have
    other bits. One of another program may not say it.
    """
    options = None if earlier is None or config.batch_size != AUTO_BATCH else _known(earlier.metadata.options)
    return config if options is None else replace(config, batch_size=options.batch_size)


def check_fits(earlier: Checkpoint, config: TrainConfig, identity: Identity) -> None:
    """Raise InputError with every difference that makes this another run than the one the checkpoint is of.

    An -x below the steps that the run has made is refused too.
    """
    if 0 < config.max_steps < earlier.step:
        made = f"the run has made {earlier.step} steps already"
        raise InputError(f"-x {config.max_steps}: {made}; give a larger -x, or another -o")
    found = list(_differences(earlier, config, identity))
    if found:
        first = f"-y 1: the checkpoint {earlier.folder} was made by a different run:"
        advice = "give the flags of that run, or another -o; --init-from starts a new run from its weights"
        raise InputError("\n  ".join([first, *found, advice]))


def _differences(earlier: Checkpoint, config: TrainConfig, ours: Identity) -> Iterator[str]:
    """Yield what differs in the model, the precision, the batch and the data, a line each."""
    theirs = earlier.metadata.identity
    then, now = vars(theirs.model), vars(ours.model)
    for name in dict.fromkeys((*then, *now)):
        if then.get(name) != now.get(name) and not (name == "source" and config.model_changed):
            there, here = (getattr(each.get(name), "words", each.get(name)) for each in (then, now))
            yield f"model: {name} is {there} there, {here} here"
    for name, words in (("dtype", "--dtype"), ("master_weights", "-w"), ("rounding", "--rounding")):
        then, now = getattr(theirs, name), getattr(ours, name)
        matters = name == "dtype" or ours.dtype != "fp32"
        if then is not None and then != now and matters:
            yield f"precision: {words} is {show_value(then)} there, {show_value(now)} here"
    if theirs.optimizer != ours.optimizer:
        copy = earlier.folder.parent / kept_copy(theirs.optimizer.rpartition("@")[2], "optimizer")
        advice = f"; give the run's copy: --optimizer {quoted(copy)}" if copy.is_file() else ""
        yield f"optimizer: --optimizer is {theirs.optimizer} there, {ours.optimizer} here{advice}"
    options = _known(earlier.metadata.options)
    if options is None and config.find_lr:
        yield "range test: none was made there"
    if options is not None:
        unused = set() if options.find_lr or config.find_lr else {"find_lr_range", "find_lr_steps"}
        names = ("tokens_per_step", *(about.name for about in OPTIONS if about.resume == "must match"))
        for name in (each for each in names if each not in unused):
            then, now = getattr(options, name), getattr(config, name)
            if then != now:
                counts = parallel_of(options).devices, parallel_of(config).devices
                there, here = (f", on {n} devices" if len(set(counts)) > 1 else "" for n in counts)
                found = f"{show_value(then)} there{there}, {show_value(now)} here{here}"
                # tokens_per_step is what -d resolves to
                flag, advice = (BY_NAME[name].flags[0], "") if name in BY_NAME else ("-d", f"; give -d {then}")
                yield f"batch and order: {flag} is {found}{advice}"
    if None not in (theirs.data, ours.data) and theirs.data != ours.data:
        yield "data: the training files (-i) are not those of the checkpoint"


def _known(options: Mapping[str, Any]) -> TrainConfig | None:
    """Return the options of a checkpoint; None where it has none. Those this version does not know are left out."""
    known = {name: value for name, value in options.items() if name in BY_NAME}
    return TrainConfig.from_json(known) if known else None


# ----- what changed ---------------------------------------------------------------------------------------------------


def environment(device: Device, implementations: Mapping[str, str]) -> dict[str, Any]:
    """Return what the bits of a result may depend on. implementations: what runs each operation."""
    packages = {name: version for name, version in versions().items() if name != "python"}
    commit = git_state()
    packages["source"] = "released" if commit is None else commit["commit"][:12] + "+" * commit["modified"]
    place = {"platform": device.platform, "device": device.kind, "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    if device.platform == "cpu":
        place["threads"] = os.environ.get("NPROC", str(device.cpu_cores))  # XLA splits sums among them
    else:
        # what computes on a GPU, CUDA's libraries among it
        found = ((dist.metadata["Name"] or "", dist.version) for dist in importlib.metadata.distributions())
        packages |= {name: version for name, version in sorted(found) if re.match(r"nvidia-|jax-cuda|triton", name)}
    return {**packages, **place, **{f"kernel of {name}": words for name, words in implementations.items()}}


def changes(earlier: Checkpoint, plan: Plan, now: Metadata) -> list[str]:
    """Return notes on what makes the continuation differ from the run without a break: options, and the environment.

    plan, now: of the continuation.
    """
    metadata, notes = earlier.metadata, []
    if metadata.identity.model.source != plan.model.source:
        notes.append(f"changed since the checkpoint, so results differ from here: {plan.config.model_file}")
    theirs = _known(metadata.options)
    if theirs is None:
        notes.append(f"the checkpoint comes from {metadata.origin.get('kind')}: its options are not known")
        return notes
    moved = [words for about, words in differing(theirs, plan.config) if about.resume == "said"]
    if metadata.total_steps != now.total_steps:
        moved.append(f"steps {metadata.total_steps} -> {now.total_steps}")
    if moved:
        notes.append(f"changed since the checkpoint, so results differ from here: {', '.join(moved)}")
    if None not in (metadata.val_data, now.val_data) and metadata.val_data != now.val_data:
        notes.append("the validation data is not that of the checkpoint: losses before and after are not comparable")
    then, here = metadata.environment, now.environment
    other = [
        f"{name} {then.get(name)} -> {here.get(name)}" for name in {**then, **here} if then.get(name) != here.get(name)
    ]
    choice = _choice_in(earlier)
    if choice is not None:
        other += record.differences(choice.resolved, plan.resolved)
    if not plan.config.kernels_from:  # of which another note tells
        other += plan.problems
    before, after = parallel_of(theirs), plan.parallel
    pairs = (("devices", before.devices, after.devices), ("ZeRO stage", before.stage, after.stage))
    spread = [f"{name} {one} -> {another}" for name, one, another in pairs if one != another]
    # a GPU's products of weights that were gathered are other programs than those of the whole flat buffer
    alike = plan.machine.platform == "cpu" or before.splits == after.splits
    if spread and alike and after.fixed and theirs.reduction == plan.config.reduction:
        notes.append(f"{', '.join(spread)}: the same bits, by --reduction fixed")
    else:
        other += spread
    if other:
        notes.append(f"not bit-exact from here: {', '.join(other)}")
    return notes

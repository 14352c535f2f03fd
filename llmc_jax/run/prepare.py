"""Before a run: everything that can be known beforehand is checked, the data opened, the parameters put on the device.

Writes nothing, so that a run that cannot begin leaves nothing behind; with -y 1 it clears away what a killed process
left half-written, and writes the DONE_ files of checkpoints that lost them. Leaves out the run itself (loop.py).
"""

import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import cluster, kernels
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.checkpoint import sources
from llmc_jax.checkpoint.arrays import require_orbax
from llmc_jax.checkpoint.contents import OURS, Counters, Identity, Metadata, fingerprint
from llmc_jax.checkpoint.llmc import warnings_of
from llmc_jax.checkpoint.source import Source
from llmc_jax.checkpoint.state import read_state
from llmc_jax.checkpoint.store import Checkpoint
from llmc_jax.cluster.agreement import alike, of_first
from llmc_jax.cluster.launchers import devices_asked
from llmc_jax.config.checks import check_model_fit, notes_on_devices, with_devices
from llmc_jax.config.find_lr import of_test
from llmc_jax.config.flags import models_not_asked_for
from llmc_jax.config.model import ModelConfig, described, parse_descriptor, where_published
from llmc_jax.config.train import AUTO_BATCH, BY_NAME, TrainConfig
from llmc_jax.data import tables
from llmc_jax.data.corpora import Corpus, stdlib_corpus
from llmc_jax.data.items import Item, check_fit
from llmc_jax.data.loader import TokenLoader, continued, of_processes
from llmc_jax.data.tasks import read_items
from llmc_jax.data.tokenizers import Choice
from llmc_jax.kernels import record
from llmc_jax.kernels.plain import to_json
from llmc_jax.logs.files import MAIN_LOG
from llmc_jax.machine import compiling, jax_setup
from llmc_jax.machine.device import Device, describe_device, devices_of
from llmc_jax.machine.nvml import GpuMonitor, open_monitor
from llmc_jax.models.gpt2.init import random_parameters
from llmc_jax.plan.fits import check_fits as check_memory
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, Repeat, make_plan, triton_gemm_wish
from llmc_jax.plan.search import limit_of
from llmc_jax.run import fitting, resume
from llmc_jax.run.early import stops_early
from llmc_jax.run.fitting import Fitted
from llmc_jax.run.processes import Own, connect, first_exchange, introduced
from llmc_jax.run.resume import (
    changes,
    check_fits,
    environment,
    find_earlier,
    find_named,
    naming,
    repeated,
)
from llmc_jax.run.tokenizer import choose as choose_tokenizer
from llmc_jax.run.trackers import require_trackers
from llmc_jax.training.parallel.placement import Placement, placement
from llmc_jax.training.state import DTYPES, TrainState, initial_state
from llmc_jax.trials import candidates, start
from llmc_jax.trials.card import find_card

CHECKED_TOKENS = 1 << 20  # of each data set, before the run begins: takes a tenth of a second


class Model(NamedTuple):
    """What `-e` names, or --init-from."""

    config: ModelConfig
    source: Source | None  # of the weights; None: random ones, or those of the checkpoint that the run goes on from

    @property
    def path(self) -> Path | None:
        """Return the path of another program's checkpoint, if the weights come from one."""
        return None if self.source is None or self.source.kind == "state" else self.source.path


class Data(NamedTuple):
    """What `-i` and `-j` name; None where the run does not read it (no steps, no validation)."""

    train: TokenLoader | None
    val: TokenLoader | None
    corpus: Corpus | None  # the built-in one, if it is that

    @property
    def loaders(self) -> list[TokenLoader]:
        """Return those that there are, that of training first."""
        return [loader for loader in (self.train, self.val) if loader is not None]


class Setup(NamedTuple):
    """A run that can begin."""

    plan: Plan
    name: str
    weights: Path | None  # another program's checkpoint that they come from
    place: Placement  # of its arrays
    data: Data
    questions: Sequence[Item]  # of HellaSwag; none: it is not evaluated
    steps: int
    val_batches: int  # of one validation
    tokenizer: Choice
    device: Device
    fitted: Fitted | None  # how -b auto came to its number
    asked: TrainConfig  # the configuration before devices were counted, and before --find-lr did without some of it
    earlier: Checkpoint | None  # the checkpoint that the run goes on from
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


def resolve_model(
    config: TrainConfig, earlier: Checkpoint | None = None, report: Callable[[str], None] = lambda line: None
) -> Model:
    """Return the model's shape, from a descriptor or from what holds its weights; reads none of them.

    earlier: what is continued; if -e says what it said then, the file that it named need not be there any more. A shape
    that -e describes beside --init-from must be that of the weights. report is told of bad checkpoints passed over.
    """
    if earlier is not None and _names_nothing_new(config.model, earlier):
        return Model(earlier.metadata.identity.model, None)
    if config.init_from:
        source = _open_weights("--init-from", config.init_from, config, report)
        return Model(_checked_shape(config, source.config), source)
    name = config.model
    if not name.endswith(".bin") and "/" not in name and (described(name) or not Path(name).exists()):
        return Model(parse_descriptor(name), None)
    if not Path(name).exists():
        raise InputError(_not_there(config))
    source = _open_weights("-e", name, config, report)
    return Model(source.config, source)


def _not_there(config: TrainConfig) -> str:
    """Return what to say of a model that is no file. Nobody asked for the default one: something was forgotten."""
    name, default = config.model, config.model == TrainConfig().model
    if default and config.reuse and config.output_dir:
        return f"-y 1 -o {config.output_dir}: there is no run with a checkpoint; check the path, or begin one with -e"
    shapes = "a shape such as d12 for random weights" + "; --preset demo beside other flags trains the demo" * default
    files = "no such file; give the path of an llm.c checkpoint or of a folder of Hugging Face's"
    return f"-e {name}: {where_published(name) or f'{files}, or {shapes}'}"


def _open_weights(flag: str, name: str, config: TrainConfig, report: Callable[[str], None]) -> Source:
    """Open what a flag names: a model of llm.c or Hugging Face, or with --init-from a checkpoint of ours.

    Raises InputError, with advice, for any other.
    """
    path = Path(name)
    with naming(flag):
        if path.is_file() and sources.is_pytorch(path):
            words = shlex.join([name, str(path.with_suffix(".bin"))])
            raise InputError(
                f"{name}: a file of PyTorch, as nanoGPT writes; `python convert_checkpoint.py convert {words}` makes a "
                "file of it that -e takes"
            )
        if not path.is_file() and not (path.is_dir() and sources.is_hugging_face(path)):
            if flag == "--init-from":
                return find_named(path, report)
            if path.is_dir() and ((path / MAIN_LOG).exists() or not (path / "config.json").exists()):
                raise InputError(
                    f"{name}: is a folder; name the checkpoint in it, such as {path / 'model_00000100.bin'}, or with "
                    "--init-from the folder of a run of this program"
                )
        return sources.open_source(path, v2_order=config.v2_order)


def _names_nothing_new(name: str, earlier: Checkpoint) -> bool:
    """Return whether -e need not be looked at: as it was then, a default, or a file that is not there any more."""
    is_file = name.endswith(".bin") or "/" in name
    said_then = earlier.metadata.options.get("model") == name
    return said_then or (is_file and (name in models_not_asked_for() or not Path(name).exists()))


def _checked_shape(config: TrainConfig, shape: ModelConfig) -> ModelConfig:
    """Return the shape of the checkpoint that --init-from names. Raises InputError if -e asks for another model."""
    name = config.model
    if name.endswith(".bin") or "/" in name:
        if name not in models_not_asked_for():
            raise InputError(f"-e {name} and --init-from {config.init_from} both name weights; leave one of them out")
    elif parse_descriptor(name) != shape:
        raise InputError(f"-e {name}: the checkpoint that --init-from names has another shape, {shape}; leave -e out")
    return shape


def open_data(config: TrainConfig, model: ModelConfig) -> Data:
    """Open the loaders that the run needs. With -a both read the validation data, unshuffled, as llm.c has it."""
    train_name, train_flag = (config.val_data, "-j") if config.overfit else (config.train_data, "-i")
    needs_train, needs_val = config.max_steps != 0, config.val_every > 0
    named = [name for name, needed in ((train_name, needs_train), (config.val_data, needs_val)) if needed]
    corpus = stdlib_corpus() if "stdlib" in named else None

    def loader(name: str, flag: str, shuffle: bool) -> TokenLoader:
        if name == "stdlib":
            assert corpus is not None
            paths: Any = [corpus.train if flag == "-i" else corpus.val]
        else:
            paths = name
        B, T, n = config.batch_size, config.sequence_length, config.reading_processes
        with naming(flag):
            opened = TokenLoader(
                paths, B, T, vocab_size=model.vocab_size, shuffle=shuffle, flag=flag, seed=config.seed,
                process_rank=0 if n == 1 else None, num_processes=n,
            )  # fmt: skip
            check_tokens(opened)
        return opened

    shuffle = config.shuffle == "llmc" and not config.overfit
    return Data(
        train=loader(train_name, train_flag, shuffle) if needs_train else None,
        val=loader(config.val_data, "-j", False) if needs_val else None,
        corpus=corpus,
    )


def most_rows(data: Data) -> int:
    """Return the rows in the smallest file, more than which no batch may have. data: opened for batches of one row."""
    return min((min(each.samples_per_shard) for each in (data.train, data.val) if each is not None), default=1)


def check_tokens(loader: TokenLoader) -> None:
    """Read some batches and go back: ids that the model does not know end the run before it begins, if they are many,
    or the data is small. The loader checks the rest as it is read.
    """
    start = loader.state()
    at_once = loader.num_processes
    batch_tokens = loader.batch_size * loader.sequence_length
    batches = min(loader.batches_per_epoch, max(1, CHECKED_TOKENS // batch_tokens))
    for _ in range(-(-batches // at_once)):
        loader.next_batch(at_once)
    loader.restore(start)


def total_steps(config: TrainConfig, train: TokenLoader | None) -> int:
    """Return the steps of the run: as asked, or one epoch, as llm.c counts it."""
    if train is None or config.max_steps >= 0:
        return config.max_steps
    steps = train.num_tokens // config.tokens_per_step
    if steps == 0:
        raise InputError(
            f"-d {config.tokens_per_step}: one update takes more tokens than the training data holds "
            f"({train.num_tokens}); lower -d, give more data, or say how many steps to make with -x"
        )
    return steps


def validation_batches(config: TrainConfig, val: TokenLoader | None) -> int:
    """Return the batches of one validation as llm.c counts them: beyond the last the loader begins at the first again.

    Each of n processes reads -m of them; -1 is the number of tokens over n * B * T. A shard's last token is only a
    target, so this can be one batch more than there are.
    """
    if val is None:
        return 0
    n = val.num_processes
    return n * (val.num_tokens // (n * config.micro_batch_tokens) if config.val_batches == -1 else config.val_batches)


class Here(NamedTuple):
    """A run planned on this machine."""

    plan: Plan
    device: Device
    fitted: Fitted | None  # how -b auto came to its number
    notes: tuple[str, ...]


class Planning(NamedTuple):
    """All that a run's plan is made from on this machine, but its -b."""

    config: TrainConfig
    model: ModelConfig
    earlier: Checkpoint | None
    tried: kernels.Findings  # process 0's alone
    memory: int | None  # of one device, bytes: the least that any process has; None: not known

    def by_itself(self, size: int) -> Plan:
        """Return this process's own plan with a -b."""
        return self._with(size, repeated(self.config, self.earlier))

    def of_all(self, size: int) -> Plan:
        """Return the plan with a -b that all processes have: the first one chooses the kernels."""
        if cluster.here().size == 1:
            return self.by_itself(size)
        first = self.by_itself(size) if cluster.here().rank == 0 else None
        resolved = of_first(f"kernels of -b {size}", lambda: first and to_json(first.resolved))
        return first or self._with(size, Repeat(Path("process 0"), record.from_json(resolved, "process 0")))

    def _with(self, size: int, before: Repeat | None) -> Plan:
        return make_plan(
            replace(self.config, batch_size=size), self.model, kernels.this_machine(), findings=self.tried,
            before=before, memory=self.memory, xla_flags=compiling.user_flags(),
        )  # fmt: skip


def plan_here(
    config: TrainConfig,
    model: ModelConfig,
    earlier: Checkpoint | None = None,
    own: Own | None = None,
    most_rows: int = 0,
) -> Here:
    """Plan a run on this machine, its kernels tried before where need be, and -b auto found out.

    Of several processes the first one chooses for all, and the least of their memory counts, so that all run the same
    program. Call it before JAX has a device. most_rows: the largest -b that auto may come to. Raises InputError as
    `make_plan` does, for an earlier choice that is damaged, and where the memory is too small.
    """
    tried = try_kernels(config, model, earlier, most_rows) if cluster.here().rank == 0 else kernels.Findings()
    connect(own)
    device = describe_device()
    # JAX may have been told to see fewer
    config = with_devices(config, device.local_devices, device.platform, cluster.here().size)
    # the devices that a CPU pretends to have share its memory, those of several processes too
    sharing = config.devices // cluster.here().size * cluster.here().local_size if device.platform == "cpu" else 1
    memory = least(cluster.here().meet("memory", device.memory_bytes and device.memory_bytes // sharing))
    planning = Planning(config, model, earlier, tried, memory)
    if config.batch_size == AUTO_BATCH:
        fitted = largest_batch(planning, device.platform, most_rows)
        return Here(fitted.plan, device, fitted, tried.notes)
    plan = planning.of_all(config.batch_size)
    check_memory(plan)
    return Here(plan, device, None, tried.notes)


def largest_batch(planning: Planning, platform: str, most_rows: int) -> Fitted:
    """Return what -b auto comes to. Raises InputError where nothing fits, or nothing says what there is."""
    if planning.memory is None:
        raise InputError("-b auto: nothing says how much memory the device has; give -b a number")
    sizes = fitting.sizes_up_to(most_rows, planning.config)
    found = of_first("estimates", lambda: fitting.estimates(sizes, planning.by_itself))
    return fitting.largest(
        [fitting.Tried(*each) for each in found], limit_of(platform, planning.memory), planning.of_all,
        fitting.compiled_bytes,
    )  # fmt: skip


def least(numbers: list[int | None]) -> int | None:
    """Return the least of some numbers; None where one is not known."""
    known = [number for number in numbers if number is not None]
    return min(known) if len(known) == len(numbers) else None


def try_kernels(
    config: TrainConfig, model: ModelConfig, earlier: Checkpoint | None = None, most_rows: int = 0
) -> kernels.Findings:
    """Return what is known of this GPU's kernels, found out now if need be. Call it before JAX has a device.

    Nothing where there is no NVIDIA GPU, where the run takes an earlier choice and all of it can run, or with
    --no-kernel-check. With -b auto they are tried with the largest number up to most_rows that fits by estimate:
    compiling, which decides it, takes the GPU.
    """
    here = None if config.no_kernel_check or earlier is not None else find_card()
    if here is None:
        return kernels.Findings()
    flags = compiling.user_flags()
    if config.batch_size == AUTO_BATCH:
        limit = limit_of("gpu", int(jax_setup.MEMORY_SHARE * here.memory))
        config = replace(config, batch_size=first_guess(config, model, here.machine, limit, most_rows))
    plan = make_plan(config, model, here.machine, before=repeated(config, None), xla_flags=flags)
    if plan.repeat is not None and not plan.problems:
        return kernels.Findings()
    return start.find_out(case_of(make_plan(config, model, here.machine, xla_flags=flags)), here)


def first_guess(config: TrainConfig, model: ModelConfig, machine: kernels.Machine, limit: int, most: int) -> int:
    """Return the largest -b that fits by estimate, or the smallest there is."""
    flags = compiling.user_flags()

    def needs(size: int) -> int:
        return computed(make_plan(replace(config, batch_size=size), model, machine, xla_flags=flags)).program

    sizes = fitting.sizes_up_to(most, config)
    return next((size for size in sizes if needs(size) <= limit), sizes[-1])


def case_of(plan: Plan) -> candidates.Case:
    """Return a run as the trials of its kernels see it."""
    config = plan.config
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
        gelu_fusion=plan.execution.gelu_fusion,
        options=compiling.of_one_device(plan.execution.compiler_options),  # which it is tried on
        asked=kernels.Asked(config.kernels, config.attention, config.gelu_fusion),
        machine=plan.machine,
        other_options=compiling.untried(triton_gemm_wish(config), plan.machine.target, plan.xla_flags),
    )


def first_state(parameters: np.ndarray, plan: Plan, place: Placement | None = None) -> TrainState:
    """Return the state before the first step, on the device; or where place says, on several.

    parameters (flat_size,) float32 on the host.
    """
    start = jax.jit(initial_state, static_argnames=("dtype", "master_weights"), donate_argnums=0)
    scale = float(plan.config.loss_scale) if plan.dtype == "fp16" else None
    alone = place is None or place.mesh is None
    small = jnp.array(parameters if alone else parameters[:1])
    found = start(small, DTYPES[plan.dtype], master_weights=plan.master_weights, loss_scale=scale)
    if place is None or alone:
        return found

    def flat(name: str) -> np.ndarray | None:
        return parameters.astype(found.flat[name].dtype) if name in ("params", "copy") else None

    return place.state(found, flat)


def available_devices(own: Own | None) -> tuple[int, str]:
    """Return how many devices JAX has in this process, and their platform. Of NVIDIA's it asks the driver, not JAX.

    own: those that it takes, as one of several processes.
    """
    if own is not None:
        return own.devices, own.platform
    if (card := find_card()) is not None:
        return card.gpus, card.machine.platform
    device = describe_device()
    return device.num_devices, device.platform


def prepare(config: TrainConfig, notes: list[str]) -> tuple[Setup, TrainState]:
    """Check everything that can be known before the run, and put the parameters on the device.

    Raises InputError for whatever cannot be used.
    """
    warnings: list[str] = []
    asked, config = config, of_test(config)
    if config.save or config.checkpoint_every:
        require_orbax()
    require_trackers(config)
    own = introduced(config)
    earlier = find_earlier(config, warnings.append)
    with alike("files"):
        model = resolve_model(config, earlier, warnings.append)
        notes = [*notes, *check_model_fit(config, model.config)]
        config = resume.with_batch_of(earlier, config)
        config = with_devices(
            replace(config, devices=devices_asked(config)), *available_devices(own), cluster.here().size
        )
        data = open_data(replace(config, batch_size=max(1, config.batch_size)), model.config)
        tokenizer, doubts = tokenizer_of(config, model, data, earlier)
        questions, missing = open_questions(config, model.config, tokenizer)
        notes += missing
    digests = {
        sha256 for sha256 in cluster.here().meet("tokenizer", tokenizer.named and tokenizer.named.sha256) if sha256
    }
    if len(digests) > 1:
        raise InputError("the processes found unlike tokenizers beside the data or the model; give all the same files")
    drawing = drawn_beside(config, model) if earlier is None and model.source is None else None
    here = plan_here(config, model.config, earlier, own, most_rows(data))
    plan, device, config = here.plan, here.device, here.plan.config
    place = placement(model.config, plan.parallel, devices_of(plan.parallel.devices))
    first_exchange(place)
    with alike("state"):
        if here.fitted is not None:
            data = open_data(config, model.config)
        metadata = begun_metadata(plan, data, device, origin_of(earlier, model))
        if earlier is not None:
            check_fits(earlier, config, metadata.identity)
        steps = total_steps(config, data.train)
        state, found = starting_state(plan, place, earlier, model, drawing)
        data = continued_data(config, earlier, data)
        setup = Setup(
            plan=plan,
            name=config.preset or (model.path.stem if model.path else config.model),
            weights=model.path,
            place=place,
            data=data,
            questions=questions,
            steps=steps,
            val_batches=validation_batches(config, data.val),
            tokenizer=tokenizer,
            device=device,
            fitted=here.fitted,
            asked=asked,
            earlier=earlier,
            metadata=replace(metadata, total_steps=steps, tokenizer=tokenizer.named),
            monitor=open_monitor() if config.gpu_info_every > 0 and cluster.here().rank == 0 else None,
            notes=notes,
            warnings=[*warnings, *found, *doubts],
        )
    setup.notes.extend([*notes_on_start(setup), *here.notes, *plan.notes_on_bits])
    if tokenizer.tokenizer is not None and tokenizer.tokenizer.vocab_size < model.config.vocab_size:
        setup.notes.append(f"tokenizer {tokenizer.note}: the other rows are padding, which no sample draws")
    return setup, state


def tokenizer_of(config: TrainConfig, model: Model, data: Data, earlier: Checkpoint | None) -> tuple[Choice, list[str]]:
    """Return the tokenizer of a run, as its checkpoints name it, and warnings."""
    source = model.source if earlier is None else sources.open_source(earlier.folder)
    as_before = earlier is not None and earlier.metadata.options.get("tokenizer") == config.tokenizer
    found, doubts = choose_tokenizer(
        config.tokenizer, model.config.vocab_size, data.loaders, data.corpus, source, as_before=as_before
    )
    if found.tokenizer is not None:
        return found._replace(named=found.named or tables.named(found.tokenizer)), doubts
    if found.named is None and not config.sample_every:
        return found, doubts
    return found, [*doubts, f"samples are printed as token ids: {found.note}"]


def open_questions(config: TrainConfig, model: ModelConfig, tokenizer: Choice) -> tuple[Sequence[Item], list[str]]:
    """Return HellaSwag's questions, none if the run does not evaluate it, and notes.

    Where llm.c's file is not there, the run goes on without, as llm.c's does. Raises InputError for any other file that
    is not there, and for one that does not fit the model or T.
    """
    path = Path(config.hellaswag_file)
    if not config.hellaswag or config.val_every == 0:
        return (), []
    if config.hellaswag_file == BY_NAME["hellaswag_file"].default and not path.exists():
        made = f"`{typed('data')} hellaswag` makes it, --hellaswag-file names another"
        return (), [f"-h 1: there is no {path}, so HellaSwag is not evaluated; {made}"]
    with naming("--hellaswag-file"):
        questions = read_items("hellaswag", path, tokenizer.tokenizer, vocab_size=model.vocab_size)
        check_fit(questions, config.sequence_length, str(path))
    return questions, []


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


def continued_data(config: TrainConfig, earlier: Checkpoint | None, data: Data) -> Data:
    """Return the data as read by the processes that began the run, its training part where a checkpoint left it."""
    if earlier is None or data.train is None or config.overfit or earlier.metadata.loader is None:
        return data
    with naming("-i"):
        train, val = continued(data.train, earlier.metadata.loader, config.micro_batches), data.val
    if val is not None and config.batch_order == "llmc":
        with naming("-j"):
            val = of_processes(val, train.num_processes)
    return data._replace(train=train, val=val)


def notes_on_start(setup: Setup) -> Iterator[str]:
    """Say what the run begins with, and how it differs from the one that it goes on from."""
    config, plan, earlier = setup.config, setup.plan, setup.earlier
    yield from notes_on_devices(config)
    if earlier is not None:
        complete = "; the run is complete already" if earlier.step >= setup.steps else ""
        if not complete and stops_early(config, earlier.metadata.counters or Counters()):
            complete = "; it has stopped early, and goes on only with a larger --patience"
        yield f"resumed from {earlier.folder}, after step {earlier.step} of {setup.steps}{complete}"
        yield from changes(earlier, plan, setup.metadata)
    elif config.reuse and config.output_dir:
        yield f"-y 1: there is no checkpoint in {config.output_dir}, so the run begins"
    if earlier is None or config.kernels_from:  # else `changes` has said it
        yield from plan.notes_on_repeat


def origin_of(earlier: Checkpoint | None, model: Model) -> Mapping[str, Any]:
    """Return the origin that the run's checkpoints hold: that of the checkpoint it goes on from, or its own.

    Its own keeps the ids that begin and end a text, where it is known of the weights.
    """
    if earlier is not None:
        return earlier.metadata.origin
    special = model.source and model.source.special
    return {**OURS, **({} if special is None else {"special": special._asdict()})}


def drawn_beside(config: TrainConfig, model: Model) -> "Future[np.ndarray]":
    """Begin to draw the random weights in a thread, while the device is started and the kernels are tried."""
    drawing: Future[np.ndarray] = Future()

    def draw() -> None:
        try:
            drawing.set_result(random_parameters(model.config, config.seed))
        except BaseException as error:
            drawing.set_exception(error)

    threading.Thread(target=draw, name="random weights", daemon=True).start()  # if the run cannot begin, nobody waits
    return drawing


def starting_state(
    plan: Plan, place: Placement, earlier: Checkpoint | None, model: Model, drawing: "Future[np.ndarray] | None"
) -> tuple[TrainState, tuple[str, ...]]:
    """Return the state that the run begins with, on the devices, and warnings about what it was read from.

    drawing: the random weights, of a run that begins with such.
    """
    config, source = plan.config, model.source
    if earlier is not None:
        return read_state(earlier, first_state(np.zeros(1, np.float32), plan), place.state), ()
    if drawing is not None:
        return first_state(drawing.result(), plan, place), ()
    assert source is not None
    flag = "--init-from" if config.init_from else "-e"
    with naming(flag):
        flat = sources.flat_parameters(source)
    warnings = (*source.warnings, *warnings_of(flat, source.config))
    return first_state(flat, plan, place), tuple(f"{flag} {source.path}: {warning}" for warning in warnings)

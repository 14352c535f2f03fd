"""The beginning of a run: its folder is locked or made, its logs, its screen and its saver are opened.

Leaves out what is decided before anything is written (prepare.py).
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TextIO, cast

from llmc_jax import cluster
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import refusing, sync, write_atomic
from llmc_jax.base.own_file import kept_copy
from llmc_jax.base.streams import Output
from llmc_jax.base.text import wrapped
from llmc_jax.cluster.agreement import of_all, of_first
from llmc_jax.config.train import TrainConfig
from llmc_jax.data import tables
from llmc_jax.logs.files import config_file, rank_log
from llmc_jax.logs.state import own_process
from llmc_jax.machine.algorithms import path_of
from llmc_jax.machine.gpus import peak_flops
from llmc_jax.models.family import family_of, shape_to_json
from llmc_jax.models.layout import num_parameters
from llmc_jax.models.work import flops_per_token
from llmc_jax.plan.compiled import arguments
from llmc_jax.plan.plan import Plan
from llmc_jax.run import programs
from llmc_jax.run.beside import Beside
from llmc_jax.run.console import Console
from llmc_jax.run.figures import utilization_text
from llmc_jax.run.folder import (
    LockedFolder,
    RunLog,
    ShortLog,
    config_record,
    create_run_folder,
    cut_logs,
    entered,
    leaving_nothing,
    locked,
    write_config,
)
from llmc_jax.run.processes import Votes
from llmc_jax.run.programs import Programs
from llmc_jax.run.saver import Saver
from llmc_jax.run.state import Run, Setup, first_step
from llmc_jax.run.stopping import stop_on_signals
from llmc_jax.run.table import table
from llmc_jax.run.trackers import Trackers
from llmc_jax.trials.known import run_programs


@contextmanager
def opened(setup: Setup, output: Output, request: threading.Event, held: LockedFolder | None = None) -> Iterator[Run]:
    """Make the run folder, open what is written there and the screen, and say how the run begins.

    request: is set by what asks the run to stop. held: the folder, if it was there before and this process has locked
    it. Of several processes the first one makes and locks the folder, and has the screen, the logs and the picture.
    """
    config, group, baseline = setup.config, cluster.here(), baseline_of(setup)
    folder, made = of_first_folder(setup, held)
    baselines = {} if baseline is None else {"bigram baseline": baseline}
    with ExitStack() as closing:
        if held is None and group.rank == 0:
            held = closing.enter_context(locked(folder))
        check_shared(folder, held, made)
        held = held or closing.enter_context(entered(folder))
        log = closing.enter_context(short_log(setup, held) if group.rank else begun_log(setup, held, made))
        trackers = closing.enter_context(Trackers(config, folder, group.rank, start=log.begun))
        console = closing.enter_context(new_console(setup, output))
        beside = Beside(
            folder, setup.name, baselines, config.report_every, console.warning, held.is_there, writing=group.rank == 0
        )
        closing.callback(beside.close)
        closing.enter_context(stop_on_signals(request, console.note))
        if not held.guarded:
            console.warning(f"{folder}: the file system has no locks, so nothing keeps another run out of this folder")
        announce(setup, folder, console, log)
        group.folder(str(folder), str(rank_log(folder, group.rank)))
        if setup.monitor is not None:
            closing.callback(setup.monitor.close)
        kept = kept_programs(setup, folder)
        if not kept.complete and setup.earlier is not None:
            console.warning("not bit-exact from here: compiled programs of this run are missing or damaged")

        def sync() -> None:
            log.sync()
            kept.seal()

        def leave_programs() -> None:
            with suppress(OSError):  # then the next run compiles again
                kept.seal()

        closing.callback(leave_programs)
        saver = Saver(
            folder, setup.model, config.keep_checkpoints, config.major_every,
            export=config.export_llmc, sync=sync, place=setup.place, check=held.check,
        )  # fmt: skip
        closing.callback(saver.close)
        votes = Votes(setup.place, request)
        yield Run(setup, held, log, console, beside, saver, votes, trackers, kept)


def of_first_folder(setup: Setup, held: LockedFolder | None) -> tuple[Path, list[Path]]:
    """Return the run's folder, which process 0 makes, and the folders that were made for it, the innermost first."""
    config, group = setup.config, cluster.here()
    made: list[Path] = []

    def folder() -> str:
        if held is not None:
            held.check()
        reuse = config.reuse and held is not None
        found, new = create_run_folder(config.output_dir, setup.name, reuse=reuse)
        made.extend(new)
        return str(found if group.size == 1 else found.absolute())

    return Path(of_first("folder", folder)), made


def check_shared(folder: Path, held: LockedFolder | None, made: list[Path]) -> None:
    """Raise Agreed where a process does not see what process 0, which holds the folder, has written into it."""
    if cluster.here().size == 1:
        return
    with ExitStack() as probing:
        mine = ""
        if held is not None:
            probing.enter_context(leaving_nothing(held, made))
            file = probing.enter_context(NamedTemporaryFile(dir=held.folder, prefix=".probe.", suffix=".tmp"))
            sync(held.folder)
            mine = Path(file.name).name
        name = of_first("probe", lambda: mine)

        def see() -> None:
            if not (folder / name).is_file():
                raise InputError(
                    f"-o {folder}: what rank 0 writes there is not seen here; give an -o on a file system that all "
                    "hosts share"
                )

        of_all("probe seen", see)


def short_log(setup: Setup, held: LockedFolder) -> RunLog:
    """Return the log of a process other than the first, its first event written."""
    group, step = cluster.here(), first_step(setup)
    log = ShortLog(held.folder, group.rank, check=held.check)
    kind = "start" if setup.earlier is None else "resume"
    log.event(kind, step=step, rank=group.rank, host=group.hosts[group.rank], pid=os.getpid())
    return log


def kept_programs(setup: Setup, folder: Path) -> Programs:
    """Keep compiled programs in the run's folder, on a GPU; return where. Process 0 looks what is there already."""
    if not programs.are_kept(setup.device.platform):
        return Programs()
    group, plan, own = cluster.here(), setup.plan, folder / programs.FOLDER
    found = Programs()

    def looked() -> tuple[str, bool]:
        nonlocal found
        arrays = setup.place.described(arguments(plan))
        found = programs.keep(own, programs.shared_of(plan, arrays, setup.metadata.environment))
        return ("" if found.shared is None else found.shared.name), found.complete

    name, complete = of_first("programs", looked)
    if group.rank and name:
        programs.take(own)
        return Programs(own, run_programs() / name, complete, seals=False)
    return found


def begun_log(setup: Setup, held: LockedFolder, made: list[Path]) -> RunLog:
    """Write the configuration, cut the logs back to where the run begins, open them and write the first event.

    The configuration is config.json and kernels.json. Where something fails, nothing of it stays: neither files, nor
    the folders in `made`, and an earlier configuration is as it was. So is that of a run which is only evaluated
    (-x 0): what goes on later takes its options from there.
    """
    config, shape = setup.config, setup.model
    kind, step = ("start", 0) if setup.earlier is None else ("resume", setup.earlier.step)
    with leaving_nothing(held, made):
        # the number of devices as it was asked for, where 0 is all that there are at the next start too; -b auto found,
        # and the run's own copy of a file of algorithms
        options = setup.asked.to_json() | {"batch_size": config.batch_size, "algorithms": config.algorithms}
        used = {**setup.device._asdict(), "used": setup.plan.parallel.devices}
        fitted = {} if setup.fitted is None else {"batch_size": setup.fitted.to_json()}
        table = {} if setup.metadata.tokenizer is None else {"tokenizer": setup.metadata.tokenizer._asdict()}
        record = config_record(options, shape_to_json(shape), used) | table | fitted
        kernels = setup.metadata.kernels
        is_first = config_file(held.folder) is None
        if is_first:  # before any log: what has a log but no config.json is another program's folder
            write_config(held.folder, record, kernels)
        if config.reuse:  # else the folder was empty
            earlier = setup.earlier
            cut_logs(held.folder, *((None,) if earlier is None else (earlier.step, earlier.metadata.counters)))
        with ExitStack() as closing:
            log = closing.enter_context(RunLog(held.folder, check=held.check))
            counts = {
                "steps": setup.steps,
                "parameters": num_parameters(shape),
                "tokens_per_step": config.tokens_per_step,
                "bigram_nats": baseline_of(setup),
            }
            facts = {"rank": 0, **own_process(), **utilization_facts(setup)}
            log.event(kind, step=step, **counts, **facts, config=record)
            if not is_first and config.max_steps != 0:
                write_config(held.folder, record, kernels)
            if is_first or config.max_steps != 0:
                with refusing(
                    f"{held.folder}: cannot keep the tokenizer, or a file of yours", "free space, or choose another -o"
                ):
                    tables.keep(held.folder, setup.tokenizer.tokenizer)
                    keep_own_files(held.folder, setup.plan)
            closing.pop_all()
            return log


def keep_own_files(folder: Path, plan: Plan) -> None:
    """Write copies of the user's files: of the model's family and the optimizer, as they were loaded; of algorithms."""
    for what, found in (("model", family_of(plan.model)), ("optimizer", plan.optimizer)):
        if found.source:
            write_atomic(folder / kept_copy(found.source, what), found.content)
    if name := plan.config.algorithms:
        write_atomic(folder / name, path_of(name).read_bytes())


@contextmanager
def lock_of(config: TrainConfig) -> Iterator[LockedFolder | None]:
    """Hold the lock of a run folder that is there already, within the block. Yield it, or None where there is none.

    Of several processes the first one has it.
    """
    folder = Path(config.output_dir)
    there = cluster.here().rank == 0 and config.output_dir and folder.is_dir()
    with locked(folder) if there else nullcontext() as held:
        yield held


def announce(setup: Setup, folder: Path, console: Console, log: RunLog) -> None:
    """Show the start-up table, and what the user should know about this run."""
    console.table(table(setup, folder))
    if cluster.here().rank and setup.warnings:  # it has no screen
        log.event("warnings", step=0, words=setup.warnings)
    for note in setup.notes:
        console.note(note)
    for warning in setup.warnings:
        console.warning(warning)
    if (corpus := setup.data.corpus) is not None:
        console.note(wrapped(f"{corpus.description}; fingerprint {corpus.fingerprint}"))
    if (baseline := baseline_of(setup)) is not None:
        console.note(f"bigram baseline: {baseline:.3f} nats (each byte guessed from the one before)")


def baseline_of(setup: Setup) -> float | None:
    """Return the validation loss of guessing each byte from the one before, where the data's maker reckoned it."""
    corpus = setup.data.corpus
    return None if corpus is None or setup.config.val_data != "stdlib" else corpus.bigram_nats


def utilization_facts(setup: Setup) -> dict[str, Any]:
    """Return what tells how well a run uses its devices, at a speed: FLOPs per token; the FLOP/s of all devices, where
    known; and the precision of the matrix products, whose peak it is.
    """
    precision = setup.plan.product_precision
    of_one = None if setup.device.platform == "cpu" else peak_flops(setup.device.kind, precision)
    peak = None if of_one is None else of_one * setup.plan.parallel.devices
    per_token = flops_per_token(setup.model, setup.config.sequence_length)
    return {"flops_per_token": per_token, "peak_flops": peak, "precision": precision}


def new_console(setup: Setup, output: Output) -> Console:
    """Return the screen of the run; after a resume the first step from there has its line."""
    config, screen = setup.config, cast(TextIO, output)
    per_token, peak, precision = utilization_facts(setup).values()
    return Console(
        setup.steps, config.print_every, screen, first_step=first_step(setup),
        utilization=lambda tokens_per_second: utilization_text(per_token * tokens_per_second, peak, precision),
        scores=bool(config.skip_loss_z or config.skip_norm_z),
    )  # fmt: skip

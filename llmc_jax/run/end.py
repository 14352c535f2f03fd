"""The end of a run: the last checkpoint, the last event and picture, and what the user is told."""

from collections.abc import Iterator

from llmc_jax import cluster
from llmc_jax.base.commands import typed
from llmc_jax.base.errors import ExitCode, InputError
from llmc_jax.base.files import quoted
from llmc_jax.checkpoint import store
from llmc_jax.checkpoint.contents import stops_early
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.config.model import foresees
from llmc_jax.config.train import OPTIMIZERS, TrainConfig
from llmc_jax.logs.files import CURVES, REPORT
from llmc_jax.run import find_lr
from llmc_jax.run.due import Batches, poll_saves, save, tell_removed
from llmc_jax.run.state import Outcome, Progress, Run, diverged
from llmc_jax.run.trackers import ended_trackers


def exit_code(run: Run, progress: Progress) -> ExitCode:
    """Return how a run that broke nowhere has ended."""
    if diverged(run.setup.config, progress):
        return ExitCode.DIVERGED
    return ExitCode.STOPPED if run.stop.is_set() else ExitCode.DONE


def last_save(run: Run, outcome: Outcome, batches: Batches) -> Outcome:
    """Save the checkpoint of the end and wait for all saves; where one fails here, the run has failed."""
    code, progress, problem = outcome
    group = cluster.here()
    group.phase("save", progress.step)
    try:
        if group.size > 1:  # so that all know of each save how it ended
            progress = poll_saves(run, progress, run.saver.wait(), last=not run.setup.config.saves_at_end)
        if run.setup.config.saves_at_end and (progress.step > 0 or run.setup.steps == 0):
            # The checkpoints from before a divergence may be what the user goes back to.
            progress = save(run, progress, batches, None, last=True, prune=code != ExitCode.DIVERGED)
        progress = poll_saves(run, progress, run.saver.wait(), last=True)
        if code == ExitCode.DONE:
            tell_removed(run, *run.saver.prune(least=1))
    except InputError as error:
        if group.size > 1 and not isinstance(error, Agreed):  # the others go on to what this one would not come to
            raise
        return Outcome(ExitCode.BAD_INPUT, progress, problem or error)
    return Outcome(code, progress, problem)


def finish(run: Run, outcome: Outcome) -> Outcome:
    """Write the last event and the last picture, and say where everything is."""
    code, progress, problem = outcome
    try:
        if code == ExitCode.DONE and ended_early(run, progress):
            config, counters = run.setup.config, progress.counters
            figures = {"best_loss": counters.best_loss, "best_step": counters.best_step, "stale": counters.stale}
            limits = {"patience": config.patience, "delta": config.patience_delta, "steps": run.setup.steps}
            run.log.event("early_stop", step=progress.step, **figures, **limits)
        if code == ExitCode.DONE and run.setup.config.find_lr:
            run.log.event("find_lr", step=progress.step, **find_lr.figures(run.setup.config, progress.test))
            if cluster.here().rank == 0:
                run.held.check()
                find_lr.write_found(run.setup.config, progress.test, run.held.folder)
        run.log.event("end", step=progress.step, outcome=code.name.lower(), skipped=progress.counters.skipped)
    except InputError as error:
        outcome = Outcome(ExitCode.BAD_INPUT, progress, problem or error)
    trackers = ended_trackers(run.trackers, progress.step, run.log, run.console)
    run.console.doing("drawing the last picture")
    run.beside.finish()
    run.console.doing("")
    run.console.close()
    for line in [*summary(run, outcome), *trackers]:
        run.console.note(line)
    return outcome


def summary(run: Run, outcome: Outcome) -> Iterator[str]:
    """Yield the last lines on the screen: how it went, where everything is, and how to try the model."""
    config, (code, progress, _) = run.setup.config, outcome
    timed = progress.step - progress.begun_at - 1
    if timed > 0:
        yield f"total average iteration time: {1e3 * progress.seconds / timed:.6f} ms"
    if progress.counters.skipped:
        yield f"skipped:      {progress.counters.skipped} steps updated nothing (not finite, or an outlier)"
    if code == ExitCode.DONE and ended_early(run, progress):
        yield early_words(run, progress)
    elif code == ExitCode.DONE and config.find_lr:
        yield from find_lr.words_on_test(config, progress.test, progress.read)
    elif progress.step < run.setup.steps:
        elsewhere = run.stop.is_set() and not run.votes.request.is_set()
        why = ", because another process was asked to stop" if elsewhere else ""
        yield f"stopped:      after {progress.step} of {run.setup.steps} steps{why}"
    if code == ExitCode.DIVERGED:
        yield from divergence_advice(config, progress)
    if run.held.is_there():
        yield from best_words(run, progress)
        yield from places(run, outcome)
        if progress.saved is not None and code != ExitCode.DIVERGED and not foresees(run.setup.model):
            prompt = "--prompt 'def read' --temperature 0.8" if run.setup.data.corpus else "--interactive"
            yield f"generate:     {typed('generate')} {quoted(run.held.folder)}{model_flag(run.setup.config)} {prompt}"


def places(run: Run, outcome: Outcome) -> Iterator[str]:
    """Yield where everything is, and the command that resumes the run."""
    config, (code, progress, _) = run.setup.config, outcome
    yield f"run folder:   {run.held.folder}"
    picture = run.held.folder / (find_lr.PICTURE if config.find_lr else CURVES)
    if picture.exists():
        yield f"picture:      {picture}"
    if REPORT in run.beside.written:
        yield f"report:       {run.held.folder / REPORT}"
    if progress.saved is not None:
        yield f"checkpoint:   {progress.saved}"
    goes_on = progress.saved is not None or (config.save and progress.step == 0)
    if progress.step < run.setup.steps and code != ExitCode.DIVERGED and goes_on and not progress.test.exploded:
        own = "" if config.optimizer in OPTIMIZERS else f" --optimizer {quoted(config.optimizer)}"
        more = f" --patience {2 * config.patience}" if code == ExitCode.DONE else ""
        yield f"resume with:  {typed('train')} -y 1 -o {quoted(run.held.folder)}{model_flag(config)}{own}{more}"


def model_flag(config: TrainConfig) -> str:
    """Return the flag that names the model's file, a space before it; empty where there is none."""
    return f" --model {quoted(config.model_file)}" if config.model_file else ""


def ended_early(run: Run, progress: Progress) -> bool:
    """Return whether a run that is done made fewer steps than planned, because its validation loss fell no more."""
    return progress.step < run.setup.steps and stops_early(run.setup.config, progress.counters)


def early_words(run: Run, progress: Progress) -> str:
    """Return the line on an early stop."""
    delta, made = run.setup.config.patience_delta, f"after {progress.step} of {run.setup.steps} steps"
    more = f" of more than {delta:g} nats" if delta else ""
    return f"early stop:   {made}: {progress.counters.stale} validations in a row without an improvement{more}"


def best_words(run: Run, progress: Progress) -> Iterator[str]:
    """Yield the lowest validation loss, and a checkpoint that has it, where --patience looks for it."""
    counters = progress.counters
    if run.setup.config.patience == 0 or counters.best_loss is None or cluster.here().rank:
        return
    good = (each for each in store.entries(run.held.folder, deep=False) if each.problem is None)
    found = next((each.folder for each in good if each.val_loss == counters.best_loss), None)
    place = "" if found is None else f", checkpoint: {found}"
    yield f"best loss:    {counters.best_loss:.6f} at step {counters.best_step}{place}"


def divergence_advice(config: TrainConfig, progress: Progress) -> Iterator[str]:
    """Yield what to try after a run that diverged."""
    yield f"diverged:     the loss or the gradient was not finite {progress.counters.skipped_in_a_row} times in a row"
    if progress.counters.skipped == progress.step:
        yield f"try:          other weights (-e {config.model}): no step was finite"
    else:
        yield f"try:          a lower -l (it was {config.learning_rate:g}), or an earlier checkpoint (-n)"

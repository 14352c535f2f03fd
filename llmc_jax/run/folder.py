"""The run folder: main.log in llm.c's format, metrics.jsonl, samples.txt, config.json and kernels.json.

Every line is one unbuffered write, so the files are complete up to the last event whatever ends the run.
Leaves out what is shown on the screen (console.py), the picture (beside.py) and the checkpoints.
"""

import errno
import itertools
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import complete_file, leads_to, reason, refusing, sync, try_lock, write_atomic
from llmc_jax.base.options import without_credentials
from llmc_jax.base.plain import to_json
from llmc_jax.checkpoint.contents import Counters
from llmc_jax.data.tables import IN_RUN
from llmc_jax.logs.files import (
    CONFIG,
    KERNELS,
    MAIN_LOG,
    METRICS,
    SAMPLES,
    event_in,
    rank_log,
    read_bytes,
)
from llmc_jax.machine.device import environment, git_state, versions
from llmc_jax.run.figures import StepFigures


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def create_run_folder(output_dir: str, name: str, reuse: bool) -> tuple[Path, list[Path]]:
    """Return the folder of a run, made if need be, and the folders that were made for it, the innermost first.

    output_dir: as given with -o; empty for a new runs/<date>-<time>-<name>, which no other run has.
    name: a few words on the run (the model's descriptor); reuse: -y 1, an existing folder may hold a run already.
    Raises InputError if the folder holds files and reuse is off, if a file is in the way, or if it cannot be written;
    folders that it made are removed then.
    """
    folder = Path(output_dir or "runs")
    made = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not output_dir:
            folder = _new_folder(folder, name)
            made.insert(0, folder)
        for each in made or [folder]:
            with suppress(PermissionError):  # a folder that may be entered but not listed cannot be synced
                sync(each.parent)  # the names of all folders too are on the disk before a checkpoint counts
        if output_dir and not reuse and os.listdir(folder):
            raise InputError(f"-o {output_dir}: the folder is not empty; choose another -o, or -y 1 to continue in it")
        with tempfile.TemporaryFile(dir=folder, prefix=".probe.", suffix=".tmp"):  # no name at all on most systems
            pass  # the only portable way to learn whether files can be made here
    except OSError as error:
        _remove_empty(made)
        problem = f"cannot write to the folder ({error.strerror})"
        if isinstance(error, FileExistsError | NotADirectoryError):
            problem = "a file is in the way of the folder"
        raise InputError(f"-o {output_dir or 'runs'}: {problem}; choose another -o") from error
    return folder, made


def _new_folder(parent: Path, name: str) -> Path:
    """Make a new folder <date>-<time>-<name>; a number is appended while another run of the same second has it."""
    words = re.sub(r"[^A-Za-z0-9._]+", "-", name)[:60].strip("-.") or "run"
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"
    for attempt in itertools.count(1):
        folder = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        with suppress(FileExistsError):
            folder.mkdir()  # atomic: of two runs one succeeds
            break
    return folder


class LockedFolder(NamedTuple):
    """A run folder that this process holds open, and locked, or another process of the run has locked."""

    folder: Path
    descriptor: int
    guarded: bool = True  # False: the file system has no locks, so nothing keeps other runs out

    def is_there(self) -> bool:
        """Return whether the folder's path still leads to it."""
        return leads_to(self.folder, self.descriptor)

    def check(self) -> None:
        """Raise InputError if the folder was moved or removed, or another one is in its place."""
        if not self.is_there():
            raise InputError(
                f"{self.folder}: is no longer the folder that this run started in, so nothing more is written to it"
            )


@contextmanager
def locked(folder: Path) -> Iterator[LockedFolder]:
    """Within the block no other process of ours trains in the folder. Raises InputError if one does already.

    The lock is the system's and dies with the process, however that ends. A file system may have none.
    """
    with entered(folder) as held:
        with refusing(f"-o {folder}: cannot be locked", "choose another -o"):
            taken = try_lock(held.descriptor)
        if taken is False:
            raise InputError(
                f"-o {folder}: another process is training in this folder; stop that one, or choose another -o"
            )
        held.check()  # it may have been replaced while the lock was being taken
        yield held._replace(guarded=taken is True)


@contextmanager
def entered(folder: Path) -> Iterator[LockedFolder]:
    """Hold a run folder open within the block. Raises InputError where it cannot be opened."""
    with refusing(f"-o {folder}: cannot be opened", "choose another -o"):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield LockedFolder(folder, descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def leaving_nothing(held: LockedFolder, made: Iterable[Path]) -> Iterator[None]:
    """Remove, if the block ends with an error, the files of a run that it made, and the folders in `made`, if empty.

    What was there before stays, and a folder that is no longer the run's is not touched.
    """
    before = set(os.listdir(held.folder))
    try:
        yield
    except BaseException:
        if held.is_there():
            files = {CONFIG, KERNELS, MAIN_LOG, METRICS, SAMPLES, *IN_RUN.values()}
            for name in files - before:
                with suppress(OSError):
                    (held.folder / name).unlink(missing_ok=True)
            _remove_empty(made)
        raise


def cut_logs(folder: Path, step: int | None, counters: Counters | None = None) -> None:
    """Drop from main.log, metrics.jsonl and samples.txt what lies beyond the point where a run continues.

    step: that point, None to drop everything; counters: say what was done at it, before its update, and stays. Each
    file has either its old or its new content, whatever happens. Lines that cannot be understood stay. Raises
    InputError if a file cannot be read or written.
    """
    done = counters or Counters()
    at_step = {"train": -1, "val": done.validated, "sample": done.sampled, "eval": done.evaluated}

    def stays(kind: str, of: int) -> bool:
        return step is not None and (of < step or (of == step == at_step.get(kind, step)))

    _rewrite(folder / MAIN_LOG, _main_log_step, stays)
    events = _rewrite(folder / METRICS, _event_step, stays)
    if events is not None and (folder / SAMPLES).exists():
        samples = [json.loads(line) for line in events if _event_step(line)[0] == "sample"]
        texts = (_sample_text(e["step"], e["text"], e["tokens"]) for e in samples if {"text", "tokens"} <= e.keys())
        write_atomic(folder / SAMPLES, "".join(texts).encode(errors="replace"))


def _rewrite(
    path: Path, what: Callable[[bytes], tuple[str, int]], stays: Callable[[str, int], bool]
) -> list[bytes] | None:
    """Keep some lines of a file, and never its torn last one; return them, None where there is no file.

    what: gives the kind and the step of a line, ("", 0) of one that is not understood; stays: is asked of both.
    """
    if not os.path.isfile(path):
        return None
    before = read_bytes(path)
    *lines, _torn = before.split(b"\n")
    lines = [line for line in lines if stays(*what(line))]
    after = b"".join(line + b"\n" for line in lines)
    if after != before:
        write_atomic(path, after)
    return lines


def _main_log_step(line: bytes) -> tuple[str, int]:
    """Return what a line of main.log tells, and of which step: ("train", 3)."""
    match = re.match(rb"s:(\d{1,18}) (trl|tel|eval):", line)
    if match is None:
        return "", 0
    return {b"trl": "train", b"tel": "val", b"eval": "eval"}[match[2]], int(match[1])


def _event_step(line: bytes) -> tuple[str, int]:
    """Return the kind and the step of an event. A GPU's figures come after their step."""
    event = event_in(line)
    if event is None or not isinstance(event.get("step"), int):
        return "", 0
    return ("train" if event["event"] == "gpu" else event["event"]), event["step"]


def _sample_text(step: int, text: str, tokens: int) -> str:
    return f"step {step}, {tokens} tokens\n---\n{text}\n---\n"


class RunLog:
    """The open files of one run. Steps are counted from 0, as llm.c counts them in its main.log.

    Every method writes at once, unbuffered, and raises InputError, naming the file, when that fails (a full disk), and
    when the file or the folder is no longer where it was opened.
    """

    def __init__(self, folder: Path, *, check: Callable[[], None] = lambda: None) -> None:
        """Open the folder's files, to append to them. check: raises InputError where the folder is another one."""
        self._check = check
        self._files = {name: _opened(folder / name) for name in (MAIN_LOG, METRICS, SAMPLES)}
        self.begun = os.fstat(self._files[METRICS].fileno()).st_size  # where this start's first event is to stand

    def train(self, figures: StepFigures) -> None:
        """Write one training step; figures that only some runs have go into metrics.jsonl alone."""
        self._write(MAIN_LOG, f"s:{figures.step} trl:{figures.loss:.4f} lr:{figures.lr:.6f} norm:{figures.norm:.2f}\n")
        self.event("train", **figures.known())

    def val(self, step: int, *, loss: float, batches: int) -> None:
        """Write the mean validation loss before step `step`, over a number of batches."""
        self._write(MAIN_LOG, f"s:{step} tel:{loss:.4f}\n")
        self.event("val", step=step, loss=loss, batches=batches)

    def accuracy(self, step: int, *, items: int, correct: int, correct_norm: int) -> None:
        """Write how many of HellaSwag's questions were right before step `step`: by the sum of a completion's losses,
        and (norm) by their mean per token, which is llm.c's figure.
        """
        counts = {"items": items, "correct": correct, "correct_norm": correct_norm}
        shares = {"accuracy": correct / items, "accuracy_norm": correct_norm / items}
        self._write(MAIN_LOG, f"s:{step} eval:{shares['accuracy_norm']:.4f}\n")
        self.event("eval", step=step, **counts, **shares)

    def sample(self, step: int, text: str, tokens: int) -> None:
        """Write a sample drawn before step `step`: its text and how many tokens it has."""
        self._write(SAMPLES, _sample_text(step, text, tokens))
        self.event("sample", step=step, tokens=tokens, text=text)

    def event(self, kind: str, **fields: Any) -> None:
        """Write any other event (start, end, checkpoint, stop …) as one line of metrics.jsonl.

        Its last field is the time, in seconds since 1970.
        """
        timed = to_json({"event": kind, **fields, "time": round(time.time(), 3)})
        self._write(METRICS, json.dumps(timed, allow_nan=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        """Append whole lines to a file; what this returned from has left the process."""
        self._check()
        file = self._files[name]
        if not leads_to(file.name, file.fileno()):
            raise InputError(f"{file.name}: is no longer the file that this run writes")
        data = memoryview(text.encode(errors="replace"))
        before = os.fstat(file.fileno()).st_size
        try:
            while data:
                data = data[file.write(data) :]
        except OSError as error:
            with suppress(OSError):  # no half line, which the next event would be glued to
                file.truncate(before)
            raise InputError(f"{file.name}: cannot write to it: {error.strerror}") from error

    def sync(self) -> None:
        """Bring what was written to the disk; what is no regular file (main.log as a link to /dev/null) has none."""
        self._check()
        for file in self._files.values():
            try:
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise InputError(f"{file.name}: cannot write to it: {error.strerror}") from error

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class ShortLog(RunLog):
    """The log of a process of a run other than the first: events that are not of a step alone."""

    def __init__(self, folder: Path, rank: int, *, check: Callable[[], None] = lambda: None) -> None:
        """Open the process's own file, to append to it. check: as `RunLog` has it."""
        self._check, self.begun = check, 0
        self._files = {METRICS: _opened(rank_log(folder, rank))}

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Write nothing: process 0 does."""

    train = val = accuracy = sample = _nothing


def _opened(path: Path) -> FileIO:
    """Open a file to append to it; a pipe that nobody reads is an error, where it would else wait."""
    with refusing(f"{path}: cannot open it for writing"):
        file = open(path, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    os.set_blocking(file.fileno(), True)
    return file


# ----- the configuration ----------------------------------------------------------------------------------------------


def config_record(options: Mapping[str, Any], model: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a start is told and finds: config.json holds it, and so does its event in metrics.jsonl.

    options: every setting of the run; model: the model's shape; device: what it runs on (`Device._asdict()`).
    """
    return {
        "options": options,
        "model": model,
        "device": device,
        "versions": versions(),
        "git": git_state(),
        "platform": platform.platform(),
        "environment": environment(),
        "command_line": without_credentials(shlex.join([sys.executable, *sys.argv])),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_config(folder: Path, record: Mapping[str, Any], kernels: Mapping[str, Any] | None = None) -> None:
    """Write config.json, which at any moment is that of the last start or of the one before, and so kernels.json.

    They come before every other file: what has a log but no config.json is another program's folder. Neither gets its
    name before both are written. kernels: the choice of kernels as JSON can hold it. Raises InputError.
    """
    contents = {folder / CONFIG: record} | ({} if kernels is None else {folder / KERNELS: kernels})
    path = folder / CONFIG
    try:
        with ExitStack() as complete:  # the last one written gets its name first
            for path, each in contents.items():
                words = json.dumps(to_json(each), indent=2, allow_nan=False) + "\n"
                complete.enter_context(complete_file(path)).write_bytes(words.encode())
    except OSError as error:
        raise InputError(f"{path}: cannot write it: {reason(error)}") from error

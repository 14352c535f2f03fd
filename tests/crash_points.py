"""The file operations of a run, one by one: where it may be killed, lose its power, or meet an error.

`watched` tells of each operation in a folder before it happens, and half way in a write. A point is named by the
operation and the path. What happens inside of `.state_*.tmp` is one class and not told; tests/checkpoint looks at it.

`Recorder` copies the folder aside at each point, and beside it what a power cut there would leave. `opened` opens such
a copy as a start of the program would, `trained` trains, both in this process. tests/test_crashes.py judges.
"""

import builtins
import contextlib
import errno
import fcntl
import functools
import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from llmc_jax.base.errors import InputError
from llmc_jax.base.streams import Output
from llmc_jax.checkpoint.manifest import MANIFEST
from llmc_jax.config.checks import validate
from llmc_jax.config.flags import parse_args
from llmc_jax.machine.device import git_state
from llmc_jax.run import loop
from llmc_jax.run.command import main
from tests.same_run import OF_THE_RUN, WALL_CLOCK, leftovers, steps_of

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
INSIDE = re.compile(r"(^|/)\.state_[^/]*/")  # a folder that is being written, or removed
# The random part of a temporary name.
RANDOM = re.compile(r"(?<=\.)[0-9a-f]{8}(?=\.)|(?<=/\.probe\.)[a-z0-9_]{8}(?=\.tmp$)")


def path_of(descriptor: int) -> str | None:
    """Return where an open file or folder is now; None where it was removed, or the system does not tell."""
    try:
        if hasattr(fcntl, "F_GETPATH"):  # macOS
            path = os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
        else:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        return path if os.path.samestat(os.stat(path), os.fstat(descriptor)) else None
    except OSError:
        return None


class Point(NamedTuple):
    """A moment before an operation, or, of a write, half way in it."""

    operation: str  # open, write, half a write, fsync, truncate, rename, remove, mkdir, rmdir
    path: str  # relative to the watched folder, with * for what is random
    which: str = ""  # of a write to a log: which line

    @property
    def place(self) -> str:
        """The point without the line, which one place in the program may write many of."""
        return f"{self.operation} {self.path}"

    def __str__(self) -> str:
        return f"{self.place} {self.which}".rstrip()


# ----- watching -------------------------------------------------------------------------------------------------------

_told: Callable[[str, tuple[Any, ...]], None] | None = None  # an audit hook stays for ever; this is where it leads
_hooked = False


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _told is not None:
        _told(event, args)


class _Watch:
    """A folder, who hears of the operations in it, and the operations themselves, which are told before they happen."""

    def __init__(self, base: Path, at: Callable[[Point], None], synced: Callable[[str], None]) -> None:
        self.root, self.lock = os.path.realpath(base) + os.sep, threading.RLock()
        self.at, self.synced = at, synced
        self.real_open, self.real_fsync, self.real_write = io.open, os.fsync, os.write

    def inside(self, path: Any, folder: int = -1) -> str | None:
        """Return the path relative to the folder; None where it is elsewhere."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        name = os.fsdecode(path)
        whole = os.path.abspath(os.path.join(path_of(folder) or "", name) if folder >= 0 else name)
        return whole.removeprefix(self.root) if whole.startswith(self.root) else None

    def tell(self, operation: str, path: str | None, which: str = "", target: str = "") -> None:
        if path is not None and not INSIDE.search(path):
            names = RANDOM.sub("*", path) + (f" -> {RANDOM.sub('*', target)}" if target else "")
            with self.lock:
                self.at(Point(operation, names, which))

    def heard(self, event: str, args: tuple[Any, ...]) -> None:
        """Tell what Python's audit hook hears."""
        if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
            self.tell("open", self.inside(args[0]))
        elif event == "os.rename":
            target = self.inside(args[1], args[3]) or "elsewhere"
            self.tell("rename", self.inside(args[0], args[2]), target=target)
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            self.tell(event.removeprefix("os."), self.inside(args[0], args[-1]))
        elif event == "os.truncate":
            self.tell("truncate", self.inside(args[0]))

    def open(self, file: Any, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> Any:
        path = self.inside(file)
        if path is None or INSIDE.search(path) or not set(mode) & set("wax+") or os.path.isdir(file):
            return self.real_open(file, mode, buffering, *args, **more)
        raw = _Told(file, mode.replace("b", "").replace("t", ""), opener=more.pop("opener", None))
        raw.watch = self
        binary = raw if buffering == 0 else io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *args, **more)

    def fsync(self, file: Any) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = path_of(descriptor)
        if path is None or not f"{path}{os.sep}".startswith(self.root):
            return self.real_fsync(file)
        self.tell("fsync", path.removeprefix(self.root) if path != self.root[:-1] else ".")
        with self.lock:
            self.synced(path)

    def write(self, descriptor: int, data: Any) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            self.tell("write", self.inside(path_of(descriptor)))
        return self.real_write(descriptor, data)


class _Told(io.FileIO):
    """A file whose writes are told."""

    watch: _Watch

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        path = self.watch.inside(self.name)
        self.watch.tell("write", path, line := which_line(bytes(data)))
        half = super().write(data[: len(data) // 2])
        self.watch.tell("half a write", path, line)
        return half + super().write(data[half:])

    def truncate(self, size: int | None = None) -> int:
        self.watch.tell("truncate", self.watch.inside(self.name))
        return super().truncate(size)


@contextmanager
def watched(base: Path, at: Callable[[Point], None], synced: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Within the block `at` hears of every operation of this process in the folder `base`, before it happens.

    Whatever `at` raises, the operation raises. synced hears the path of every fsync there, those inside of
    `.state_*.tmp` too; none really happens, since no test cuts the power and each takes milliseconds.
    """
    global _told, _hooked
    watch = _Watch(base, at, synced)
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    with (
        mock.patch.object(io, "open", watch.open),
        mock.patch.object(builtins, "open", watch.open),
        mock.patch.object(os, "fsync", watch.fsync),
        mock.patch.object(os, "write", watch.write),
    ):
        _told = watch.heard
        try:
            yield
        finally:
            _told = None


def which_line(data: bytes) -> str:
    """A few words on a line of a log: `s:3 trl`, `train 3`."""
    if match := re.match(rb"s:\d+ \w+", data):
        return match[0].decode()
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        event = json.loads(data)
        return f"{event['event']} {event['step']}" if "event" in event and "step" in event else ""
    return ""


# ----- copies ---------------------------------------------------------------------------------------------------------


class Copy(NamedTuple):
    """What a run that ended at a point would find when it starts again."""

    point: Point
    cut: bool  # the power was cut; else the process was killed
    folder: Path
    promised: int  # the newest checkpoint that had been reported as complete; -1: none


class Disk:
    """What a power cut leaves: of each file its bytes, and of each folder its names, when it was last synced.

    The strictest reading of POSIX: a file that was never synced is empty, and a name is there only if the folder was
    synced since. Files are held open, so that no other gets the number (the inode) of one that is gone.
    """

    def __init__(self, base: Path) -> None:
        """What lies in the folder already is on the disk."""
        self._held: dict[int, int] = {}  # descriptors by inode
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode, and whether it is a folder
        self._left: dict[int, Path] = {}  # checkpoints that have been written: the first copy is the one of all
        self._base = self._hold(str(base))
        self.version = 0
        for folder, _, files in os.walk(base, topdown=False):
            for path in [*(os.path.join(folder, name) for name in files), folder]:
                self.sync(path)

    def _hold(self, path: str) -> int:
        inode = os.lstat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def sync(self, path: str) -> None:
        """A file or folder is brought to the disk."""
        self.version += 1
        inode = self._hold(path)
        if not os.path.isdir(path):
            self._bytes[inode] = Path(path).read_bytes()
            return
        with os.scandir(path) as entries:
            found = [(entry.name, entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
        self._names[inode] = {name: (self._hold(where), folder) for name, where, folder in found}

    def leave(self, target: Path, inode: int = 0) -> None:
        """Write what is left into a new folder. A checkpoint counts as it was when its name first was on the disk."""
        target.mkdir(parents=True)
        for name, (each, folder) in self._names.get(inode or self._base, {}).items():
            if name.startswith("state_"):
                if each not in self._left:
                    self._left[each] = target / name
                    self.leave(target / name, each)
                else:
                    (target / name).symlink_to(self._left[each])
            elif folder:
                self.leave(target / name, each)
            else:
                (target / name).write_bytes(self._bytes.get(each, b""))

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()


class Recorder:
    """Copies a folder aside at each point where it is not as it was at the last one, and what a power cut would leave.

    base: the folder; run: that of the run in it; copies go into `aside`.
    """

    def __init__(self, base: Path, run: Path, aside: Path, wanted: Callable[[Point], bool] = lambda _: True) -> None:
        self.base, self.run, self.aside, self.wanted = base, run, aside, wanted
        self.points: list[Point] = []
        self.copies: list[Copy] = []
        self.found: dict[tuple[str, bool], Copy] = {}  # by point, and whether the power was cut: what is found then
        self.disk = Disk(base)
        self.checkpoints = Checkpoints(aside / "checkpoints")
        self._last: dict[bool, tuple[Any, Copy]] = {}

    def at(self, point: Point) -> None:
        self.points.append(point)
        if not self.wanted(point):
            return
        while True:  # the other thread may change something meanwhile: then once more
            before, newest = _glance(self.base), promised(self.run)
            if not self._is_new(point, False, (before, newest)):
                break
            try:
                copy_folder(self.base, folder := self._folder(), self.checkpoints.share)
            except FileNotFoundError:
                before = []
            if before == _glance(self.base):
                self._keep(Copy(point, False, folder, newest), (before, newest))
                break
            shutil.rmtree(folder)
        if self._is_new(point, True, (self.disk.version, newest)):
            self.disk.leave(folder := self._folder())
            self._keep(Copy(point, True, folder, newest), (self.disk.version, newest))

    def _is_new(self, point: Point, cut: bool, state: Any) -> bool:
        last, copy = self._last.get(cut, (None, None))
        if last == state and copy is not None:
            self.found.setdefault((str(point), cut), copy)
        return last != state

    def _keep(self, copy: Copy, state: Any) -> None:
        self.copies.append(copy)
        self.found.setdefault((str(copy.point), copy.cut), copy)
        self._last[copy.cut] = state, copy

    def _folder(self) -> Path:
        return self.aside / f"{len(self.copies):04d}"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block every point is recorded; at its end the folder as it is then."""
        try:
            with watched(self.base, self.at, self.disk.sync):
                yield
            self.at(Point("end", ""))
        finally:
            self.disk.close()


class Checkpoints:
    """One copy of each checkpoint, hundreds of files which never change, for many copies of a folder to share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Any, Path] = {}

    def share(self, path: str, target: Path) -> None:
        """Let `target` be a link to the copy of the checkpoint that is at `path`."""
        status = os.stat(os.path.join(path, MANIFEST))
        key = os.path.basename(path), status.st_ino, status.st_mtime_ns
        if key not in self._known:
            self._known[key] = self._folder / str(len(self._known))
            shutil.copytree(path, self._known[key], copy_function=os.link)
        target.symlink_to(self._known[key])


def copy_folder(source: Path, target: Path, share: Callable[[str, Path], None] | None = None) -> None:
    """Copy a folder but for what `.state_*.tmp` holds. share: makes a checkpoint's copy; else its files are links."""
    target.mkdir(parents=True)
    with os.scandir(source) as entries:
        for entry in entries:
            path = target / entry.name
            if entry.is_symlink() and share:
                path.symlink_to(os.readlink(entry.path))
            elif not entry.is_dir():
                shutil.copyfile(entry.path, path)
            elif re.fullmatch(r"\.state_.*\.tmp", entry.name):
                path.mkdir()
            elif not re.match(r"\.?state_", entry.name):
                copy_folder(Path(entry.path), path, share)
            elif share:
                share(entry.path, path)
            else:
                shutil.copytree(entry.path, path, copy_function=os.link)


def _glance(base: Path) -> list[tuple[Any, ...]]:
    """What changes when something in the folder does, without a look into checkpoints."""
    found = []
    for folder, names, files in os.walk(base):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path := os.path.join(folder, name))
                found.append((path, status.st_ino, status.st_size, status.st_mtime_ns))
        found += [(os.path.join(folder, name),) for name in names]
        names[:] = [name for name in names if not re.match(r"\.?state_", name)]
    return sorted(found)


def promised(run: Path) -> int:
    """The newest checkpoint of which metrics.jsonl says that it is complete."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return -1
    found = [re.match(rb'\{"event": "checkpoint", "step": (\d+)', line) for line in lines]
    return max([-1, *(int(match[1]) for match in found if match)])


# ----- runs in this process -------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a run in this process ended."""

    status: int
    said: str
    complaint: str  # what it wrote to standard error


def trained(words: Sequence[str]) -> Ended:
    """Run the command line in this process."""
    said, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
        status = int(main(list(words)))
    return Ended(status, said.getvalue(), complaint.getvalue())


class Outcome(NamedTuple):
    """What a start makes of a folder: what decides how the run goes on."""

    step: int  # that it goes on from
    complete: tuple[int, ...]  # steps of the complete checkpoints
    logs: str  # digest of what the logs say of the run, without wall-clock figures, and of its choice of kernels
    left: tuple[str, ...] = ()  # temporary files and folders that are still there
    problem: str = ""  # why it refused


_commit = functools.cache(git_state)  # which starts git


def opened(run: Path, words: Sequence[str]) -> Outcome:
    """Open a run folder as a start of the program would, up to where it trains."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch.object(os, "fsync", lambda _: None),
        mock.patch("llmc_jax.run.folder.git_state", _commit),
        mock.patch("llmc_jax.run.resume.git_state", _commit),
    ):
        try:
            config = parse_args(list(words))
            notes = validate(config)
            stop = threading.Event()
            with loop.lock_of(config) as held:
                setup, _ = loop.prepare(config, notes)
                with loop.opened(setup, Output(said, stop), stop, held):
                    pass
        except (InputError, OSError) as error:
            return Outcome(-1, (), "", (), f"{type(error).__name__}: {error}")
        step = 0 if setup.earlier is None else setup.earlier.step
        try:
            logs = logs_digest(run)
        except ValueError:
            return Outcome(step, (), "", (), "metrics.jsonl holds a line that is not JSON")
    return Outcome(step, tuple(steps_of(run, "DONE")), logs, tuple(leftovers(run)))


def logs_digest(run: Path) -> str:
    """A digest of what the logs say of the run itself, without wall-clock figures, and of its choice of kernels."""
    digest = hashlib.sha256()
    for name in ("main.log", "samples.txt", "kernels.json"):
        digest.update((run / name).read_bytes() + b"\0")
    for line in (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]:
        event = json.loads(line)
        if event["event"] in OF_THE_RUN:
            digest.update(json.dumps({key: event[key] for key in event if key not in WALL_CLOCK}).encode())
    return digest.hexdigest()


def failing(place: str, code: int, lasting: bool) -> Callable[[Point], None]:
    """Return what `watched` takes so that the operation at a place fails once; lasting: all writing from then on.

    Of an operation on an open file the error names no file, as the system's does.
    """
    begun = False

    def at(point: Point) -> None:
        nonlocal begun
        frees = point.operation in ("remove", "rmdir", "rename", "fsync", "truncate")
        if (not begun and point.place == place) or (begun and lasting and not frees):
            begun = True
            raise OSError(code, os.strerror(code), *([point.path] if point.operation in NAMED else []))

    return at


NAMED = ("open", "rename", "remove", "mkdir", "rmdir")  # operations whose errors name a file
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}

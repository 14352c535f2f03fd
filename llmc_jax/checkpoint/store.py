"""Checkpoints of a training state: folders of named arrays and metadata, in which one flipped bit is found.

    <run>/state_00000100/          step 100
        tensors/                   the arrays (zarr 3, not compressed); orbax alone can read it
        run.json                   the metadata
        MANIFEST.json              digests of every array, block by block, of every other file and of itself
    <run>/DONE_00000100            empty; says what the folder's name says too, as llm.c does

The digests of an array are taken from memory before it is written. The folder gets its name once every array
was read back from the disk and agreed, and everything is synced. So a named folder whose digests hold is a checkpoint,
whether its DONE_ file is there or was lost in a copy. Which arrays and metadata there are is the caller's. Leaves out
writing beside the training, and llm.c's files.

One process writes a checkpoint as several do together: one begins and seals it, each writes its blocks of the flat
buffers and reads them back; of several processes' checkpoint each block has a file.

A model's tensors are stored in flat buffers: `params`, `m`, `v`, `copy`. `Checkpoint` gives tensors, buffers and parts
of buffers.

Needs neither orbax nor JAX.
"""

import functools
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import complete_file, reason, refusing, sync, write_bytes
from llmc_jax.base.streams import escaped
from llmc_jax.checkpoint.arrays import TENSORS as ARRAYS
from llmc_jax.checkpoint.arrays import (
    array_file,
    check_sizes,
    damaged_blocks,
    describe_arrays,
    file_of_block,
    file_size,
    sync_file,
    write_array,
    write_block,
)
from llmc_jax.checkpoint.contents import FORMAT, Metadata
from llmc_jax.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    METADATA,
    NAME,
    File,
    Manifest,
    Tensor,
    describe,
    digest_of_block,
    digest_of_bytes,
    digest_of_file,
    dtype_of,
    dump,
    dump_manifest,
    in_threads,
    read_manifest,
    read_metadata,
    sizes_in,
    val_loss_of,
)
from llmc_jax.config.model import ModelShape
from llmc_jax.models.layout import flat_size, tensor_specs
from llmc_jax.models.tensors import BLOCKS, FLAT_MULTIPLE

ROOM = 16 << 20  # bytes that a save leaves free on the disk, for the logs

_LEFTOVER = re.compile(r"\.state_(\d{8,})\.[0-9a-f]{8}\.(tmp|old)")
# Files that a killed process had not finished: complete_file's, and an exported model whose checkpoint never counted.
_LEFTOVER_FILE = re.compile(
    r"\.(DONE_\d{8,}|model_\d{8,}\.bin|main\.log|metrics\.jsonl|samples\.txt|config\.json|kernels\.json|curves\.png"
    r"|report\.html|find_lr\.json|find_lr\.png|PROGRAMS\.json|tokenizer\.(bin|json)|(model|optimizer)_[0-9a-f]{12}\.py"
    r"|algorithms_[0-9a-f]{12}\.(txt|textproto|pb))\.[0-9a-f]{8}\.tmp"
    r"|\.probe\.[a-z0-9_]{8}\.tmp"
    r"|\.\.model_\d{8,}\.bin\.[0-9a-f]{8}\.tmp\.[0-9a-f]{8}\.tmp"
)


class Writing(NamedTuple):
    """A checkpoint on its way: written to `folder`, a hidden one in `run`, and not sealed yet.

    tensors: with "" for digests of blocks that the processes have yet to tell.
    """

    run: Path
    step: int
    folder: Path
    tensors: dict[str, Tensor]
    files: dict[str, File]  # the metadata, and what says how the arrays are stored, as they were written


class Entry(NamedTuple):
    """One checkpoint of a run folder. problem: None where it is healthy, else one line."""

    step: int
    folder: Path
    bytes: int
    val_loss: float | None
    problem: str | None
    done: bool = True  # its DONE_ file is there, or it stands alone and needs none


def state_folder(run: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return run / f"state_{step:08d}"


def done_file(run: Path, step: int) -> Path:
    """Return the empty file that says that the checkpoint of a step was completed; llm.c has the same."""
    return run / f"DONE_{step:08d}"


def model_file(run: Path, step: int) -> Path:
    """Return where the exported model of a step lies, if there is one."""
    return run / f"model_{step:08d}.bin"


def hidden_model(run: Path, step: int) -> Path:
    """Return a name for the exported model of a step until its checkpoint counts; `clean` removes it."""
    return run / f".{model_file(run, step).name}.{secrets.token_hex(4)}.tmp"


# ----- writing ------------------------------------------------------------------------------------------------------


def begin(
    run: str | Path,
    step: int,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    buffers: Mapping[str, tuple[int, str]] | None = None,
    parts: int = 1,
) -> Writing:
    """Begin a checkpoint in a hidden folder of the run folder: write everything but the blocks of the flat buffers.

    arrays: by name (words joined by /), of a dtype in DTYPES and any shape, but not empty; their digests are taken from
    memory before they are written. metadata: what JSON can hold, with "format" 2 and "step". buffers: elements and
    dtype of each flat buffer, whose blocks `write_blocks` writes, here or in other processes. parts: files of each
    buffer, 1, or BLOCKS where several processes write. Nothing refers to the arrays any more when it returns. The
    checkpoint does not exist before `seal`.

    Raises InputError if it cannot be written, or if there is no room for all of it; the hidden folder is removed then.
    """
    assert metadata["format"] == FORMAT and metadata["step"] == step >= 0, (metadata["format"], metadata["step"], step)
    run, words = Path(run), dump(metadata)
    for name, array in arrays.items():
        assert NAME.fullmatch(name) and array.size and array.dtype.name in DTYPES, (name, array.shape, array.dtype)
    tensors = {name: _buffer(name, size, dtype, parts) for name, (size, dtype) in (buffers or {}).items()}
    tensors |= {name: describe(array) for name, array in arrays.items()}
    writing = Writing(run, step, _hidden(run, step, "tmp"), tensors, {})
    folder = writing.folder
    with _attempt(writing):
        _check_room(run, sum(tensor.parts * file_size(tensor) for tensor in tensors.values()))
        folder.mkdir()
        describe_arrays(folder, tensors)
        plans = _digests(folder, sizes_in(folder))
        for name in arrays:
            write_array(folder, name, tensors[name], arrays[name])
        folder.joinpath(METADATA).write_bytes(words)
        if parts > 1:  # other processes, which write blocks, may be on other machines
            _sync_folders(folder)
            sync(run)
    return writing._replace(files={METADATA: digest_of_bytes(words), **plans})


def _buffer(name: str, size: int, dtype: str, parts: int, digests: Mapping[int, str] | None = None) -> Tensor:
    """Return what the manifest says of a flat buffer. digests: of its blocks, "" where one is not known here."""
    assert NAME.fullmatch(name) and dtype in DTYPES and size > 0 == size % FLAT_MULTIPLE, (name, size, dtype)
    return Tensor((size,), dtype, tuple((digests or {}).get(k, "") for k in range(BLOCKS)), parts)


def _check_room(run: Path, size: int) -> None:
    """Refuse to begin what the disk cannot hold: a full one would stop whoever else writes to it, such as the logs."""
    if (free := shutil.disk_usage(run).free) < size + ROOM:
        raise InputError(
            f"it takes {size / 1e6:,.0f} MB and {ROOM / 1e6:.0f} MB must stay free, but only {free / 1e6:,.0f} MB are "
            "free; free some, or keep fewer with -nk"
        )


def _sizes_of(manifest: Manifest) -> dict[str, int]:
    """Return the files of a state folder but for the manifest, and the bytes of each."""
    parts = ((name, tensor, part) for name, tensor in manifest.tensors.items() for part in range(tensor.parts))
    arrays = {array_file(name, tensor, part): file_size(tensor) for name, tensor, part in parts}
    return arrays | {path: file.size for path, file in manifest.files.items()}


def _digests(folder: Path, paths: Iterable[str]) -> dict[str, File]:
    """Return size and digest of files of a folder, read now."""
    paths = sorted(paths)
    return dict(zip(paths, in_threads(digest_of_file, [folder / path for path in paths]), strict=True))


def own_blocks(process: int, processes: int) -> range:
    """Return the blocks of each flat buffer that a process writes: a fair share, of more than BLOCKS processes none."""
    writers = min(processes, BLOCKS)
    return (
        range(-(-process * BLOCKS // writers), -(-(process + 1) * BLOCKS // writers)) if process < writers else range(0)
    )


def write_blocks(folder: Path, name: str, blocks: Mapping[int, np.ndarray], parts: int = 1) -> dict[int, str]:
    """Write blocks of a flat buffer to the folder that `begin` made; return the digest of each, taken from memory.

    blocks: by number, each (buffer's elements / BLOCKS,), of the buffer's dtype; parts: as `begin` had it. Several
    processes may write at a time, to files of their own, but each block once. When it returns, nothing refers to the
    blocks any more. `read_back` follows.

    Raises InputError if they cannot be written. The folder stays: whoever began it abandons it once no process writes
    any more.
    """
    if not blocks:
        return {}
    first = next(iter(blocks.values()))
    alike = {(block.shape, block.dtype) for block in blocks.values()}
    assert len(alike) == 1 and set(blocks) <= set(range(BLOCKS)), (alike, list(blocks))
    blocks = {k: np.ascontiguousarray(block) for k, block in blocks.items()}

    with _explained(folder):
        digests = dict(zip(blocks, in_threads(digest_of_block, blocks.values()), strict=True))
        tensor = _buffer(name, first.size * BLOCKS, first.dtype.name, parts, digests)
        in_threads(lambda k: _write(folder, name, tensor, k, blocks[k]), blocks)
        return digests


def read_back(folder: Path, name: str, buffer: tuple[int, str], digests: Mapping[int, str], parts: int = 1) -> None:
    """Sync the blocks of a flat buffer that `write_blocks` wrote, read them from the disk, and compare.

    buffer: its elements and dtype. digests: what `write_blocks` returned. Raises InputError where a block is read back
    differently, or not at all.
    """
    tensor = _buffer(name, *buffer, parts, digests)

    with _explained(folder):
        if parts == 1:
            sync_file(folder / array_file(name, tensor))
        size = tensor.block
        if any(in_threads(lambda k: damaged_blocks(folder, name, tensor, k * size, (k + 1) * size), digests)):
            raise _differs(name)


def _write(folder: Path, name: str, tensor: Tensor, k: int, block: np.ndarray) -> None:
    """Write a block; one that has a file of its own goes to the disk at once, while others are written."""
    write_block(folder, name, tensor, k, block)
    if tensor.parts > 1:
        sync_file(folder / array_file(name, tensor, k))


def _differs(what: str) -> InputError:
    return InputError(f"{what} reads back differently from what was written; is the disk sound?")


def seal(writing: Writing, model: Path | None = None, digests: Sequence[Mapping[str, Mapping[Any, str]]] = ()) -> Path:
    """Make a checkpoint of what was written: read it back, compare, write the manifest, sync, give it its name.

    Returns its folder.

    model: an exported model, under the name that `hidden_model` gave; it gets its own beside the checkpoint.
    digests: from each process what `write_blocks` gave it, by buffer; each has then read back its own blocks, and here
    only their sizes are looked at. JSON makes words of the blocks' numbers; these will do.
    A checkpoint of the same step that is there already is replaced. Takes the memory of a few blocks of an array.

    Raises InputError if what is read back differs, if a block was not written exactly once, or if anything cannot be
    written; the hidden folder is removed then, and what was there before stays.
    """
    folder = writing.folder
    with _attempt(writing):
        manifest = Manifest(writing.step, _with_digests(writing.tensors, digests), writing.files)
        here = {name: tensor for name, tensor in writing.tensors.items() if "" not in tensor.sha256}
        for path in (*manifest.files, *(array_file(name, tensor) for name, tensor in here.items())):
            sync_file(folder / path)
        if misfits := _misfits(folder, _sizes_of(manifest)):
            raise InputError(misfits[0])
        damaged = in_threads(lambda name: damaged_blocks(folder, name, here[name]), here)
        wrong = [array_file(name, here[name]) for name, blocks in zip(here, damaged, strict=True) if blocks]
        if wrong := _damaged_files(folder, manifest) + wrong:
            raise _differs(wrong[0])
        folder.joinpath(MANIFEST).write_bytes(dump_manifest(manifest))
        sync(folder / MANIFEST)
        _sync_folders(folder)
        _put_in_place(writing, model)
    return state_folder(writing.run, writing.step)


def _with_digests(
    tensors: Mapping[str, Tensor], digests: Sequence[Mapping[str, Mapping[Any, str]]]
) -> dict[str, Tensor]:
    """Return the arrays with the digests of their blocks. Raises InputError if a block has none, or several."""
    found = dict(tensors)
    for name in (name for name, tensor in tensors.items() if "" in tensor.sha256):
        told = sorted((int(k), digest) for process in digests for k, digest in process.get(name, {}).items())
        counts = Counter(k for k, _ in told)
        for k in (k for k in range(BLOCKS) if counts[k] != 1):
            raise InputError(f"block {k} of {name} was written by {counts[k] or 'no'} processes; expected one")
        found[name] = tensors[name]._replace(sha256=tuple(digest for _, digest in told))
    return found


def _put_in_place(writing: Writing, model: Path | None) -> None:
    """Rename the hidden folder and the model.

    A folder that has the name already waits under another until the new one is complete; one with a user's files stays.
    """
    run, step = writing.run, writing.step
    target, done = state_folder(run, step), done_file(run, step)
    was_done = done.exists()
    moved = target.with_name(f"{target.name}-moved-{secrets.token_hex(4)}")
    aside = _hidden(run, step, "old") if (ours := _is_ours(target)) else moved
    if there := os.path.lexists(target):
        os.rename(target, aside)
    renamed = False
    try:
        os.rename(writing.folder, target)
        renamed = True
        if model is not None:
            os.replace(model, model_file(run, step))
        sync(run)
        with complete_file(done) as empty:
            empty.touch()
    except BaseException:
        if not was_done:
            for file in [done] if model is None else [done, model_file(run, step)]:
                with suppress(OSError):  # a folder in its way is not ours to remove
                    file.unlink(missing_ok=True)
        if renamed:
            os.rename(target, writing.folder)
        if there:
            os.rename(aside, target)
        raise
    if there and ours:
        with suppress(OSError):  # what cannot be removed now, `clean` removes
            _remove(aside)


def abandon(writing: Writing) -> None:
    """Remove what `begin` wrote. A checkpoint that was sealed is not touched. Raises nothing: `clean` comes again."""
    shutil.rmtree(writing.folder, ignore_errors=True)


@contextmanager
def _attempt(writing: Writing) -> Iterator[None]:
    """Write within the block. What goes wrong removes the hidden folder and becomes an InputError."""
    try:
        with _explained(writing.folder):
            yield
    except BaseException:
        abandon(writing)
        raise


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Write into a hidden folder within the block. What goes wrong becomes an InputError."""
    step = _LEFTOVER.fullmatch(folder.name)
    assert step, folder
    try:
        yield
    except Exception as error:
        error.__traceback__ = None  # whose frames refer to the arrays
        words = f"the checkpoint of step {int(step[1])} cannot be written: {_cause(error)}"
        raise InputError(f"{folder.parent}: {words}") from None


def _cause(error: BaseException) -> str:
    """Return why something failed, in a few words."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {reason(error)}" if error.filename else reason(error)
    return f"{type(error).__name__}: {str(error) or 'no reason given'}"


def _hidden(run: Path, step: int, kind: str) -> Path:
    return run / f".state_{step:08d}.{secrets.token_hex(4)}.{kind}"


def _remove(folder: Path) -> None:
    """Remove a folder, or a link to one."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _is_ours(folder: Path) -> bool:
    """Return whether nothing but a checkpoint's files is lost if a state folder, or a link to one, is removed."""
    return folder.is_symlink() or (folder.is_dir() and {MANIFEST, METADATA, ARRAYS}.issuperset(os.listdir(folder)))


def _sync_folders(folder: Path) -> None:
    """Bring the names in a folder, at any depth, to the disk."""
    for parent, _, _ in os.walk(folder, topdown=False):
        sync(Path(parent))


# ----- reading and checking -----------------------------------------------------------------------------------------


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Turn errors about a file of a state folder within the block into FormatErrors that name the folder."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{folder}: {error}") from error
    except OSError as error:
        raise FormatError(f"{folder}: {_unreadable(folder, error)}") from error


def _unreadable(folder: Path, error: OSError) -> str:
    name = os.path.relpath(os.fsdecode(error.filename), folder) if isinstance(error.filename, str | bytes) else "."
    if isinstance(error, FileNotFoundError):
        return f"{name}: is missing" if folder.exists() else "there is no such folder"
    return f"{'the folder' if name == '.' else name}: cannot be read: {reason(error)}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest was read and checked. Each array is read when asked for; no file stays open.

    stored: the metadata as they stand there, JSON.
    """

    folder: Path
    manifest: Manifest
    stored: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Return the steps that the state has made."""
        return self.manifest.step

    @functools.cached_property
    def metadata(self) -> Metadata:
        """Return what a training state holds beside its arrays. Raises FormatError if it is none."""
        return Metadata.from_json(self.stored, self.folder)

    @property
    def _model(self) -> ModelShape:
        return self.metadata.identity.model

    def read(self, name: str) -> np.ndarray:
        """Return one array, with its digests compared: a stored one, or a tensor (`params/wte`) of a flat buffer.

        A tensor has the model's shape. Raises FormatError if it is not there, or not what was saved. Nothing is
        allocated by a size that is not that of the file.
        """
        tensors = self.manifest.tensors
        buffer, _, part = name.partition("/")
        if name in tensors:
            return self._read(name, 0, tensors[name].size).reshape(tensors[name].shape)
        for spec in tensor_specs(self._model) if buffer in tensors else ():
            if spec.name == part:
                return self.elements(buffer, spec.offset, spec.offset + spec.size).reshape(spec.shape)
        known = ", ".join(tensors) or "none"
        raise FormatError(f"{self.folder}: it holds no array {name}; its arrays are {known}")

    def elements(self, buffer: str, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of a flat buffer, with the digests of the blocks that they touch compared."""
        assert 0 <= start < stop <= flat_size(self._model), (start, stop)
        self.check_buffer(buffer)
        return self._read(buffer, start, stop)

    def check_buffer(self, name: str) -> None:
        """Raise FormatError if there is no such flat buffer, or it is not what the model demands."""
        tensor, shape = self.manifest.tensors.get(name), (flat_size(self._model),)
        if tensor is None:
            raise FormatError(f"{self.folder}: it holds no array {name}")
        if tensor.shape != shape:
            raise FormatError(f"{self.folder}: {name} has shape {tensor.shape}; by run.json it must be {shape}")

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Return elements [start, stop) of an array."""
        tensor = self.manifest.tensors[name]
        with _naming(self.folder):
            check_sizes(self.folder, name, tensor, start, stop)
            found = np.empty(stop - start, dtype_of(tensor.dtype))
            if blocks := damaged_blocks(self.folder, name, tensor, start, stop, found):
                raise FormatError(f"{name}: {_damage(tensor, blocks[0])}")
        return found


def _damage(tensor: Tensor, block: int) -> str:
    """Return what is wrong with an array of which a block is not what was saved."""
    start = block * tensor.block
    return f"damaged: elements {start:,} to {start + tensor.block - 1:,} are not what was saved"


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Open a state folder: read and check its manifest and metadata. Raises FormatError."""
    folder = Path(folder)
    with _naming(folder):
        manifest = read_manifest(folder)
        return Checkpoint(folder, manifest, read_metadata(folder, manifest))


def check(folder: str | Path) -> str | None:
    """Return what is wrong with a state folder, in one line; None if every file is what was saved. Reads all of it."""
    return loose_entry(folder).problem


def _misfits(folder: Path, written: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the names and sizes of a folder's files. written: those that were written."""
    sizes = sizes_in(folder)
    sizes.pop(MANIFEST, None)
    misfits = [f"{path}: is missing" for path in written.keys() - sizes.keys()]
    misfits += [f"{path}: is not part of the checkpoint; move it away" for path in sizes.keys() - written.keys()]
    for path in written.keys() & sizes.keys():
        size, expected = sizes[path], written[path]
        if size < 0:
            misfits.append(f"{path}: is not a regular file")
        elif size != expected:
            misfits.append(f"{path}: holds {size:,} bytes; {expected:,} were written")
    return sorted(misfits)


def _problem(folder: Path, manifest: Manifest, deep: bool, share: tuple[int, int]) -> str | None:
    """Return which file is missing, not known, or not what it was, the first of them; share: as `entry` has it.

    Raises FormatError, which says the same, or OSError.
    """
    if share[0] == 0:
        if misfits := _misfits(folder, _sizes_of(manifest)):
            return misfits[0]
        if deep and (files := _damaged_files(folder, manifest)):
            return f"{files[0]}: damaged: its SHA-256 is not that in the manifest"
    own = own_blocks(*share)
    for name, tensor in manifest.tensors.items() if deep else ():
        mine = own if len(tensor.sha256) == BLOCKS else range(int(0 in own))  # who has block 0 reads other arrays too
        if found := damaged_blocks(folder, name, tensor, mine.start * tensor.block, mine.stop * tensor.block):
            return f"{file_of_block(name, tensor, found[0])}: {_damage(tensor, found[0])}"
    return None


def _damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return which of the files that have a digest of their own hold something else."""
    found = _digests(folder, manifest.files)
    return [path for path, file in manifest.files.items() if found[path] != file]


def steps(run: str | Path) -> list[int]:
    """Return the steps of which a run folder, if there is one, has a state folder or a DONE_ file of ours, ascending.

    llm.c's checkpoints (DONE_%08d beside state_%08d_%05d.bin) are not among them. Raises InputError if the folder
    cannot be read.
    """
    run = Path(run)
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{run}: cannot be read: {reason(error)}") from error
    theirs = {match[1] for name in names if (match := re.fullmatch(r"state_(\d{8,})_\d{5,}\.bin", name))}
    found = {match[2]: match[1] for name in sorted(names) if (match := re.fullmatch(r"(DONE|state)_(\d{8,})", name))}
    ours = [digits for digits, kind in found.items() if kind == "state" or digits not in theirs]
    return sorted(int(digits) for digits in ours if digits == f"{int(digits):08d}")


def entry(run: str | Path, step: int, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Entry:
    """Return the checkpoint of one step, checked; not deep: without reading the contents of the arrays' files.

    share: (p, n): look only at what falls to process p of n, so that the n together read every byte once: at its
    `own_blocks`; process 0 also at all that is no block, the names of the files among it, and alone knows `bytes`.
    """
    folder, done = state_folder(Path(run), step), done_file(Path(run), step)
    found = loose_entry(folder, deep=deep, share=share)
    if not os.path.lexists(folder):
        there = f"there is {done.name}, but no folder" if done.exists() else "there is no folder"
        found = found._replace(problem=f"{there} {folder.name}")
    elif found.problem is None and found.step != step:
        found = found._replace(problem=f"it holds step {found.step}")
    return found._replace(step=step, done=done.is_file())


def loose_entry(folder: str | Path, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Entry:
    """Return a state folder by itself, whatever its name and without a DONE_ file; step -1 where it cannot be read.

    share: as `entry` has it.
    """
    folder = Path(folder)
    step, loss, size, problem = -1, None, 0, None
    with suppress(OSError):
        size = sum(max(size, 0) for size in sizes_in(folder).values()) if share[0] == 0 else 0
    try:
        if folder.is_dir():
            manifest = read_manifest(folder)
            step = manifest.step
            loss = val_loss_of(read_metadata(folder, manifest))
            problem = _problem(folder, manifest, deep, share)
        else:
            problem = "it is a file, not a folder" if folder.exists() else "there is no such folder"
    except FormatError as error:
        problem = str(error)
    except OSError as error:
        problem = _unreadable(folder, error)
    return Entry(step, folder, size, loss, escaped(problem) if problem else None)


def entries(run: str | Path, *, deep: bool = True) -> Iterator[Entry]:
    """Yield every checkpoint of a run folder, oldest first, each checked when it is asked for; the bad ones too.

    deep: read all of every checkpoint and compare; else look at the manifests, the metadata and the files' sizes alone.
    Raises InputError if the folder cannot be read.
    """
    run = Path(run)
    for step in steps(run):
        found = entry(run, step, deep=deep)
        if os.path.lexists(found.folder) or done_file(run, step).exists():  # else a running training has removed it
            yield found


def newest_good(run: str | Path, report: Callable[[str], None]) -> Entry | None:
    """Return the newest checkpoint of which every byte is right, None where there is none; report each bad one."""
    for step in reversed(steps(run)):
        found = entry(run, step)
        if found.problem is None:
            return found
        report(f"{found.folder}: {found.problem}")
    return None


def restore_done(run: str | Path) -> list[int]:
    """Write the DONE_ files that good checkpoints lack, as a copy without empty files does; return their steps.

    Call it while nobody else writes to the folder. Raises InputError if one cannot be written.
    """
    run = Path(run)
    lacking = [step for step in steps(run) if not done_file(run, step).is_file()]
    restored = [step for step in lacking if entry(run, step).problem is None]
    for step in restored:
        with refusing(f"{done_file(run, step)}: cannot be written"):
            write_bytes(done_file(run, step), b"")
    return restored


# ----- removing -----------------------------------------------------------------------------------------------------


def prune(
    run: str | Path, *, keep: int, major_every: int, least: int = 2, known_good: set[int] | None = None
) -> list[int]:
    """Remove the checkpoints that need not be kept. Return the steps removed, ascending.

    Kept are the last `keep` good ones, at least `least`, and everything newer than these; of the older ones those whose
    step is a multiple of major_every (0: no such), the good one of the lowest validation loss, of equals the first, and
    what holds a user's files too. keep 0 keeps all. Good means that every byte was read and is right: steps in
    known_good are believed, and those that are found good here are added to it.

    Raises InputError if something cannot be removed.
    """
    run = Path(run)
    assert keep >= 0 and major_every >= 0 and least >= 1
    known = set() if known_good is None else known_good
    found = list(entries(run, deep=False)) if keep else []

    def good(entry: Entry) -> bool:
        if entry.problem is None and entry.step not in known and check(entry.folder) is None:
            known.add(entry.step)
        return entry.problem is None and entry.step in known

    last = list(islice(filter(good, reversed(found)), max(keep, least))) if len(found) > max(keep, least) else []
    if len(last) < max(keep, least):
        return []
    rated = sorted((e for e in found if e.val_loss is not None), key=lambda e: (e.val_loss, e.step))
    kept = {e.step for e in islice(filter(good, rated), 1)}  # no more are looked at
    kept |= {e.step for e in found if major_every and e.step % major_every == 0}
    removed = [e for e in found if e.step < last[-1].step and e.step not in kept and _is_ours(e.folder)]
    for e in removed:
        _remove_checkpoint(run, e.step)
        known.discard(e.step)
    return [e.step for e in removed]


def _remove_checkpoint(run: Path, step: int) -> None:
    """Remove one; killed in between, leave a checkpoint that is removed another time, or a folder for `clean`."""
    try:
        done_file(run, step).unlink(missing_ok=True)
        sync(run)
        model_file(run, step).unlink(missing_ok=True)
        hidden = _hidden(run, step, "tmp")
        os.rename(state_folder(run, step), hidden)
        _remove(hidden)
    except OSError as error:
        raise InputError(f"{run}: the checkpoint of step {step} cannot be removed: {_cause(error)}") from error


def clean(run: str | Path) -> None:
    """Remove what a process that was killed while saving left behind: hidden folders, hidden files of exported models.

    A checkpoint that had been moved aside, and whose successor never came, gets its name back. Call it while nobody
    else writes to the folder. Raises InputError if something cannot be removed.
    """
    run = Path(run)
    try:
        names = sorted(os.listdir(run)) if run.is_dir() else []
        for name in names:
            match = _LEFTOVER.fullmatch(name)
            target = state_folder(run, int(match[1])) if match else run
            if match and match[2] == "old" and not os.path.lexists(target):
                os.rename(run / name, target)
            elif match or _LEFTOVER_FILE.fullmatch(name):
                _remove(run / name)
    except OSError as error:
        raise InputError(f"{run}: what an interrupted save left cannot be removed: {_cause(error)}") from error

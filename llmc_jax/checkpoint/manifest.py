"""The manifest of a checkpoint: digests of every array, of every other file and of itself; and the metadata beside it.

Format 2 has digests of BLOCKS equal blocks of an array of a flat buffer's size, whatever devices held it, and one of
any other array. These cover the arrays' files.

Reads and checks what it says. Leaves out the arrays' files (arrays.py) and what makes a checkpoint complete (store.py).
Needs neither orbax nor JAX.
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError
from llmc_jax.base.plain import Count, from_json, to_json
from llmc_jax.checkpoint.contents import FORMAT
from llmc_jax.models.tensors import BLOCKS, FLAT_MULTIPLE

MANIFEST, METADATA = "MANIFEST.json", "run.json"
DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint32")
LARGEST = 1 << 24  # bytes of a manifest; a real one has some 30 KB; more is not read
THREADS = min(4, os.cpu_count() or 1)  # SHA-256 takes about a second for 2 GB, and hashlib lets other threads run

NAME = re.compile(r"[A-Za-z0-9_]+(/[A-Za-z0-9_]+)*")  # of a tensor
Digest = Annotated[str, lambda text: re.fullmatch("[0-9a-f]{64}", text) is not None]
Length = Annotated[int, lambda length: 0 < length < 1 << 63]


class Tensor(NamedTuple):
    """What the manifest says of an array. sha256: of its equal blocks, little-endian bytes in C order.

    parts: files of equal size that hold its elements one after the other: 1, or BLOCKS where each block has its own.
    """

    shape: tuple[Length, ...]
    dtype: Annotated[str, DTYPES.__contains__]
    sha256: tuple[Digest, ...]
    parts: int = 1

    @property
    def size(self) -> int:
        """Return the elements of the array."""
        return math.prod(self.shape)

    @property
    def block(self) -> int:
        """Return the elements of a block."""
        return self.size // len(self.sha256)


class File(NamedTuple):
    """What the manifest says of a file."""

    size: Count  # bytes
    sha256: Digest


class Manifest(NamedTuple):
    """A checked manifest. files: by path relative to the state folder, with /; those of arrays are not among them."""

    step: Count
    tensors: dict[str, Tensor]
    files: dict[str, File]


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name in DTYPES."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def digest_of_bytes(data: bytes) -> File:
    """Return size and digest of some bytes."""
    return File(len(data), hashlib.sha256(data).hexdigest())


def in_threads[T, R](action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what an action gives for each item, several at a time."""
    items = list(items)
    if len(items) < 2:
        return [action(item) for item in items]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(action, items))


def blocks_of(shape: tuple[int, ...]) -> int:
    """Return how many blocks an array has: those of a flat buffer, or one."""
    size = math.prod(shape)
    return BLOCKS if size and size % FLAT_MULTIPLE == 0 else 1


def digest_of_block(block: np.ndarray) -> str:
    """Return the digest of a 1-D array."""
    return hashlib.sha256(block.view(np.uint8).data).hexdigest()


def describe(array: np.ndarray) -> Tensor:
    """Return what the manifest says of an array."""
    blocks = np.ascontiguousarray(array).reshape(blocks_of(array.shape), -1)
    return Tensor(array.shape, array.dtype.name, tuple(in_threads(digest_of_block, blocks)))


@contextmanager
def opened_regular(path: Path) -> Iterator[Any]:
    """Open a regular file for reading; a pipe, which would wait, or a link is refused."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FormatError(f"{path.name}: is not a regular file")
        yield file


def digest_of_file(path: Path) -> File:
    """Return size and digest of a file, of the bytes that were read."""
    with opened_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(file.tell(), digest)


def _read(path: Path, limit: int) -> bytes:
    """Return a file's bytes, if there are at most `limit`."""
    with opened_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # for read(limit) would allocate that much
        data = file.read(size + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise FormatError(f"{path.name}: is larger than the {limit:,} bytes expected")
    return data


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the bytes of a folder's files, at any depth, by relative path with /; -1 for what is no regular file."""
    sizes = {}
    for parent, folders, files in os.walk(folder, onerror=_raise):
        for name in files + [name for name in folders if os.path.islink(os.path.join(parent, name))]:
            path = Path(parent, name)
            status = path.lstat()
            sizes[path.relative_to(folder).as_posix()] = status.st_size if stat.S_ISREG(status.st_mode) else -1
    return sizes


def _raise(error: OSError) -> None:
    raise error


def dump(data: Mapping[str, Any]) -> bytes:
    """Return the bytes of a JSON file of a checkpoint."""
    return json.dumps(data, indent=1).encode() + b"\n"


def dump_manifest(manifest: Manifest) -> bytes:
    """Return JSON whose last field is the digest of the same JSON without that field."""
    body = {"format": FORMAT, **to_json(manifest)}
    return dump({**body, "sha256": hashlib.sha256(dump(body)).hexdigest()})


def parse_manifest(raw: bytes) -> Manifest:
    """Return the manifest of what `dump_manifest` gave.

    Raises FormatError for anything else: every byte counts.
    """
    try:
        data = json.loads(raw.decode("ascii"))
        digest = data.pop("sha256") if isinstance(data, dict) else None
        sound = isinstance(digest, str) and digest == hashlib.sha256(dump(data)).hexdigest()
        sound = sound and raw == dump({**data, "sha256": digest})
    except (ValueError, KeyError, RecursionError):
        sound = False
    if not sound:
        raise FormatError(f"{MANIFEST}: damaged: it does not agree with the digest of itself that it holds")
    form = data.get("format")
    if type(form) is not int or form != FORMAT:
        raise FormatError(f"{MANIFEST}: format {form!r:.80}; this program reads format {FORMAT}")
    try:
        manifest: Manifest = from_json(Manifest, {name: value for name, value in data.items() if name != "format"})
    except ValueError:
        manifest = Manifest(0, {}, {})  # which holds no METADATA
    names = all(map(NAME.fullmatch, manifest.tensors)) and not any(map(_leads_elsewhere, manifest.files))
    whole = (
        METADATA in manifest.files and MANIFEST not in manifest.files and all(map(_is_sound, manifest.tensors.values()))
    )
    if not names or not whole:
        raise FormatError(f"{MANIFEST}: its fields are not those of format {form}")
    return manifest


def _is_sound(tensor: Tensor) -> bool:
    """Return whether an array has the blocks of its size, and as many parts as such an array can have."""
    parts = (1, BLOCKS) if len(tensor.sha256) == BLOCKS and len(tensor.shape) == 1 else (1,)
    return len(tensor.shape) <= 32 and len(tensor.sha256) == blocks_of(tensor.shape) and tensor.parts in parts


def _leads_elsewhere(path: str) -> bool:
    return bool({"", ".", ".."} & set(path.split("/"))) or "\0" in path


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a state folder, checked. Raises FormatError or OSError."""
    return parse_manifest(_read(folder / MANIFEST, LARGEST))


def read_metadata(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the JSON of a state folder's metadata, compared with the manifest. Raises FormatError or OSError."""
    expected = manifest.files[METADATA]
    raw = _read(folder / METADATA, expected.size)
    if digest_of_bytes(raw) != expected:
        raise FormatError(f"{METADATA}: damaged: its SHA-256 is not that in the manifest")
    try:
        stored = json.loads(raw)
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("step")) != (FORMAT, manifest.step):
        raise FormatError(f"{METADATA}: this is no metadata of format {FORMAT} and step {manifest.step}")
    return stored


def val_loss_of(stored: Mapping[str, Any]) -> float | None:
    """Return the validation loss in the metadata, where it is a number that can be compared."""
    loss = stored.get("val_loss")
    return loss if isinstance(loss, float) and math.isfinite(loss) else None

"""From any checkpoint that can be opened to each format that can be written, a slice at a time, and checked.

What is written is read back and compared before it gets its name. Leaves out the command line (convert.py) and the
formats themselves.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import InputError
from llmc_jax.base.files import complete_file, made_folder, refuse_existing, refusing
from llmc_jax.checkpoint import exchange, hugging_face, llmc, llmc_state, store
from llmc_jax.checkpoint.llmc import bf16_to_fp32, fp32_to_bf16
from llmc_jax.checkpoint.llmc_state import OurState
from llmc_jax.checkpoint.manifest import dtype_of
from llmc_jax.checkpoint.reading import chunks, not_finite
from llmc_jax.checkpoint.source import Slice, Source, SpecialTokens, gpt2_shape, slices
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.data.tokenizers import Tokenizer, drawable, known_eot
from llmc_jax.models.layout import flat_size
from llmc_jax.models.tensors import BLOCKS

DIFFERS = "not written: what was read back differs from what was written; is the disk sound?"


class Outcome(NamedTuple):
    """The outcome of a conversion, in words: the output, what to know of it, and the weights' digest."""

    wrote: str
    warnings: tuple[str, ...]
    digest: str


# ----- slices on their way ------------------------------------------------------------------------------------------


@dataclass
class Passage:
    """The weights on their way from a source to an output of a precision, and what was seen of them.

    dtype: "fp32" or "bf16". After every slice was taken: digests of what the output must hold, and by tensor how many
    values are not finite.
    """

    source: Source
    dtype: str
    digests: dict[tuple[str, int], bytes] = field(default_factory=dict)
    padding: bytes = b""
    nonfinite: dict[str, int] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """Return where the output's values come from: the copy is what a bf16 run has computed with."""
        with_copy = self.dtype == "bf16" and self.source.dtype == "bf16" and "copy" in self.source.groups
        return "copy" if with_copy else "params"

    def take(self, piece: Slice) -> np.ndarray:
        """Return a slice as float32, rounded if the output is bf16."""
        values = self.source.read(self.group, piece.tensor, piece.layer)
        if self.dtype == "bf16":
            values = rounded(values)
        self.nonfinite[piece.tensor] = self.nonfinite.get(piece.tensor, 0) + not_finite(values)
        if piece.tensor == "wte":
            self.padding = digest_of(values[self.source.config.vocab_size :])
            self.digests["wte", 0] = digest_of(values[: self.source.config.vocab_size])
        else:
            self.digests[piece.tensor, piece.layer] = digest_of(values)
        return values

    def warnings(self) -> tuple[str, ...]:
        """Return what is allowed in a checkpoint, but never there in a sound one."""
        return llmc.oddities(self.source.config, self.nonfinite)

    @property
    def digest(self) -> str:
        """Return one digest of all weights, whatever the format and the order of reading: 16 hex digits.

        The slices' digests in the order of models/gpt2/tensors.Params, without the padding rows of wte, hashed once
        more.
        """
        parts = (self.digests[piece.tensor, piece.layer] for piece in slices(self.source.config))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]

    def outcome(self, out: Path, what: str) -> Outcome:
        """Return what was done, once it was read back and found right."""
        wrote = f"{out}: {what} ({self.dtype}), {size_of(out):,} bytes"
        return Outcome(wrote, self.warnings(), self.digest)


def passed(source: Source) -> Passage:
    """Return the passage of all of a source's slices as they are."""
    passage = Passage(source, "fp32")
    for piece in slices(source.config):
        passage.take(piece)
    return passage


def digest_of(values: np.ndarray) -> bytes:
    """Return the SHA-256 of float32 values, little-endian and row-major."""
    return hashlib.sha256(np.ascontiguousarray(values).view(np.uint32).astype("<u4", copy=False).data).digest()


def rounded(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bf16, as float32."""
    result = np.empty(values.shape, np.float32)
    for old, new in zip(chunks(values.reshape(-1)), chunks(result.reshape(-1)), strict=True):  # little memory beside
        new[:] = bf16_to_fp32(fp32_to_bf16(old))
    return result


def check_written(passage: Passage, back: Source, out: Path, padding: bool) -> None:
    """Compare what was read back with what passed. padding: the padding rows too. Raises InputError."""
    config, found = passage.source.config, passed(back)
    theirs = back.config
    if not padding and isinstance(theirs, ModelConfig) and isinstance(config, ModelConfig):
        theirs = replace(theirs, padded_vocab_size=config.padded_vocab_size)
    if theirs != config or found.digests != passage.digests or (padding and found.padding != passage.padding):
        raise InputError(f"{out}: {DIFFERS}")


# ----- llm.c's model files ------------------------------------------------------------------------------------------


def to_model(source: Source, out: Path, dtype: str, force: bool) -> Outcome:
    """Write an llm.c model file, version 3 (fp32) or 5 (bf16)."""
    config = gpt2_shape(source.config, llmc.FILES)
    refuse_existing(out, force)
    passage, version, header = Passage(source, dtype), 3 if dtype == "fp32" else 5, _header_of(source)
    with llmc.new_file(out) as temporary:
        with temporary.open("xb") as file:
            llmc.dump_pieces(file, config, map(passage.take, slices(source.config)), version, header)
        back = llmc.open_model(temporary)
        if not np.array_equal(back.header, llmc.make_header(config, version, header)):
            raise InputError(f"{out}: {DIFFERS}")
        check_written(passage, open_source(temporary), out, padding=True)
    return passage.outcome(out, f"llm.c model, version {version}")


def _header_of(source: Source) -> np.ndarray | None:
    """Return the header of the llm.c model file that a source is or holds: unknown integers are kept."""
    if source.kind == "llmc-state":
        return source.opened.model.header
    return source.opened.header if source.kind == "llmc-model" else None


# ----- Hugging Face's folders ---------------------------------------------------------------------------------------


def to_hugging_face(
    source: Source, out: Path, dtype: str, files: Mapping[str, bytes], special: SpecialTokens, settings: dict[str, Any]
) -> Outcome:
    """Write a folder as transformers does it. files: of a tokenizer. special, settings: for config.json."""
    passage, config = Passage(source, dtype), gpt2_shape(source.config, "Hugging Face's folders of GPT-2")
    with new_folder(out) as temporary:
        hugging_face.write_folder(temporary, config, dtype, passage.take, special, settings)
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        check_written(passage, open_source(temporary), out, padding=False)
    return passage.outcome(out, "Hugging Face GPT-2")


def to_orbax(source: Source, out: Path, dtype: str) -> Outcome:
    """Write a checkpoint that orbax reads, of the model's named tensors."""
    passage = Passage(source, dtype)
    with new_folder(out) as temporary:
        exchange.write_folder(temporary, source, hugging_face.TORCH_NAMES[dtype], passage.take)
        check_written(passage, open_source(temporary), out, padding=True)
    return passage.outcome(out, "orbax checkpoint")


def special_tokens(source: Source, tokenizer: Tokenizer | None, named: bool = False) -> SpecialTokens:
    """Return the ids that begin and end a text: the source's, else the tokenizer's, else by the vocabulary's size.

    The source's only if none is a row of padding, and not for a tokenizer that was named in the place of its own.
    """
    found, limit = source.special or SpecialTokens(None, None), drawable(tokenizer, source.config.vocab_size)
    eos = found.eos if isinstance(found.eos, list) else [found.eos]
    ids = [token for token in (found.bos, *eos) if token is not None]
    if tokenizer is not None and (named or not ids or max(ids) >= limit):
        return SpecialTokens(tokenizer.eot, tokenizer.eot)
    eot = known_eot(source.config.vocab_size)
    return source.special or SpecialTokens(eot, eot)


def size_of(out: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    return sum(path.stat().st_size for path in ([out] if out.is_file() else out.rglob("*")) if path.is_file())


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder beside `out`, which becomes `out`, synced, if the block ends without an error.

    Raises InputError, also where there is something of that name.
    """
    out = out.absolute()
    if os.path.lexists(out):
        raise InputError(f"{out}: exists already; remove it, or give another name")
    if not out.parent.is_dir():
        raise InputError(f"{out}: cannot be written: there is no folder {out.parent}; make it first")
    with refusing(f"{out}: cannot be written", "free space, or give another name"), complete_file(out) as temporary:
        temporary.mkdir()
        yield temporary


# ----- training states ----------------------------------------------------------------------------------------------


def state_of(source: Source) -> OurState:
    """Return a training state, of llm.c's or ours, as one of ours."""
    if source.kind == "llmc-state":
        return llmc_state.to_state(source)
    checkpoint: store.Checkpoint = source.opened
    return OurState(source, checkpoint.metadata, int(checkpoint.read("updates")))


def to_state(source: Source, run: Path, force: bool) -> Outcome:
    """Write a training state of ours into a run folder, which is made where there is none."""
    found = state_of(source)
    step = found.metadata.step
    refuse_existing(store.state_folder(run, step), force)
    with refusing(f"{run}: cannot be written", "free space, or give the folder of a run, new or not"), made_folder(run):
        small = {"step": np.array(step, np.int32), "updates": np.array(found.updates, np.int32)}
        dtypes = {group: hugging_face.TORCH_NAMES[source.stored_dtype(group)] for group in source.groups}
        buffers = {group: (flat_size(source.config), dtype) for group, dtype in dtypes.items()}
        writing = store.begin(run, step, small, found.metadata.to_json(), buffers)
        try:
            digests = {group: write_buffer(writing.folder, group, source) for group in buffers}
            folder = store.seal(writing, digests=[digests])
        finally:
            store.abandon(writing)
    final = passed(open_source(folder))
    wrote = f"{folder}: training state of llmc-jax, step {step} ({source.dtype}), {size_of(folder):,} bytes"
    return Outcome(wrote, found.warnings + final.warnings(), final.digest)


def write_buffer(folder: Path, group: str, source: Source) -> dict[int, str]:
    """Write a flat buffer of a state, and read it back; return the digests of its blocks. Takes the buffer's memory."""
    flat = flat_parameters(source, group)
    if source.stored_dtype(group) == "bf16":  # on the bits: no payload of a NaN is lost
        flat = (flat.view(np.uint32) >> 16).astype(np.uint16).view(dtype_of("bfloat16"))
    digests = store.write_blocks(folder, group, dict(enumerate(flat.reshape(BLOCKS, -1))))
    store.read_back(folder, group, (flat.size, flat.dtype.name), digests)
    return digests


def to_llmc_state(source: Source, folder: Path, processes: int | None, zero: bool | None, force: bool) -> Outcome:
    """Write llm.c's model_*, state_*_* and DONE_* files into a folder, from which it resumes with -y 1."""
    found = state_of(source)
    paths, warnings = llmc_state.write_llmc_state(folder, found, processes=processes, zero=zero, force=force)
    final = passed(open_source(folder, step=found.metadata.step))
    total = sum(path.stat().st_size for path in paths)
    wrote = f"{folder}: training state of llm.c, step {final.source.step} ({final.source.dtype}), {total:,} bytes"
    warnings = (*found.warnings, *warnings, *final.warnings())
    return Outcome(wrote, tuple(dict.fromkeys(warnings)), final.digest)

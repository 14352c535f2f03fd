"""The commands of convert_checkpoint.py: look into a checkpoint of any format, and turn one into another.

Leaves out the formats and the converting itself (checkpoint/conversion.py).
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import read_json_object
from llmc_jax.base.kit import print_json
from llmc_jax.base.options import own
from llmc_jax.base.parsers import JSON, Parser, commands_line
from llmc_jax.checkpoint import conversion
from llmc_jax.checkpoint.conversion import Outcome, Passage
from llmc_jax.checkpoint.hugging_face import LARGEST_CONFIG
from llmc_jax.checkpoint.reading import chunks
from llmc_jax.checkpoint.source import Slice, Source, slices_of
from llmc_jax.checkpoint.sources import open_source
from llmc_jax.checkpoint.tokenizer import choose_tokenizer, folder_of
from llmc_jax.config.model import CAUSAL, attention_of
from llmc_jax.data.hf_tokenizer import FILES, files_of
from llmc_jax.data.tokenizers import Choice, load_tokenizer
from llmc_jax.models.layout import head_spec, letters, num_parameters, tensor_specs

DESCRIPTION = """\
Look into a checkpoint of any format, and convert between them: llm.c's model files and training states, training states
of llmc-jax, GPT-2 of Hugging Face (a folder, gpt2, hf:OWNER/NAME), nanoGPT's ckpt.pt, orbax's folders, random weights
(d12). An output has its name only when it is complete and was checked.

Training states of llm.c's and of llmc-jax's become each other, and models: fp32 from their master weights, bf16 from
the 16-bit weights that they computed with. From a model a run begins with train.py -e."""

SIZES = {"L": "num_layers", "NH": "num_heads", "C": "channels"}  # by their letters
TARGETS = {
    "llmc": "a model file of llm.c, version 3 (fp32) or 5 (bf16)",
    "llmc-state": "a folder with a training state of llm.c",
    "state": "a run folder with a training state of llmc-jax",
    "hf": "a folder of Hugging Face's transformers",
    "orbax": "a checkpoint of orbax's, for other JAX programs",
}
WORDS = {"params": "weights", "m": "m (mean)", "v": "v (mean square)", "copy": "16-bit weights"}
KINDS = {
    "llmc-model": "llm.c model",
    "llmc-state": "training state of llm.c",
    "state": "training state of llmc-jax",
    "hugging-face": "Hugging Face GPT-2",
    "nanogpt": "nanoGPT checkpoint",
    "orbax": "orbax checkpoint",
    "random": "random weights",
}


# ----- inspect ------------------------------------------------------------------------------------------------------


class Stats(NamedTuple):
    """Figures of a tensor's values; min to std are of the finite ones (NaN where there are none)."""

    min: float
    max: float
    mean: float
    std: float
    nan: int
    inf: int


def tensor_stats(parts: Iterable[np.ndarray]) -> Stats:
    """Return statistics of a tensor that comes in float32 parts, by sums in float64 of the distances from a value."""
    count, shift, total, squares, low, high, nan, inf = 0, 0.0, 0.0, 0.0, math.inf, -math.inf, 0, 0
    for chunk in chain.from_iterable(chunks(part.reshape(-1)) for part in parts):
        nan += int(np.count_nonzero(np.isnan(chunk)))
        inf += int(np.count_nonzero(np.isinf(chunk)))
        finite = chunk[np.isfinite(chunk)].astype(np.float64)
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            shift = shift if count else float(finite[0])
            count, finite = count + finite.size, finite - shift
            total, squares = total + float(finite.sum()), squares + float((finite**2).sum())
    if not count:
        return Stats(math.nan, math.nan, math.nan, math.nan, nan, inf)
    mean = total / count
    return Stats(low, high, shift + mean, math.sqrt(max(0.0, squares / count - mean**2)), nan, inf)


def _headline(source: Source) -> str:
    master = " with float32 master weights" if "copy" in source.groups else ""
    precision = f"{source.dtype}{master}" + ("" if source.step is None else f", step {source.step}")
    if source.kind == "llmc-model":
        precision = f"version {source.opened.version} ({source.dtype})"
    return f"{source.path}: {KINDS[source.kind]}, {precision}, N={num_parameters(source.config):,}"


def _tensors(source: Source, passage: Passage) -> Iterator[tuple[str, str, dict[str, Any], Stats]]:
    """Yield group, name, shape, dtype and place in llm.c's file, and figures of each tensor.

    The weights go through the passage.
    """
    in_file = source.opened.tensors if source.kind == "llmc-model" else {}

    def read(group: str, piece: Slice) -> np.ndarray:
        return passage.take(piece) if group == "params" else source.read(group, piece.tensor, piece.layer)

    for group in source.groups:
        for spec in tensor_specs(source.config):
            about = {"shape": spec.shape, "type": source.stored_dtype(group)}
            about |= {"byte": in_file[spec.name].offset} if in_file else {}
            yield group, spec.name, about, tensor_stats(read(group, piece) for piece in slices_of(spec))


def inspect(path: Path, step: int | None, as_json: bool, model_file: str = "") -> None:
    """Print what a checkpoint holds: its shape and, for each tensor, place and statistics; and a digest of it all."""
    source = open_source(path, step=step, model_file=model_file)
    passage = Passage(source, "fp32")
    found = _tensors(source, passage)
    if as_json:
        print_json(_inspection(source, passage, found))
        return
    print(_headline(source))
    c, sizes = source.config, letters(source.config)
    print(
        f"max_seq_len {c.max_seq_len}, vocab_size {c.vocab_size} (padded {head_spec(c).shape[0]})"
        + "".join(f", {name} {sizes[letter]}" for letter, name in SIZES.items() if letter in sizes)
        + (f", {spec.words}" if (spec := attention_of(c)) != CAUSAL else "")
    )
    place = f"{'byte':>14} " if source.kind == "llmc-model" else ""
    head = "".join(f"{name:>11} " for name in Stats._fields[:4]) + f"{'NaN':>7} {'inf':>7}"
    before = ""
    for group, name, about, stats in found:
        if group != before:
            print(f"\n{WORDS.get(group, group)}\n{'tensor':<9} {'shape':<18} type {place}{head}")
            before = group
        numbers = "".join(f"{value:>11.4g} " for value in stats[:4])
        byte = f"{about['byte']:>14,} " if place else ""
        line = f"{name:<9} {about['shape']!s:<18} {about['type']} {byte}{numbers}{stats.nan:>7,} {stats.inf:>7,}"
        print(line, flush=True)
    print()
    _print_warnings((*source.warnings, *passage.warnings()), sys.stdout)
    print(f"digest of the weights: {passage.digest}")


def _inspection(
    source: Source, passage: Passage, found: Iterable[tuple[str, str, dict[str, Any], Stats]]
) -> dict[str, Any]:
    """Return what --json prints. Numbers that are not finite are null."""
    tensors: dict[str, dict[str, Any]] = {group: {} for group in source.groups}
    for group, name, about, stats in found:
        finite = {each: value if math.isfinite(value) else None for each, value in stats._asdict().items()}
        tensors[group][name] = about | finite
    return {
        "path": str(source.path), "kind": source.kind, "model": vars(source.config), "dtype": source.dtype,
        "step": source.step, "parameters": num_parameters(source.config), "tensors": tensors,
        "warnings": [*source.warnings, *passage.warnings()], "digest": passage.digest,
    }  # fmt: skip


def _print_warnings(warnings: Iterable[str], stream: TextIO) -> None:
    for line in warnings:
        print(f"warning: {line}", file=stream)


# ----- convert ------------------------------------------------------------------------------------------------------


def _target(args: argparse.Namespace) -> str:
    if args.to or args.out.suffix == ".bin":
        return str(args.to or "llmc")
    choices = "; ".join(f"--to {name}: {words}" for name, words in TARGETS.items())
    raise InputError(f"{args.out}: its name does not say what it becomes; {choices}")


def _output_dtype(source: Source, target: str, wanted: str | None) -> str:
    """Return fp32 or bf16: as --dtype says, else as the source's weights are; fp16 widens to fp32."""
    if target not in ("state", "llmc-state"):
        return wanted or ("bf16" if source.dtype == "bf16" else "fp32")
    if source.kind not in ("state", "llmc-state"):
        what = KINDS[source.kind]
        raise InputError(f"{source.path}: {what}, not a training state; a run begins from it with train.py -e")
    if target == source.kind == "state":
        raise InputError(f"{source.path}: is a training state of llmc-jax already; copy the folder and its DONE_ file")
    if wanted not in (None, source.dtype):
        raise InputError(f"{source.path}: a training state stays {source.dtype}; leave out --dtype {wanted}")
    return source.dtype


def _tokenizer_files(source: Source, asked: str | None) -> tuple[Choice, dict[str, bytes]]:
    """Return the tokenizer of a folder of Hugging Face's that is to be written, and its files; say where it comes from.

    It is read and checked before anything is written: the checkpoint's own, or what --tokenizer names; or the one that
    the vocabulary suggests, never in the place of an own one.
    """
    choice = load_tokenizer(asked, source.config.vocab_size) if asked else choose_tokenizer(source, "auto")
    files: dict[str, bytes] = {}
    if source.kind == "hugging-face" and not asked:
        files = {name: path.read_bytes() for name in FILES if (path := folder_of(source) / name).is_file()}
        why = f", which are not read here: {choice.note}" if choice.tokenizer is None else ""
        note = f"the files of {folder_of(source)}{why}" if files else "IN has none"
        choice = choice._replace(note=note) if files else Choice(None, note)
    elif choice.tokenizer is not None:
        try:
            files = files_of(choice.tokenizer, source.config.max_seq_len)
        except InputError as error:
            raise InputError(f"{choice.note}: {error}; --tokenizer none leaves it out") from None
    print(f"{'read    tokenizer: ' if files else 'note    no tokenizer is written: '}{choice.note}")
    return choice, files


def convert(args: argparse.Namespace) -> None:
    """Turn one checkpoint into another; print what was read, written and checked."""
    target = _target(args)
    source = open_source(args.source, step=args.step, model_file=args.model_file)
    dtype = _output_dtype(source, target, args.dtype)
    print(f"read    {_headline(source)}")
    _print_warnings(source.warnings, sys.stderr)
    outcome = _write(source, target, dtype, args)
    print(f"wrote   {outcome.wrote}")
    print("checked read back, and equal to what was written")
    print(f"digest  {outcome.digest} of the weights (`inspect` prints it too)")
    _print_warnings(outcome.warnings, sys.stderr)


def _write(source: Source, target: str, dtype: str, args: argparse.Namespace) -> Outcome:
    if target == "hf":
        choice, files = _tokenizer_files(source, args.tokenizer)
        special = conversion.special_tokens(source, choice.tokenizer, named=args.tokenizer is not None)
        kept = source.kind == "hugging-face" and args.tokenizer is None
        config = read_json_object(folder_of(source) / "config.json", LARGEST_CONFIG) if kept else {}
        settings = {name: config[name] for name in ("tokenizer_class",) if name in config}
        return conversion.to_hugging_face(source, args.out, dtype, files, special, settings)
    if args.tokenizer is not None:
        raise InputError(f"--tokenizer {args.tokenizer}: only what --to hf writes holds a tokenizer")
    if target == "llmc":
        return conversion.to_model(source, args.out, dtype, args.force)
    if target == "orbax":
        return conversion.to_orbax(source, args.out, dtype)
    if target == "state":
        return conversion.to_state(source, args.out, args.force)
    zero = None if args.zero is None else bool(args.zero)
    return conversion.to_llmc_state(source, args.out, args.processes, zero, args.force)


def debug_state(args: argparse.Namespace) -> None:
    """Write the debug state of a model and a batch, computed here."""
    from llmc_jax.checkpoint.debug_state import make_debug_state  # here, because the others do without its rooms

    source = open_source(args.model)
    loss, warnings = make_debug_state(source, args.out, args.tokens, args.batch_size, args.sequence_length, args.force)
    print(f"read    {_headline(source)}")
    print(f"wrote   {args.out}: debug state of B={args.batch_size} T={args.sequence_length}, loss {loss:.6f}")
    print("checked read back, and equal to what was written")
    _print_warnings((*source.warnings, *warnings), sys.stderr)


# ----- the command line ---------------------------------------------------------------------------------------------


FORCE = own("--force", "", False, "replace OUT if it exists: a file, or a training state in a folder")
MODEL_FILE = own("--model", "FILE.py", "", "the file of a model of your own (docs/models.md)", name="model_file")
STEP = own("--step", "N", None, "of a folder with several training states: this one, not the newest", 0)
OF_CONVERT = (
    own("source", "IN", None, ""),
    own("out", "OUT", None, ""),
    own("--to", "|".join(TARGETS), None, "what OUT becomes (llmc if it ends in .bin). "
        + "; ".join(f"{name}: {text}" for name, text in TARGETS.items())),
    own("--dtype", "fp32|bf16", None, "of the weights; as they are in IN (default)"),
    own("--tokenizer", "FILE", None, "for --to hf: take this tokenizer, not that of IN"),
    own("--processes", "N", None, "--to llmc-state: number of processes (default: as in IN, or 1)"),
    own("--zero", "0|1", None, "--to llmc-state: 1 = shared out as by llm.c's -z 1 (default: as in IN)", 0, type=int),
    FORCE,
    MODEL_FILE,
    STEP,
)  # fmt: skip


OF_DEBUG_STATE = (
    own("model", "CHECKPOINT", None, ""),
    own("out", "OUT", None, ""),
    own("--tokens", "FILE", None, "take the batch from here (default: random tokens)", type=Path),
    own("-b --batch-size", "B", 4, "rows of the batch (default 4)"),
    own("-t --sequence-length", "T", 64, "their length (default 64)"),
    FORCE,
)


def make_parser() -> Parser:
    """Return the parser of its commands."""
    parser = Parser(
        prog=typed("convert"),
        shown=(("inspect gpt2_124M.bin", "what is in it"), ("convert runs/plays model.bin", "a model file of llm.c")),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    look = commands.add_parser("inspect", help="print shape, tensors and their statistics")
    look.add([own("source", "CHECKPOINT", None, ""), JSON, MODEL_FILE, STEP])
    look.set_defaults(run=lambda args: inspect(args.source, args.step, args.json, args.model_file))
    turn = commands.add_parser("convert", help="turn one checkpoint into another")
    turn.set_defaults(run=convert)
    turn.add(OF_CONVERT)
    debug = commands.add_parser("debug-state", help="write what llm.c's test compares with: logits, loss, gradients")
    debug.set_defaults(run=debug_state)
    debug.add(OF_DEBUG_STATE)
    return parser


main = commands_line("convert", make_parser)

"""Hugging Face's GPT-2 folders: config.json and safetensors, read slice by slice and written as transformers does it.

transformers keeps linear weights as (in, out), llm.c as (out, in); it does not pad the vocabulary. Leaves out tokenizer
files (hf_tokenizer.py), PyTorch's own pytorch_model.bin, and models that are no plain GPT-2, which are refused.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from llmc_jax.base.errors import FormatError
from llmc_jax.base.files import json_text, opened, read_json_object, stamp_of
from llmc_jax.checkpoint.llmc import fp32_to_bf16, with_padding
from llmc_jax.checkpoint.reading import ITEMSIZE, Stored, read_at
from llmc_jax.checkpoint.source import Slice, Source, SpecialTokens, slices
from llmc_jax.config.model import GPT2_VOCAB, ModelConfig, pad_vocab
from llmc_jax.models.gpt2.tensors import BY_NAME

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIXES = ("_orig_mod.", "module.", "transformer.")  # of torch.compile, of DistributedDataParallel, of the model
HEAD, WTE = "lm_head.weight", BY_NAME["wte"].hugging_face
LARGEST_CONFIG, LARGEST_INDEX = 1 << 20, 100_000_000  # bytes
LARGEST_SIZE = 2**31 - 1
SIZES = {
    "max_seq_len": "n_positions", "vocab_size": "vocab_size", "num_layers": "n_layer", "num_heads": "n_head",
    "channels": "n_embd",
}  # fmt: skip
FLOATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # what can be read here as float32
METADATA = "__metadata__"
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BUFFERS = re.compile(r"h\.[0-9]+\.attn\.(bias|masked_bias)")  # the causal mask, which older files hold

# What this model is: other values mean another model. None: where the key is missing, which older folders do.
EXPECTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2", None),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", None),  # both are GELU in its tanh form
    "layer_norm_epsilon": (1e-5, None),
    "scale_attn_weights": (True, None),
    "scale_attn_by_inverse_layer_idx": (False, None),
    "add_cross_attention": (False, None),
}


def name_in_block(tensor: str, layer: int) -> str:
    """Return transformers' name of a slice, without the prefix."""
    row = BY_NAME[tensor]
    return f"h.{layer}.{row.hugging_face}" if row.layered else row.hugging_face


# ----- reading ------------------------------------------------------------------------------------------------------


def read_config(path: Path) -> tuple[ModelConfig, bool, SpecialTokens]:
    """Return what a config.json says: the shape, with the vocabulary padded, whether the head is tied, the ids.

    Tied: the output head is the token embedding, so that a file need hold one of the two only.
    Raises FormatError if it is missing, unreadable, or describes anything but a plain GPT-2.
    """
    found = read_json_object(path, LARGEST_CONFIG)
    for key, allowed in EXPECTED.items():
        value = found.get(key)
        if value not in allowed or (isinstance(value, int) and type(value) not in map(type, allowed)):
            raise FormatError(f"{path}: {key} is {value!r}; this model has {allowed[0]!r}, so it cannot be converted")
    config = config_of(path, found, SIZES)
    inner = found.get("n_inner")
    if inner not in (None, 4 * config.channels):
        raise FormatError(f"{path}: n_inner is {inner!r}; this model's MLP has 4 x n_embd = {4 * config.channels}")
    tied = found.get("tie_word_embeddings", True)
    if type(tied) is not bool:
        raise FormatError(f"{path}: tie_word_embeddings is {tied!r}; expected true or false")
    return config, tied, _special_tokens(path, found, config.vocab_size)


def _special_tokens(path: Path, found: Mapping[str, Any], V: int) -> SpecialTokens:
    """Return the ids of a config.json; of one that lacks them, those that transformers puts in: GPT-2's."""
    ids = {}
    for key in ("bos_token_id", "eos_token_id"):
        value = ids[key] = found.get(key, GPT2_VOCAB - 1 if V >= GPT2_VOCAB else None)
        several = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if value is not None and not all(type(each) is int and 0 <= each <= LARGEST_SIZE for each in several):
            raise FormatError(f"{path}: {key} is {value!r}; expected an id")
    return SpecialTokens(ids["bos_token_id"], ids["eos_token_id"])


def config_of(path: Path, found: Mapping[str, Any], names: Mapping[str, str]) -> ModelConfig:
    """Return the shape that a file gives under these names, with the vocabulary padded. Raises FormatError."""
    sizes: dict[str, Any] = {ours: found.get(theirs) for ours, theirs in names.items()}
    for ours, value in sizes.items():
        if type(value) is not int or not 1 <= value <= LARGEST_SIZE:
            expected = f"expected a whole number from 1 to {LARGEST_SIZE:,}"
            raise FormatError(f"{path}: {names[ours]} is {value!r}; {expected}")
    if sizes["channels"] % sizes["num_heads"]:
        raise FormatError(f"{path}: n_embd {sizes['channels']} is not a multiple of n_head {sizes['num_heads']}")
    return ModelConfig(padded_vocab_size=pad_vocab(sizes["vocab_size"]), **sizes)


def open_folder(folder: Path) -> Source:
    """Open a folder as transformers' `save_pretrained` writes it, with model.safetensors in one file or several.

    Raises FormatError if it is not a plain GPT-2, tensors are missing or too many, or have the wrong shape.
    """
    described = read_config(folder / "config.json")
    if (folder / INDEX).is_file():
        return _source(folder, folder / INDEX, described, read_index(folder / INDEX))
    if not (folder / WEIGHTS).is_file():
        pickled = "; transformers' save_pretrained writes it of a pytorch_model.bin, a pickle, which is not opened here"
        raise FormatError(f"{folder}: has config.json, but neither {WEIGHTS} nor {INDEX}{pickled}")
    return _source(folder, folder / WEIGHTS, described, read_archive(folder / WEIGHTS))


def open_file(path: Path) -> Source:
    """Open a .safetensors file of any name. Its config.json, which says the number of heads, lies beside it."""
    tensors = read_archive(path)
    if not (path.parent / "config.json").is_file():
        raise FormatError(f"{path}: there is no config.json beside it, which alone says how many heads the model has")
    return _source(path, path, read_config(path.parent / "config.json"), tensors)


def _source(
    shown: Path, path: Path, described: tuple[ModelConfig, bool, SpecialTokens], stored: Mapping[str, Stored]
) -> Source:
    config, tied, special = described
    source = source_of(path, "hugging-face", config, stored, "config.json", conv1d=True, tied=tied)
    return source._replace(path=shown, special=special)


def source_of(
    path: Path,
    kind: str,
    config: ModelConfig,
    stored: Mapping[str, Any],
    said_by: str,
    *,
    conv1d: bool = False,
    biases: bool = True,
    tied: bool = True,
) -> Source:
    """Return the source of a GPT-2 that consists of tensors by transformers' names, behind any of PREFIXES.

    stored: each has path, name, dtype, shape and whole(), as `Stored` has. said_by: what gave the shape. conv1d: linear
    weights are (in, out). biases: False if it has none; they are zero then. tied: whether the token embedding or the
    output head, alone, stands for both.
    Raises FormatError if tensors are missing, too many, of another shape or dtype, or if the output head is not the
    token embedding.
    """
    tensors: dict[str, Any] = {}
    for name, tensor in stored.items():
        while name.startswith(PREFIXES):  # in any order
            name = name.partition(".")[2]
        if name in tensors:
            raise FormatError(f"{path}: holds {name} twice, under different prefixes")
        tensors[name] = tensor
    if not tied and (HEAD in tensors) != (WTE in tensors):
        missing = WTE if HEAD in tensors else HEAD
        advice = "if embedding and output head are one tensor, set it to true"
        raise FormatError(f"{path}: {said_by} has tie_word_embeddings false, but there is no {missing}; {advice}")
    head = tensors.pop(HEAD, None)
    if head is not None:
        tensors.setdefault(WTE, head)  # where it is alone: safetensors' save_model keeps one name of a tensor with two
    if config.num_layers > len(tensors):  # before anything is made for each layer
        raise FormatError(f"{path}: holds {len(tensors):,} tensors, too few for {config.num_layers:,} layers")
    pieces = [piece for piece in slices(config) if biases or not BY_NAME[piece.tensor].bias]
    wanted = {name_in_block(piece.tensor, piece.layer): stored_shape(config, piece, conv1d) for piece in pieces}
    _check_names(path, wanted, tensors, said_by)
    for name, shape in wanted.items():
        _check_tensor(tensors[name], shape, said_by)
    if head is not None and head is not tensors[WTE]:
        _check_head(head, tensors[WTE], said_by)
    shapes = {piece.tensor: piece.shape for piece in slices(config)}

    def read(group: str, tensor: str, layer: int) -> np.ndarray:
        assert group == "params", group
        if BY_NAME[tensor].bias and not biases:
            return np.zeros(shapes[tensor], np.float32)
        values = tensors[name_in_block(tensor, layer)].whole()
        if BY_NAME[tensor].transposed and conv1d:
            return np.ascontiguousarray(values.T)
        return with_padding(values, config) if tensor == "wte" else values

    dtypes = {tensors[name].dtype for name in wanted}
    dtype = dtypes.pop() if len(dtypes) == 1 else "fp32"
    return Source(path, kind, config, dtype, None, ("params",), read, ())


def _check_tensor(tensor: Any, shape: tuple[int, ...], said_by: str) -> None:
    if tensor.shape != shape:
        raise FormatError(f"{tensor.path}: {tensor.name} has shape {tensor.shape}; by {said_by} it must be {shape}")
    if tensor.dtype not in ITEMSIZE:
        expected = "expected float32, bfloat16 or float16"
        raise FormatError(f"{tensor.path}: tensor {tensor.name} is {tensor.dtype}; {expected}")


def _check_head(head: Any, wte: Any, said_by: str) -> None:
    """Check that an output head is the token embedding: equal as float32, in whichever dtype each is kept."""
    _check_tensor(head, wte.shape, said_by)
    if head.whole().tobytes() != wte.whole().tobytes():
        dtypes = "" if head.dtype == wte.dtype else f" ({head.dtype} and {wte.dtype})"
        words = f"{head.name} differs from {wte.name}{dtypes}: the model is untied, and cannot be used here"
        raise FormatError(f"{head.path}: {words}")


def stored_shape(config: ModelConfig, piece: Slice, conv1d: bool) -> tuple[int, ...]:
    """Return the shape in which a slice is kept; conv1d: with (in, out), as transformers does."""
    if piece.tensor == "wte":
        return config.vocab_size, config.channels
    return piece.shape[::-1] if BY_NAME[piece.tensor].transposed and conv1d else piece.shape


def _check_names(path: Path, wanted: Iterable[str], found: Mapping[str, Any], said_by: str) -> None:
    """Check that a file holds the tensors of a GPT-2 of this shape and no others. said_by: what gives the shape."""
    wanted = list(wanted)
    missing = [name for name in wanted if name not in found]
    extra = sorted(name for name in set(found).difference(wanted) if not BUFFERS.fullmatch(name))
    if missing:
        words = f"lacks {len(missing)} of a GPT-2's {len(wanted)} tensors, {missing[0]} first"
        raise FormatError(f"{path}: {words}; {said_by} may belong to another model")
    if extra:
        words = f"holds {len(extra)} tensors that a plain GPT-2 with this {said_by} does not have"
        raise FormatError(f"{path}: {words}, {extra[0]!r} first")


# ----- writing ------------------------------------------------------------------------------------------------------


def config_json(config: ModelConfig, dtype: str, special: SpecialTokens) -> dict[str, Any]:
    """Return config.json as transformers writes it for such a model."""
    return {
        **{key: allowed[0] for key, allowed in EXPECTED.items()},
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.0, "bos_token_id": special.bos,
        "dtype": TORCH_NAMES[dtype], "embd_pdrop": 0.0, "eos_token_id": special.eos, "initializer_range": 0.02,
        "n_inner": None, "pad_token_id": None, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0,
        "summary_activation": None, "summary_first_dropout": 0.0, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "tie_word_embeddings": True, "use_cache": True,
    }  # fmt: skip


def write_folder(
    folder: Path,
    config: ModelConfig,
    dtype: str,
    read: Callable[[Slice], np.ndarray],
    special: SpecialTokens,
    settings: dict[str, Any],
) -> None:
    """Write config.json, generation_config.json and model.safetensors into an empty folder, one slice at a time.

    dtype: "fp32", or "bf16" (rounded to nearest, ties to even). read: gives a slice as float32 in llm.c's shape; rows V
    to Vp-1 of wte are dropped. settings: more of config.json. Raises OSError.
    """
    ids = {"bos_token_id": special.bos, "eos_token_id": special.eos}
    known = {name: value for name, value in ids.items() if value is not None}
    generation = {"_from_model_config": True, "use_cache": True, **known}
    for name, written in (
        ("config", {**config_json(config, dtype, special), **settings}),
        ("generation_config", generation),
    ):
        (folder / f"{name}.json").write_text(json_text(written), encoding="utf-8")
    # by name, as the safetensors package sorts them
    order = sorted(("transformer." + name_in_block(piece.tensor, piece.layer), piece) for piece in slices(config))

    def values() -> Iterator[np.ndarray]:
        for _, piece in order:
            array = read(piece)
            array = array[: config.vocab_size] if piece.tensor == "wte" else array
            array = np.ascontiguousarray(array.T if BY_NAME[piece.tensor].transposed else array)
            bits = array.view(np.uint32) if dtype == "fp32" else fp32_to_bf16(array)
            yield bits.astype(bits.dtype.newbyteorder("<"), copy=False)

    shapes = {name: stored_shape(config, piece, conv1d=True) for name, piece in order}
    with (folder / WEIGHTS).open("xb") as file:
        write_archive(file, {"fp32": "F32", "bf16": "BF16"}[dtype], shapes, values())


# ----- safetensors files ----------------------------------------------------------------------------------------------

# One is a uint64 (little-endian, the length of the header), the header (a JSON object: per tensor dtype, shape and the
# two ends of its bytes, and under "__metadata__" texts), and the tensors' bytes, which fill the rest without a hole.
# The safetensors package decides whether a file is sound. Values are read and files written here all the same: the
# package maps a file into memory, so that one which somebody shortens meanwhile ends the process (SIGBUS); and it
# writes a file from all of its tensors at once, 6 GB for a model of 1558M, where a slice at a time is enough.


def read_archive(path: str | Path) -> dict[str, Stored]:
    """Return the tensors that a file's header names; none of them is read, and those not in FLOATS cannot be.

    Raises FormatError if the file is missing, cut off, too long or otherwise none that the package reads.
    """
    path = Path(path)
    with opened(path) as file:
        stamp = stamp_of(file)
        try:
            with safe_open(path, "numpy"):
                pass
        except (SafetensorError, OSError) as error:
            problem = " ".join(str(error).split())
            words = f"{stamp.size:,} bytes that are no whole safetensors file: {problem}"
            raise FormatError(f"{path}: {words}; if it was cut off, copy it again") from None
        length = int.from_bytes(read_at(file, path, 0, 8), "little")
        header: dict[str, Any] = json.loads(read_at(file, path, 8, length))
    header.pop(METADATA, None)
    tensors = {}
    for name, at in header.items():
        try:
            dtype, offset = FLOATS.get(at["dtype"], at["dtype"]), 8 + length + at["data_offsets"][0]
        except TypeError:  # an array in the place of an object, which the package takes too
            raise FormatError(f"{path}: {name!r} must have dtype, shape and data_offsets; save it again") from None
        tensors[name] = Stored(path, stamp, name, dtype, tuple(at["shape"]), offset)
    return tensors


def read_index(path: str | Path) -> dict[str, Stored]:
    """Return the tensors of a model in several files, by its model.safetensors.index.json; the files lie beside it.

    Raises FormatError if the index is no such thing, names a file elsewhere, or does not agree with the files.
    """
    path = Path(path)
    places = files_of_tensors(path)
    archives = {name: read_archive(path.parent / name) for name in sorted(set(places.values()))}
    tensors = {}
    for tensor, name in places.items():
        if tensor not in archives[name]:
            raise FormatError(f"{path}: says that {name} holds {tensor!r}, which it does not")
        tensors[tensor] = archives[name][tensor]
    return tensors


def files_of_tensors(path: Path) -> dict[str, str]:
    """Return the file of each tensor by name, as an index has it. Raises FormatError if it is none, or names others."""
    places = read_json_object(path, LARGEST_INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise FormatError(f"{path}: has no weight_map from tensors to files; save the model again")
    for name in set(places.values()):
        if Path(name).name != name or "\0" in name:
            raise FormatError(f"{path}: names the file {name!r}; expected one beside it")
    return places


def write_archive(
    file: BinaryIO, dtype: str, shapes: Mapping[str, tuple[int, ...]], values: Iterable[np.ndarray]
) -> None:
    """Write a file from its tensors' shapes, by name, and in the same order their values as they are to be stored.

    Nothing but one array at a time is needed in memory. The header is padded with spaces to a multiple of 8 bytes, as
    the safetensors package does it; that package also sorts tensors of one dtype by name.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * ITEMSIZE[FLOATS[dtype]]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for (name, shape), array in zip(shapes.items(), values, strict=True):
        assert array.nbytes == math.prod(shape) * ITEMSIZE[FLOATS[dtype]], (name, array.nbytes)
        file.write(np.ascontiguousarray(array).data)

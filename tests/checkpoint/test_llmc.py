"""llm.c model files: against an independent decoder, over mutated bytes, and the atomicity of what is written."""

import struct
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import Stamp
from llmc_jax.checkpoint import llmc, reading
from llmc_jax.checkpoint.llmc import (
    ModelFile,
    bf16_to_fp32,
    fp32_to_bf16,
    open_model,
    warnings_of,
    write_model,
)
from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.layout import num_parameters, tensor_specs
from tests.checkpoint.damage import random_bits, refused

TINY = ModelConfig(max_seq_len=2, vocab_size=3, padded_vocab_size=128, num_layers=2, num_heads=2, channels=4)


# An encoder and a decoder made of struct alone, written from the description of the format (docs/checkpoints.md).


def oracle_tensors(maxT: int, V: int, L: int, C: int, rows: int) -> list[tuple[str, int]]:
    """(name, elements) in place order."""
    return [
        ("wte", rows * C), ("wpe", maxT * C), ("ln1w", L * C), ("ln1b", L * C), ("qkvw", L * 3 * C * C),
        ("qkvb", L * 3 * C), ("attprojw", L * C * C), ("attprojb", L * C), ("ln2w", L * C), ("ln2b", L * C),
        ("fcw", L * 4 * C * C), ("fcb", L * 4 * C), ("fcprojw", L * C * 4 * C), ("fcprojb", L * C),
        ("lnfw", C), ("lnfb", C),
    ]  # fmt: skip


def encode(config: ModelConfig, version: int, tensors: dict[str, list[int]]) -> bytes:
    """The bytes of a file from float32 bit patterns per tensor (bf16: their upper halves)."""
    header = [0] * 256
    header[:8] = [
        20240326, version, config.max_seq_len, config.vocab_size, config.num_layers, config.num_heads, config.channels,
        config.padded_vocab_size if version >= 3 else 0,
    ]  # fmt: skip
    out = struct.pack("<256i", *header)
    for bits in tensors.values():
        wide = struct.pack(f"<{len(bits)}I", *bits)
        out += wide if version in (1, 3) else struct.pack(f"<{len(bits)}H", *(b >> 16 for b in bits))
    return out


def decode(data: bytes) -> tuple[ModelConfig, int, list[int]] | None:
    """Shape, version and float32 bit patterns of all N parameters; None where the bytes are no valid file."""
    if len(data) < 1024:
        return None
    magic, version, maxT, V, L, NH, C, Vp = struct.unpack("<8i", data[:32])
    if magic != 20240326 or version not in (1, 3, 5) or min(maxT, V, L, NH, C) < 1 or C % NH:
        return None
    if version < 3:
        Vp = (V + 127) // 128 * 128
    if Vp < V:
        return None
    sizes = oracle_tensors(maxT, V, L, C, V if version < 3 else Vp)
    width = 4 if version in (1, 3) else 2
    if len(data) != 1024 + sum(size * width for _, size in sizes):
        return None
    at, found = 1024, {}
    for name, count in sizes:
        end = at + count * width
        if width == 4:
            found[name] = list(struct.unpack(f"<{count}I", data[at:end]))
        else:
            found[name] = [half << 16 for half in struct.unpack(f"<{count}H", data[at:end])]
        at = end
    found["wte"] += [0] * (Vp * C - len(found["wte"]))
    config = ModelConfig(maxT, V, Vp, L, NH, C)
    return config, version, [bits for name, _ in sizes for bits in found[name]]


def random_tensors(config: ModelConfig, version: int, seed: int) -> dict[str, list[int]]:
    rows = config.vocab_size if version < 3 else config.padded_vocab_size
    sizes = oracle_tensors(config.max_seq_len, config.vocab_size, config.num_layers, config.channels, rows)
    return {name: random_bits(size, seed + i).tolist() for i, (name, size) in enumerate(sizes)}


def bits_of(flat: np.ndarray) -> list[int]:
    return flat.view(np.uint32).tolist()


def read_model(path: Path) -> tuple[ModelFile, np.ndarray]:
    """An open file, and all of its weights, (N,) float32."""
    source = open_source(path)
    return source.opened, flat_parameters(source)[: num_parameters(source.config)]


def test_sizes_of_gpt2_124m() -> None:
    """The sizes of the files that llm.c itself writes (v1: from its first release, unpadded)."""
    config = ModelConfig(1024, 50257, 50304, 12, 12, 768)
    sizes = {3: 497_904_640, 5: 248_952_832, 1: 1024 + 4 * 124_439_808}
    for version, size in sizes.items():
        assert ModelFile(Path("m.bin"), Stamp(0, 0, size, 0), version, config, np.zeros(256, np.int32)).size == size


@pytest.mark.parametrize("version", [1, 3, 5])
def test_reads_what_struct_reads(tmp_path: Path, version: int) -> None:
    """Of every bit pattern, and with unknown integers in the header. Written again it is the same file."""
    path, again = tmp_path / "model.bin", tmp_path / "again.bin"
    data = with_ints(encode(TINY, version, random_tensors(TINY, version, 7)), i8=-77, i255=2**31 - 1)
    path.write_bytes(data)
    model, flat = read_model(path)
    assert (model.config, model.version, bits_of(flat)) == decode(data)
    assert flat.dtype == np.float32
    assert model.header.tobytes() == data[:1024]
    assert (open_model(path).config, open_model(path).version) == (model.config, model.version)
    if version in (3, 5):
        write_model(again, model.config, flat, version=version, header=model.header)
        assert again.read_bytes() == data


def test_chunks_and_padding_of_the_buffer_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(TINY, 5, random_tensors(TINY, 5, 5))
    (tmp_path / "a.bin").write_bytes(data)
    _, whole = read_model(tmp_path / "a.bin")
    write_model(tmp_path / "whole.bin", TINY, whole, version=5)
    warnings = warnings_of(whole, TINY)
    monkeypatch.setattr(reading, "CHUNK", 7)
    _, parts = read_model(tmp_path / "a.bin")
    write_model(tmp_path / "parts.bin", TINY, np.append(parts, np.full(99, 5, np.float32)), version=5)
    assert bits_of(parts) == bits_of(whole) and warnings_of(parts, TINY) == warnings
    assert (tmp_path / "parts.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


# bfloat16


def test_bf16_round_trip_is_exact_for_all_patterns() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(bf16_to_fp32(bits).view(np.uint32), bits.astype(np.uint32) << 16)
    np.testing.assert_array_equal(fp32_to_bf16(bf16_to_fp32(bits)), bits)


def test_bf16_rounding_against_ml_dtypes() -> None:
    bits = random_bits(1_000_000, 0)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    for pattern in (bits, ties, ties - np.uint32(1), ties + np.uint32(1)):
        values = pattern.view(np.float32)
        number = ~np.isnan(values)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
        np.testing.assert_array_equal(fp32_to_bf16(values)[number], expected[number])


def test_bf16_special_values() -> None:
    """By hand: value bits -> bf16 bits."""
    cases = {
        0x00000000: 0x0000, 0x80000000: 0x8000, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80,
        0x7F7FFFFF: 0x7F80,  # the largest float32 rounds up to infinity
        0x7F7F7FFF: 0x7F7F, 0x7F7F8000: 0x7F80,
        0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F808001: 0x3F81,  # two ties to even, one above the tie
        0x00000001: 0x0000, 0x00008000: 0x0000, 0x00018000: 0x0002, 0x807FFFFF: 0x8080,
        0x7FC12345: 0x7FC1, 0xFFA50000: 0xFFA5, 0x7F800001: 0x7FC0, 0xFF80FFFF: 0xFFC0, 0xFFFFFFFF: 0xFFFF,
    }  # fmt: skip
    found = fp32_to_bf16(np.array(list(cases), np.uint32).view(np.float32))
    assert [hex(b) for b in found.tolist()] == [hex(b) for b in cases.values()]


# Bad input


def with_ints(data: bytes, **ints: int) -> bytes:
    values = list(struct.unpack("<256i", data[:1024]))
    for key, value in ints.items():
        values[int(key[1:])] = value
    return struct.pack("<256i", *values) + data[1024:]


GOOD = encode(TINY, 3, {name: [0x3F800000] * len(bits) for name, bits in random_tensors(TINY, 3, 0).items()})
BAD = {
    "wrong magic": (with_ints(GOOD, i0=17), "starts with 17, expected magic 20240326"),
    "version 0": (with_ints(GOOD, i1=0), "version 0 .* cannot be read"),
    "version 2, of some days": (with_ints(GOOD, i1=2), "version 2 .* expected 1, or 3 or 5"),
    "negative T": (with_ints(GOOD, i2=-1), "header ints 2 to 7: .*max_seq_len is -1"),
    "no heads": (with_ints(GOOD, i5=0), "num_heads is 0"),
    "heads": (with_ints(GOOD, i5=3), "C=4 is not a multiple of .* NH=3"),
    "Vp absent": (with_ints(GOOD, i7=0), "padded_vocab_size is 0"),
    "Vp < V": (with_ints(GOOD, i7=2), "Vp=2 is smaller than V=3"),
    "short": (GOOD[:-1], "cut off"),
    "long": (GOOD + b"xy", "too long"),
    "other version": (with_ints(GOOD, i1=5), "too long, or its header is wrong"),
    "absurd": (with_ints(GOOD, **{f"i{i}": 2**31 - 1 for i in range(2, 8)}), "cut off, or its header is wrong"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with refused(path, words):
        open_model(path)


def test_warnings() -> None:
    flat = np.ones(num_parameters(TINY), np.float32)
    specs = {s.name: s for s in tensor_specs(TINY)}
    flat[TINY.vocab_size * TINY.channels : specs["wpe"].offset] = 0
    assert warnings_of(flat, TINY) == ()
    flat[specs["qkvb"].offset + 3] = np.nan
    flat[specs["fcw"].offset : specs["fcw"].offset + 2] = -np.inf
    flat[127 * TINY.channels] = np.nan
    assert warnings_of(flat, TINY) == (
        "wte: 1 of 512 values are NaN or infinite",
        "qkvb: 1 of 24 values are NaN or infinite",
        "fcw: 2 of 128 values are NaN or infinite",
    )


# Writing


def test_write_errors_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.bin"
    flat = np.ones(num_parameters(TINY), np.float32)
    write_model(path, TINY, flat)
    before = path.read_bytes()

    monkeypatch.setattr(llmc, "fp32_to_bf16", Mock(side_effect=[OSError(28, "No space left"), KeyboardInterrupt]))
    with pytest.raises(InputError, match=r"m\.bin: cannot be written: No space left"):
        write_model(path, TINY, flat, version=5)
    with pytest.raises(KeyboardInterrupt):
        write_model(path, TINY, flat, version=5)
    for target, words in ((tmp_path / "none" / "m.bin", "there is no folder"), (tmp_path, "it is a folder")):
        with pytest.raises(InputError, match=words):
            write_model(target, TINY, flat)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


# Mutated files: the reader returns what struct reads, or raises FormatError, within memory bounded by the file's size

ODD_INTS = st.one_of(
    st.integers(-3, 8),
    st.sampled_from([127, 128, 129, 2**15, 2**16, 2**24, 2**30, 2**31 - 1, -(2**31), 20240326, 20240520]),
    st.integers(-(2**31), 2**31 - 1),
)


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    maxT, V, more, L, NH, HS = (draw(st.integers(*ends)) for ends in ((1, 3), (1, 5), (0, 4), (1, 2), (1, 2), (1, 3)))
    config = ModelConfig(maxT, V, V + more, L, NH, NH * HS)
    version = draw(st.sampled_from([1, 3, 5]))
    tensors = random_tensors(config, version, draw(st.integers(0, 99)))
    data = bytearray(encode(config, version, tensors))
    for kind in draw(st.lists(st.sampled_from(["flip", "cut", "extend", "header"]), max_size=3)):
        if kind == "flip" and data:
            data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        elif kind == "extend":
            data += draw(st.binary(min_size=1, max_size=40))
        elif kind == "header" and len(data) >= 32:
            at = 4 * draw(st.integers(0, 7))
            data[at : at + 4] = struct.pack("<i", draw(ODD_INTS))
    return bytes(data)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated_files())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        model, flat = read_model(path)
        warnings = warnings_of(flat, model.config)
    except FormatError as error:
        assert decode(data) is None
        assert "\n" not in str(error)
    else:
        expected = decode(data)
        assert expected is not None and (model.config, model.version, bits_of(flat)) == expected
        assert any("NaN" in w for w in warnings) == (not np.isfinite(flat).all())
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # a one-row version 1 file grows most: one row of wte to 128
    assert peak <= 40 * len(data) + 2**20

"""safetensors files: against the safetensors package, over mutated bytes, and what is refused in which words."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.checkpoint.safetensors import (
    ITEMSIZE,
    NewTensor,
    read_archive,
    read_index,
    read_part,
    read_tensor,
    write_archive,
)
from llmc_jax.errors import FormatError

FIXTURE = Path(__file__).resolve().parents[1] / "golden" / "hugging_face" / "model.safetensors"


def raw_file(header: Any, body: bytes = b"") -> bytes:
    """A file from a header (JSON text or what becomes it) and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: str = "F32", shape: Any = (2,), ends: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(ends)}


def test_writes_what_the_package_writes(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    arrays = {
        "b.weight": rng.normal(size=(3, 5)).astype(np.float32),
        "a": np.array(2.5, np.float32),
        'é"\\': rng.normal(size=(0, 4)).astype(np.float32),
        "h.10.x": rng.normal(size=7).astype(np.float32),
        "h.2.x": rng.normal(size=(1, 1, 2)).astype(np.float32),
    }
    order = sorted(arrays)
    file = io.BytesIO()
    tensors = [NewTensor(name, "F32", arrays[name].shape) for name in order]
    write_archive(file, tensors, (arrays[name] for name in order), {"format": "pt"})
    assert file.getvalue() == package.save(arrays, {"format": "pt"})


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    words = np.random.default_rng(0).integers(0, 2**32, 60, dtype=np.uint64).astype(np.uint32)
    arrays = {
        "wide": words[:24].view(np.float32).reshape(4, 6),
        "half": words[24:30].view(np.float16).reshape(2, 3, 2),
        "whole": np.arange(6, dtype=np.int64),
        "yes": np.array([True, False]),
    }
    package.save_file(arrays, tmp_path / "a", {"who": "a test"})
    archive = read_archive(tmp_path / "a")
    assert archive.metadata == {"who": "a test"}
    assert {name: tensor.shape for name, tensor in archive.tensors.items()} == {n: a.shape for n, a in arrays.items()}
    wide, half = archive.tensors["wide"], archive.tensors["half"]
    np.testing.assert_array_equal(read_tensor(wide).view(np.uint32), arrays["wide"].view(np.uint32))
    np.testing.assert_array_equal(read_part(wide, 5, 9).view(np.uint32), words[5:14])
    found, expected = read_tensor(half), arrays["half"].astype(np.float32)
    np.testing.assert_array_equal(found, expected)  # NaNs count as equal; their payloads are test_reading's
    for name in ("whole", "yes"):
        with pytest.raises(FormatError, match=rf"'{name}' is of dtype (I64|BOOL); F32, BF16, F16 can be read"):
            read_tensor(archive.tensors[name])


def test_bf16_is_widened_on_the_bits(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype="<u2")
    with (tmp_path / "a").open("wb") as file:
        write_archive(file, [NewTensor("x", "BF16", (2**16,))], [bits], {})
    tensor = read_archive(tmp_path / "a").tensors["x"]
    np.testing.assert_array_equal(read_tensor(tensor).view(np.uint32), bits.astype(np.uint32) << 16)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes; a safetensors file begins with 8"),
    "seven bytes": (b"1234567", "7 bytes; a safetensors file begins with 8"),
    "cut in the header": (raw_file({"a": entry()}, bytes(8))[:20], "its header alone has [0-9]+: the file is cut off"),
    "absurd header": (b"\xff" * 8 + b"{}", "more than 100,000,000: it is no safetensors file"),
    "big-endian": ((2).to_bytes(8, "big") + b"{}", "it is big-endian, or no safetensors file"),
    "no object": (raw_file([1, 2]), r"the header begins with b'\[', not with '\{'"),
    "no JSON": (raw_file(b"{oh no}"), "the header is no JSON object of tensors"),
    "no UTF-8": (raw_file(b'{"\xff": 1}'), "the header is no JSON object of tensors"),
    "deep": (raw_file(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "a number of 5000 digits": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "the header is no JSON object of tensors"),
    "twice": (raw_file(b'{"a":1,"a":2}'), "a name stands there twice"),
    "metadata": (raw_file({"__metadata__": {"a": 1}}), "__metadata__ is not an object of texts"),
    "no entry": (raw_file({"a": 3}), "tensor 'a' must have dtype, shape and data_offsets"),
    "more keys": (raw_file({"a": {**entry(), "b": 1}}, bytes(8)), "and nothing else"),
    "dtype": (raw_file({"a": entry("F33")}, bytes(8)), "tensor 'a' has dtype 'F33'; known are BOOL"),
    "dtype no text": (raw_file({"a": {**entry(), "dtype": ["F32"]}}, bytes(8)), r"has dtype \['F32'\]"),
    "negative": (raw_file({"a": entry(shape=[-2, -1])}, bytes(8)), "is no list of at most 32 sizes"),
    "shape of floats": (raw_file({"a": entry(shape=[2.0])}, bytes(8)), "is no list of at most 32 sizes"),
    "shape of truths": (raw_file({"a": entry(shape=[True])}, bytes(4)), "is no list of at most 32 sizes"),
    "many axes": (raw_file({"a": entry(shape=[1] * 33)}, bytes(4)), "is no list of at most 32 sizes"),
    "three ends": (raw_file({"a": entry(ends=[0, 4, 8])}, bytes(8)), "are not two byte numbers"),
    "ends swapped": (raw_file({"a": entry(ends=[8, 0])}, bytes(8)), "takes 8 bytes, but its data_offsets .* span -8"),
    "shape and ends": (raw_file({"a": entry(shape=[3])}, bytes(8)), "takes 12 bytes, but its data_offsets"),
    "huge": (raw_file({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "takes 85070591730234615865843651857942052864|,"),
    "hole": (
        raw_file({"a": entry(), "b": entry(ends=[12, 20])}, bytes(20)),
        "tensor 'b' begins at byte .*: 4 bytes before it belong to none",
    ),
    "overlap": (raw_file({"a": entry(), "b": entry(ends=[4, 12])}, bytes(12)), "tensor 'b' .*: it overlaps"),
    "cut": (raw_file({"a": entry()}, bytes(7)), "but its tensors end at .*: the file is cut off"),
    "long": (raw_file({"a": entry()}, bytes(10)), "2 bytes follow the last tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    data, words = BAD[name]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=words) as caught:
        read_archive(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        read_archive(tmp_path / "none")
    with pytest.raises(FormatError, match="a folder"):
        read_archive(tmp_path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(FIXTURE.read_bytes())
    tensor = read_archive(path).tensors["transformer.wte.weight"]
    read_tensor(tensor)
    path.write_bytes(FIXTURE.read_bytes()[:-10])
    with pytest.raises(FormatError, match="changed while it was being read"):
        read_tensor(tensor)


def test_an_index_and_its_files(tmp_path: Path) -> None:
    body = np.arange(4, dtype="<f4").tobytes()
    (tmp_path / "one").write_bytes(raw_file({"a": entry(), "b": entry(ends=[8, 16])}, body))
    (tmp_path / "two").write_bytes(raw_file({"c": entry()}, body[:8]))
    index = tmp_path / "model.safetensors.index.json"

    def refused(weight_map: Any, words: str) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        with pytest.raises(FormatError, match=words) as caught:
            read_index(index)
        assert "\n" not in str(caught.value)

    index.write_text(json.dumps({"weight_map": {"a": "one", "b": "one", "c": "two"}}))
    found = read_index(index)
    assert [read_tensor(found[name]).tolist() for name in "abc"] == [[0, 1], [2, 3], [0, 1]]
    refused({"a": "../one"}, "names the file '../one'; expected one beside it")
    refused({"a": "/etc/passwd"}, "expected one beside it")
    refused({"a": ".."}, "a folder; expected a file")
    refused({"a": "three"}, "three: no such file")
    refused({"c": "one"}, "says that one holds 'c', which it does not")
    refused({"a": 1}, "has no weight_map")
    refused(None, "has no weight_map")
    for text, words in (("[1]", "holds no JSON object, but list"), ("{", "is no JSON"), ("[" * 200_000, "too deeply")):
        index.write_text(text)
        with pytest.raises(FormatError, match=words):
            read_index(index)


# Mutated files: what is accepted is what the package reads; nothing but FormatError is raised, within bounded memory

SMALL = raw_file(
    {"__metadata__": {"format": "pt"}, "a": entry("BF16", (2, 3), (0, 12)), "b": entry("F32", (3,), (12, 24))},
    np.random.default_rng(0).bytes(24),
)
WORDS = (
    b"F32", b"BF16", b"F64", b"[0,12]", b"[12,24]", b"[12, 24]", b"[-1]", b"[2, 3]", b"[3]", b"null", b"1e999", b"{}",
    b'"a"', b'"b"', b"dtype", b"shape", b"9" * 30, b" ", b"}", b"",
)  # fmt: skip


@st.composite
def mutated_files(draw: st.DrawFn) -> bytes:
    data = bytearray(SMALL)
    for kind in draw(st.lists(st.sampled_from(["flip", "cut", "extend", "length", "words"]), max_size=3)):
        if kind == "flip" and data:
            data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[draw(st.integers(0, len(data))) :]
        elif kind == "extend":
            data += draw(st.binary(min_size=1, max_size=40))
        elif kind == "length" and len(data) >= 8:
            near = st.integers(-3, 3).map(lambda d: len(SMALL) - 32 + d)
            length = draw(st.one_of(near, st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])))
            data[:8] = length.to_bytes(8, "little")
        elif kind == "words":
            old, new = draw(st.sampled_from(WORDS)), draw(st.sampled_from(WORDS))
            if old and old in data[8:]:
                at = data.index(old, 8)
                data[at : at + len(old)] = new
                if draw(st.booleans()) and len(data) >= 8:  # the length as it must be then
                    length = int.from_bytes(data[:8], "little") + len(new) - len(old)
                    data[:8] = max(0, length).to_bytes(8, "little")
    return bytes(data)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutated_files())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        tensors = read_archive(path).tensors
        values = {name: read_tensor(t) for name, t in tensors.items() if t.dtype in ("F32", "BF16", "F16")}
    except FormatError as error:
        assert "\n" not in str(error)
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= 100 * len(data) + 2**20
    deserialize = pytest.importorskip("safetensors").deserialize
    expected = dict(deserialize(data))
    assert set(tensors) == set(expected)
    for name, info in expected.items():
        tensor = tensors[name]
        assert (tensor.dtype, list(tensor.shape)) == (info["dtype"], list(info["shape"]))
        stored = data[tensor.offset : tensor.offset + tensor.size * ITEMSIZE[tensor.dtype]]
        assert stored == bytes(info["data"])
        if tensor.dtype == "F32":
            assert values[name].astype("<f4").tobytes() == stored

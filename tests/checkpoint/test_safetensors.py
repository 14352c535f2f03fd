"""safetensors files: against the safetensors package."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint.hugging_face import read_archive, read_index, write_archive
from tests.checkpoint.damage import random_bits, refused


def raw_file(header: Any, body: bytes = b"") -> bytes:
    """A file from a header (JSON text or what becomes it) and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(dtype: str = "F32", shape: Any = (2,), ends: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(ends)}


def test_writes_what_the_package_writes(tmp_path: Path) -> None:
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
    write_archive(file, "F32", {name: arrays[name].shape for name in order}, (arrays[name] for name in order))
    assert file.getvalue() == safetensors.numpy.save(arrays, {"format": "pt"})


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    words = random_bits(30, 0)
    arrays = {
        "wide": words[:24].view(np.float32).reshape(4, 6),
        "half": words[24:].view(np.float16).reshape(2, 3, 2),
        "whole": np.arange(6, dtype=np.int64),
        "yes": np.array([True, False]),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "a", {"who": "a test"})
    tensors = read_archive(tmp_path / "a")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: a.shape for n, a in arrays.items()}
    assert tensors["wide"].whole().tobytes() == arrays["wide"].tobytes()
    assert tensors["wide"].read(5, 9).tobytes() == words[5:14].tobytes()
    # NaNs count as equal; their payloads are test_reading's
    np.testing.assert_array_equal(tensors["half"].whole(), arrays["half"].astype(np.float32))
    assert [tensors[name].dtype for name in arrays] == ["fp32", "fp16", "I64", "BOOL"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        raw_file({"a": entry()}, bytes(8))[:20],
        raw_file({"a": entry()}, bytes(7)),
        raw_file({"a\nb": entry(ends=[4, 12])}, bytes(12)),
        raw_file(b'{"a":' + b"[" * 200_000),
    ],
    ids=["empty", "cut in the header", "cut", "hole", "deep"],
)
def test_what_the_package_refuses_is_one_line_that_names_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with refused(path, f": {len(data):,} bytes .*copy it again$"):
        read_archive(path)


@pytest.mark.parametrize("at", [["F32", [2], [0, 8]], entry() | {"dtype": {"F32": None}}])
def test_what_the_package_alone_takes_for_a_tensor_is_refused(tmp_path: Path, at: Any) -> None:
    (tmp_path / "a").write_bytes(raw_file({"x": at}, bytes(8)))
    with pytest.raises(FormatError, match="'x' must have dtype, shape and data_offsets"):
        read_archive(tmp_path / "a")


def test_an_index_and_its_files(tmp_path: Path) -> None:
    body = np.arange(4, dtype="<f4").tobytes()
    (tmp_path / "one").write_bytes(raw_file({"a": entry(), "b": entry(ends=[8, 16])}, body))
    (tmp_path / "two").write_bytes(raw_file({"c": entry()}, body[:8]))
    index = tmp_path / "model.safetensors.index.json"

    index.write_text(json.dumps({"weight_map": {"a": "one", "b": "one", "c": "two"}}))
    found = read_index(index)
    assert [found[name].whole().tolist() for name in "abc"] == [[0, 1], [2, 3], [0, 1]]
    for weight_map, words in (
        ({"a": "../one"}, "names the file '../one'; expected one beside it"),
        ({"a": "/etc/passwd"}, "expected one beside it"),
        ({"a": ".."}, "a folder; expected a file"),
        ({"a": "three"}, "three: no such file"),
        ({"c": "one"}, "says that one holds 'c', which it does not"),
        ({"a": 1}, "has no weight_map"),
        (None, "has no weight_map"),
    ):
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        with pytest.raises(FormatError, match=words) as caught:
            read_index(index)
        assert "\n" not in str(caught.value)
    index.write_text("[" * 200_000)
    with refused(index, "too deeply"):
        read_index(index)

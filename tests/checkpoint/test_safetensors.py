"""safetensors files: against the safetensors package."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmc_jax.base.errors import FormatError
from llmc_jax.checkpoint.safetensors import read_archive, read_index, write_archive

FIXTURE = Path(__file__).resolve().parents[1] / "golden" / "hugging_face" / "model.safetensors"


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
    shapes = {name: arrays[name].shape for name in order}
    write_archive(file, "F32", shapes, (arrays[name] for name in order))
    assert file.getvalue() == safetensors.numpy.save(arrays, {"format": "pt"})


def test_reads_what_the_package_writes(tmp_path: Path) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 60, dtype=np.uint64).astype(np.uint32)
    arrays = {
        "wide": words[:24].view(np.float32).reshape(4, 6),
        "half": words[24:30].view(np.float16).reshape(2, 3, 2),
        "whole": np.arange(6, dtype=np.int64),
        "yes": np.array([True, False]),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "a", {"who": "a test"})
    tensors = read_archive(tmp_path / "a")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: a.shape for n, a in arrays.items()}
    wide, half = tensors["wide"], tensors["half"]
    np.testing.assert_array_equal(wide.whole().view(np.uint32), arrays["wide"].view(np.uint32))
    np.testing.assert_array_equal(wide.read(5, 9).view(np.uint32), words[5:14])
    found, expected = half.whole(), arrays["half"].astype(np.float32)
    np.testing.assert_array_equal(found, expected)  # NaNs count as equal; their payloads are test_reading's
    assert [tensors[name].dtype for name in arrays] == ["fp32", "fp16", "I64", "BOOL"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        raw_file({"a": entry()}, bytes(8))[:20],
        raw_file({"a": entry()}, bytes(7)),
        raw_file({"a": entry()}, bytes(10)),
        raw_file({"a\nb": entry(ends=[4, 12])}, bytes(12)),
        raw_file(b'{"a":' + b"[" * 200_000),
    ],
    ids=["empty", "cut in the header", "cut", "long", "hole", "deep"],
)
def test_what_the_package_refuses_is_one_line_that_names_the_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"^{path}: {len(data):,} bytes .*copy it again$") as caught:
        read_archive(path)
    assert "\n" not in str(caught.value)


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

    def refused(weight_map: Any, words: str) -> None:
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        with pytest.raises(FormatError, match=words) as caught:
            read_index(index)
        assert "\n" not in str(caught.value)

    index.write_text(json.dumps({"weight_map": {"a": "one", "b": "one", "c": "two"}}))
    found = read_index(index)
    assert [found[name].whole().tolist() for name in "abc"] == [[0, 1], [2, 3], [0, 1]]
    refused({"a": "../one"}, "names the file '../one'; expected one beside it")
    refused({"a": "/etc/passwd"}, "expected one beside it")
    refused({"a": ".."}, "a folder; expected a file")
    refused({"a": "three"}, "three: no such file")
    refused({"c": "one"}, "says that one holds 'c', which it does not")
    refused({"a": 1}, "has no weight_map")
    refused(None, "has no weight_map")
    for text, words in (("[1]", "is not a JSON object, but list"), ("{", "is not JSON"), ("[" * 200_000, "too deeply")):
        index.write_text(text)
        with pytest.raises(FormatError, match=words):
            read_index(index)

"""Shares that a card's own check has measured take the place of estimates; nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmc_jax.errors import InputError
from llmc_jax.plan.efficiency import ATTENTION, ATTENTION_BACKWARD, COPY, MATRIX, MEMORY, PRODUCTS, gpu
from llmc_jax.plan.measured import file_of, with_measured

H200 = gpu("NVIDIA H200", "bf16")
SHAPE = "attention bf16 64x1024x12x64"
Item = tuple[str, str, str, dict[str, Any]]
RECORDS: list[Item] = [
    ("machine", "copy", "done", {"GB/s": 4320.0}),
    ("machine", "product bf16 65536x768x3072", "done", {"TFLOP/s": 700.0}),
    ("machine", "product bf16 65536x3072x768", "done", {"TFLOP/s": 600.0}),
    ("machine", "product bf16 65536x768x2304", "failed", {"TFLOP/s": 1.0}),
    ("kernels", f"{SHAPE} implementation=wgmma2", "done", {"forward TFLOP/s": 350.0, "backward TFLOP/s": 250.0}),
    ("kernels", f"{SHAPE} implementation=cudnn", "done", {"forward TFLOP/s": 300.0, "backward TFLOP/s": 280.0}),
    ("kernels", "gelu_forward bf16 65536x3072", "done", {"GB/s": 3600.0}),
    ("numerics", "gelu_forward bf16 65536x3072", "done", {"GB/s": 1.0}),
]  # fmt: skip


ODD = json.dumps({"records": [["machine", "product bf16", "done", {"TFLOP/s": 1.0}]]})


def kept(folder: Path, records: list[Item]) -> None:
    content = {"machine": {"device": "NVIDIA H200"}, "commands": [], "records": records}
    file_of("NVIDIA H200", folder).write_text(json.dumps(content))


def test_what_was_measured_counts(tmp_path: Path) -> None:
    kept(tmp_path, RECORDS)
    shares = with_measured(H200, tmp_path).shares
    typical = {name: share.typical for name, share in shares.items() if share.measured_on == "NVIDIA H200"}
    # a step's products lose by themselves what their tiles leave of the last wave: here it has been lost already
    products = [rate / 989.4 / H200.filled(65536, columns) for rate, columns in ((700, 3072), (600, 768))]
    expected = {
        PRODUCTS: sum(products) / 2, ATTENTION: 350 / 989.4, ATTENTION_BACKWARD: 280 / 989.4, MEMORY: 0.75, COPY: 0.9,
    }  # fmt: skip
    assert typical == pytest.approx(expected)  # of each shape the fastest; what failed, and other parts, do not count
    assert (shares[PRODUCTS].low, shares[PRODUCTS].high) == pytest.approx((min(products), max(products)))
    assert min(products) > 600 / 989.4 and max(products) > 700 / 989.4
    assert shares[MATRIX] == H200.shares[MATRIX]
    for share in shares.values():
        assert share.low < share.typical < share.high


def test_another_card_s_measurements_do_not(tmp_path: Path) -> None:
    kept(tmp_path, RECORDS)
    assert with_measured(gpu("NVIDIA H100 80GB HBM3", "bf16"), tmp_path) == gpu("NVIDIA H100 80GB HBM3", "bf16")
    assert with_measured(H200, tmp_path / "none") == H200


@pytest.mark.parametrize("text", ["{", "[]", '{"records": 3}', '{"records": [[1]]}', ODD])
def test_a_file_that_is_something_else_is_refused(text: str, tmp_path: Path) -> None:
    file_of("NVIDIA H200", tmp_path).write_text(text)
    with pytest.raises(InputError, match="gpu_nvidia_h200"):
        with_measured(H200, tmp_path)

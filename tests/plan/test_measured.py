"""Shares that a card's own check has measured: how they are found, and that the package's are those."""

import json
from typing import Any

import pytest

from benchmarks.card_shares import file_of, shares_in
from llmc_jax.plan.compiled import plan_for
from llmc_jax.plan.efficiency import ATTENTION, ATTENTION_BACKWARD, COPY, MEMORY, PRODUCTS, gpu
from llmc_jax.plan.memory import computed
from llmc_jax.plan.time import step_time

A100, H200 = gpu("NVIDIA A100-SXM4-80GB", "bf16"), gpu("NVIDIA H200", "bf16")
SHAPE = "attention bf16 64x1024x12x64"
Item = tuple[str, str, str, dict[str, Any]]
RECORDS: list[Item] = [
    ("machine", "copy", "done", {"GB/s": 1835.1}),
    ("machine", "product bf16 65536x768x3072", "done", {"TFLOP/s": 240.0}),
    ("machine", "product bf16 65536x3072x768", "done", {"TFLOP/s": 220.0}),
    ("machine", "product bf16 65536x768x2304", "failed", {"TFLOP/s": 1.0}),
    ("kernels", f"{SHAPE} implementation=wgmma2", "done", {"forward TFLOP/s": 110.0, "backward TFLOP/s": 80.0}),
    ("kernels", f"{SHAPE} implementation=cudnn", "done", {"forward TFLOP/s": 100.0, "backward TFLOP/s": 90.0}),
    ("kernels", "gelu_forward bf16 65536x3072", "done", {"GB/s": 1631.2}),
    ("kernels", "global_norm bf16 124518400", "done", {"GB/s": 1427.3}),
    ("numerics", "gelu_forward bf16 65536x3072", "done", {"GB/s": 1.0}),
]  # fmt: skip


def test_what_was_measured_is_found() -> None:
    shares = shares_in({"records": RECORDS}, A100, "a.json")
    typical = {name: share.typical for name, share in shares.items() if share.measured_on == A100.kind}
    # a step's products lose by themselves what their tiles leave of the last wave: here it has been lost already
    products = [rate / 312 / A100.filled(65536, columns) for rate, columns in ((240, 3072), (220, 768))]
    expected = {
        PRODUCTS: sum(products) / 2, ATTENTION: 110 / 312, ATTENTION_BACKWARD: 90 / 312, COPY: 0.9,
        MEMORY: 0.75, "forward gelu": 0.8, "update norm": 0.7,
    }  # fmt: skip
    assert typical == pytest.approx(expected)  # of each shape the fastest; what failed, and other parts, do not count
    low, high = 0.95 * sum(products) / 2, 1.05 * sum(products) / 2  # at least
    assert (shares[PRODUCTS].low, shares[PRODUCTS].high) == pytest.approx((low, high))
    assert min(products) > 220 / 312 and max(products) > 240 / 312
    for share in shares.values():
        assert share.low < share.typical < share.high


# ----- the card whose rates the package has ---------------------------------------------------------------------------


def test_the_package_s_rates_are_those_of_the_records() -> None:
    """Alone, a kernel may be faster than in a step, and a product slower: it is repeated until the clock falls."""
    content = json.loads(file_of(H200.kind).read_text())
    for kind, share in shares_in(content, H200, "").items():
        known = H200.shares[kind]
        assert known.measured_on == H200.kind
        assert share.typical == pytest.approx(known.typical, rel=0.08), kind


def test_what_waits_for_memory_has_the_rate_of_the_traced_step() -> None:
    """But the norm, which wrote a part of the gradient then."""
    operations = json.loads(file_of(H200.kind).with_name("gpu_nvidia_h200_profile.json").read_text())["operations"]
    found = {f"{each['phase']} {each['operation']}": each for each in operations}
    for kind in H200.shares.keys() & found.keys() - {"update norm", "forward weights"}:
        rate = found[kind]["bytes"] / found[kind]["seconds"]
        allowed = 0.09 if kind == "backward embedding" else 0.02  # there with five small kernels
        assert H200.shares[kind].typical == pytest.approx(rate / H200.bandwidth, rel=allowed)


def test_the_plan_of_the_steps_that_were_measured() -> None:
    """Time within 5 %, memory within 2 %. All products were NVIDIA's."""
    records = json.loads(file_of(H200.kind).read_text())["records"]
    steps = [figures for part, _, status, figures, *_ in records if part == "step" and status == "done"]
    assert len(steps) == 3
    for step in steps:
        plan = plan_for("h200", f"{step['flags']} --products xla")
        found = step_time(plan)
        assert 1e3 * found.seconds.typical == pytest.approx(step["ms"], rel=0.05) and found.measured
        assert found.seconds.low < 1e-3 * step["ms"] < found.seconds.high
        assert computed(plan).program / 2**30 == pytest.approx(step["GiB"], rel=0.02)

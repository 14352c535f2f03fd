"""What is chosen for which GPU, precision and option, and what is said of it."""

import inspect
import subprocess
import sys
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import CAUSAL, RELU, Attention, ModelConfig
from llmc_jax.kernels import GROUPS, XLA, Choice, Findings, Machine, Preferences, Selection, Setting
from llmc_jax.kernels.choice import ESTIMATED, IMPLEMENTATIONS, NOTHING, Measured, choose_one, select
from llmc_jax.kernels.functions import PLAIN, PRODUCTS, TWINS, cudnn_attention_backward, cudnn_attention_forward
from llmc_jax.machine.gpus import measured_on
from llmc_jax.models.execution import Execution
from llmc_jax.ops import attention
from pallas_kernels import tuning
from tests.comparisons import gradient_errors
from tests.kernels.test_whole_model import XLA_ALONE, of_model

ROOT = Path(__file__).resolve().parents[2]
MACHINES = {
    "CPU": Machine("cpu", "cpu"),
    "A100": Machine("gpu", "NVIDIA A100-SXM4-80GB", "8.0"),
    "3090": Machine("gpu", "NVIDIA GeForce RTX 3090", "8.6"),
    "4090": Machine("gpu", "NVIDIA GeForce RTX 4090", "8.9"),
    "H200": Machine("gpu", "NVIDIA H200", "9.0"),
    "B200": Machine("gpu", "NVIDIA B200", "10.0"),
    "5090": Machine("gpu", "NVIDIA GeForce RTX 5090", "12.0"),
    "T4": Machine("gpu", "Tesla T4", "7.5"),
    "MI300X": Machine("gpu", "AMD Instinct MI300X", "gfx942"),
    "AMD": Machine("gpu", "AMD Radeon"),
}
TARGETS = {"A100": "sm_80", "3090": "sm_86", "4090": "sm_89", "H200": "sm_90", "B200": "sm_100", "5090": "sm_120"}
TRITON = {row.operation for row in IMPLEMENTATIONS if row.by == "triton" and row.operation != "attention"}
WITHOUT_KERNELS = ("T4", "MI300X", "AMD")


def choose(
    asked: Preferences,
    machine: Machine,
    dtype: str,
    head_size: int,
    findings: Findings = NOTHING,
    *,
    attention: Attention = CAUSAL,
    strict: bool = False,
) -> Selection:
    setting = Setting(machine, dtype, head_size, attention=attention)
    return select([choose_one(name, asked, setting, findings) for name in GROUPS], setting, strict)


def chosen(selection: Selection) -> dict[str, str]:
    return {choice.operation: choice.implementation for choice in selection.choices}


def functions(selection: Selection) -> dict[str, Any]:
    """Everything that a selection runs, by name."""
    optimizer = selection.optimizer
    return selection.op._asdict() | {"adamw_update": optimizer.update, "global_norm": optimizer.global_norm}


def reasons(selection: Selection) -> dict[str, str]:
    return {choice.operation: choice.why for choice in selection.choices}


def attention_of(selection: Selection) -> Choice:
    return next(choice for choice in selection.choices if choice.operation == "attention")


def made_by(function: Any) -> tuple[str, str | None]:
    """Where a chosen function comes from: a module, and the architecture it is bound to."""
    if isinstance(function, partial):
        return function.func.__module__, function.keywords.get("target")
    return function.__module__, None


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmc_jax.kernels.triton.availability", lambda: "not installed: triton; run X")


# --- the architecture ------------------------------------------------------------------------------------------------


RELATIVES = {"8.7": "sm_86", "12.1": "sm_120", "10.3": "sm_100", "11.0": None, "7.0": None, "13.0": None}


def test_targets() -> None:
    """Of the GPUs above and of their relatives; each is one that the kernels know."""
    assert {name: each.target for name, each in MACHINES.items() if each.target} == TARGETS
    for capability, target in RELATIVES.items():
        assert Machine("gpu", "some GPU", capability).target == target
    assert set(TARGETS.values()) == set(tuning.TARGETS)


# --- auto ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_on_a_cpu_all_is_xla(dtype: str) -> None:
    selection = choose(Preferences(), MACHINES["CPU"], dtype, 64)
    assert set(reasons(selection).values()) == {"on a CPU"}
    assert chosen(selection) == dict.fromkeys(GROUPS, "xla") | {"attention": "naive, xla"}
    assert functions(selection) == PLAIN
    assert choose(Preferences(), MACHINES["CPU"], dtype, 64, strict=True) == selection  # nothing was asked for


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_on_a_gpu_the_kernels_run(name: str, dtype: str) -> None:
    """Of its own architecture, each in the place of its name."""
    selection = choose(Preferences(), MACHINES[name], dtype, 64, strict=True)
    flash = dtype != "fp32"
    expected = dict.fromkeys(GROUPS, "pallas") | {
        "attention": "flash, pallas" if flash else "naive, xla", "global norm": "xla",
    }  # fmt: skip
    products = (name, dtype) == ("H200", "bf16")
    assert chosen(selection) == expected | dict.fromkeys(PRODUCTS, "pallas" if products else "xla")
    for field, function in functions(selection).items():
        aside = (field.startswith("attention") and not flash) or (field in TWINS and not products)
        if field in {"global_norm", *XLA_ALONE} or aside:
            assert function is PLAIN[field]
        else:
            module, target = made_by(function)
            assert module.startswith("pallas_kernels.") and target == TARGETS[name]
            assert function.func.__name__ == field
    if not flash:
        assert reasons(selection)["attention"] == "the kernels compute in bf16 or fp16, not fp32"


@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_on_another_gpu_all_is_xla_and_the_reason_is_said(name: str) -> None:
    selection = choose(Preferences(), MACHINES[name], "fp32", 64, strict=True)
    assert functions(selection) == PLAIN
    (why,) = set(reasons(selection).values())
    assert "NVIDIA GPU of compute capability 8.x" in why and MACHINES[name].kind in why


def test_what_was_measured_decides_and_is_cited(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        ("sm_90", "gelu"): Measured("xla", "pallas", 1.25, "Card A"),
        ("sm_90", "attention"): Measured("cudnn", "", 0.0, "Card B"),
        ("sm_90", "global norm"): Measured("pallas", "xla", 2.0, "Card C"),
    }
    monkeypatch.setattr("llmc_jax.kernels.choice.MEASURED", table)
    selection = choose(Preferences(), MACHINES["H200"], "bf16", 64)
    assert {name: chosen(selection)[name] for _, name in table} == {
        "gelu": "xla", "attention": "cudnn", "global norm": "pallas",
    }  # fmt: skip
    for (_, name), (_, beside, ratio, card) in table.items():
        assert reasons(selection)[name] == measured_on(card, beside, ratio) and card in reasons(selection)[name]
    assert chosen(choose(Preferences(), MACHINES["A100"], "bf16", 64))["gelu"] == "pallas"


def test_every_operation_has_rows_of_which_xla_s_can_always_run() -> None:
    assert {row.operation for row in IMPLEMENTATIONS} == set(GROUPS)
    assert {name for names in GROUPS.values() for name in names} == set(PLAIN) - XLA_ALONE


# --- what is asked for -----------------------------------------------------------------------------------------------

SOFTMAX = "naive, softmax pallas"
FASTEST = measured_on("NVIDIA H200", "xla", 1.5)
ATTENTION = [
    # asked, machine, dtype, head size; what runs; the words by which a user finds why it is not what was asked for
    (Preferences(attention="naive"), "H200", "bf16", 64, "naive, xla", ""),
    (Preferences("pallas", "naive"), "H200", "bf16", 64, SOFTMAX, ""),
    (Preferences("pallas", "naive"), "CPU", "bf16", 64, "naive, xla", ""),
    (Preferences("pallas"), "B200", "fp32", 64, SOFTMAX, "bf16 or fp16, not fp32"),
    (Preferences("pallas"), "5090", "bf16", 256, SOFTMAX, "128 channels, not 256"),
    (Preferences("xla"), "H200", "bf16", 64, "naive, xla", ""),
    (Preferences("xla", "flash"), "H200", "bf16", 64, "flash, pallas", ""),
    (Preferences(attention="flash"), "A100", "fp16", 128, "flash, pallas", ""),
    (Preferences(attention="flash"), "CPU", "bf16", 64, "naive, xla", "there is no GPU"),
    (Preferences(attention="flash"), "T4", "fp16", 64, "naive, xla", "NVIDIA GPU of compute capability"),
    (Preferences("pallas", "flash"), "H200", "fp32", 64, SOFTMAX, "bf16 or fp16, not fp32"),
    (Preferences(attention="cudnn"), "H200", "bf16", 256, "cudnn", ""),
    (Preferences("xla", "cudnn"), "3090", "fp16", 64, "cudnn", ""),
    (Preferences(attention="cudnn"), "A100", "bf16", 256, "naive, xla", "128 channels, a multiple of 8, not 256"),
    (Preferences(attention="cudnn"), "A100", "bf16", 60, "naive, xla", "multiple of 8, not 60"),
    (Preferences(attention="cudnn"), "A100", "fp32", 64, "naive, xla", "bf16 or fp16, not fp32"),
    (Preferences(attention="cudnn"), "T4", "fp16", 64, "naive, xla", "Ampere or later, not Tesla T4"),
    (Preferences(attention="cudnn"), "MI300X", "bf16", 64, "naive, xla", "not AMD Instinct MI300X"),
    (Preferences(attention="cudnn"), "CPU", "bf16", 64, "naive, xla", "there is no GPU"),
    (Preferences(attention="relu"), "4090", "bf16", 64, "relu, pallas", ""),
    (Preferences(attention="relu"), "CPU", "fp32", 64, "naive, xla", ""),
    (Preferences(attention="relu"), "H200", "bf16", 256, "naive, xla", ""),
    (Preferences("pallas", "relu"), "CPU", "bf16", 64, "naive, xla", "there is no GPU"),
    (Preferences("xla", "relu"), "H200", "bf16", 64, "naive, xla", ""),
]
WINDOW = Attention(window=8)
OTHER = "the kernel computes softmax attention, not softmax attention with window 8"
NONE = "no kernel computes"


@pytest.mark.parametrize(
    ("measured", "machine", "head_size", "implementation", "why"),
    [
        ("cudnn", "H200", 64, "cudnn", FASTEST),
        ("cudnn", "H200", 60, "flash, pallas", "here it takes heads of up to 256 channels, a multiple of 8, not 60"),
        ("flash", "H200", 64, "flash, pallas", FASTEST),
        ("flash", "H200", 256, "cudnn", "the kernels take heads of up to 128 channels, not 256"),
        ("cudnn", "A100", 64, "flash, pallas", ESTIMATED),  # measured on another one
        ("naive", "H200", 64, "naive, xla", FASTEST),
    ],
)
def test_auto_is_the_fastest_attention_that_can_run(
    measured: str, machine: str, head_size: int, implementation: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Measured(measured, "xla", 1.5, "NVIDIA H200")
    monkeypatch.setattr("llmc_jax.kernels.choice.MEASURED", {("sm_90", "attention"): found})
    selection = choose(Preferences(), MACHINES[machine], "bf16", head_size, strict=True)  # which asks for nothing
    choice = attention_of(selection)
    assert (choice.implementation, choice.why) == (implementation, why)


@pytest.mark.parametrize(("asked", "machine", "dtype", "head_size", "implementation", "problem"), ATTENTION)
def test_attention(
    asked: Preferences, machine: str, dtype: str, head_size: int, implementation: str, problem: str
) -> None:
    kind = RELU if asked.attention == "relu" else CAUSAL
    selection = choose(asked, MACHINES[machine], dtype, head_size, attention=kind)
    choice = attention_of(selection)
    assert (choice.implementation, choice.fell_back) == (implementation, bool(problem)) and problem in choice.why
    assert choice.makes_matrix == (implementation not in ("flash, pallas", "cudnn", "relu, pallas"))
    modules = {
        "naive, xla": "llmc_jax.ops.attention", SOFTMAX: "llmc_jax.ops.attention",
        "cudnn": "llmc_jax.kernels.functions", "flash, pallas": "pallas_kernels.attention",
        "relu, pallas": "llmc_jax.kernels.functions",
    }  # fmt: skip
    for way in ("forward", "backward"):
        function = getattr(selection.op, f"attention_{way}")
        module, target = made_by(function)
        assert module == modules[implementation]
        if implementation == "relu, pallas":
            function = inspect.getclosurevars(function).nonlocals["kernel"]
            module, target = made_by(function)
        named = (function.func if isinstance(function, partial) else function).__name__
        assert named.endswith(way) and ("relu" in named) == implementation.startswith("relu")
        if module == "pallas_kernels.attention":
            assert target == MACHINES[machine].target
        if implementation == SOFTMAX:
            softmax = function.keywords["softmax"]
            assert made_by(softmax) == ("pallas_kernels.softmax", MACHINES[machine].target)
            assert softmax.func.__name__ == f"softmax_{way}"


@pytest.mark.parametrize(
    ("asked", "machine", "kind", "implementation", "why", "fell_back"),
    [
        (Preferences(), "H200", WINDOW, "naive, xla", f"{NONE} softmax attention with window 8", False),
        (Preferences(), "H200", RELU._replace(window=8), "naive, xla", f"{NONE} relu attention with window 8", False),
        (Preferences("pallas", "naive"), "H200", WINDOW, "naive, xla", "as asked", False),
        (Preferences(attention="flash"), "H200", WINDOW, "naive, xla", f"not flash: {OTHER}", True),
        (Preferences("pallas"), "H200", WINDOW, "naive, xla", f"not flash: {OTHER}", True),
        (Preferences(attention="cudnn"), "H200", WINDOW, "naive, xla", f"not cudnn: {OTHER}", True),
        (Preferences("xla", "flash"), "H200", RELU, "relu, pallas", "as asked", False),
        (Preferences(attention="naive"), "H200", RELU, "naive, xla", "as asked", False),
        (Preferences(attention="cudnn"), "H200", RELU, "naive, xla",
         "not cudnn: the kernel computes softmax attention, not relu attention", True),
    ],
)  # fmt: skip
def test_attention_that_no_kernel_computes_is_xla_s(
    asked: Preferences, machine: str, kind: Attention, implementation: str, why: str, fell_back: bool
) -> None:
    choice = attention_of(choose(asked, MACHINES[machine], "bf16", 64, attention=kind))
    assert (choice.implementation, choice.why, choice.fell_back) == (implementation, why, fell_back)
    if choice.fell_back:
        with pytest.raises(InputError, match=f"--strict-kernels: attention: {implementation}, {why};"):
            choose(asked, MACHINES[machine], "bf16", 64, attention=kind, strict=True)


@pytest.mark.parametrize(
    ("which", "machines", "fallen"),
    [
        ("xla", MACHINES, ()),
        ("pallas", ("CPU", *WITHOUT_KERNELS), set(GROUPS) - {"attention", *PRODUCTS}),
        ("triton", ("CPU", "MI300X", "H200"), TRITON),  # where it is not installed
    ],
)
@pytest.mark.usefixtures("no_triton")
def test_xla_s_as_asked_or_instead(which: str, machines: Iterable[str], fallen: Collection[str]) -> None:
    for machine in machines:
        selection = choose(Preferences(which, "naive"), MACHINES[machine], "bf16", 64)
        assert functions(selection) == PLAIN
        assert {choice.operation for choice in selection.choices if choice.fell_back} == set(fallen)


def test_pallas_as_asked_is_the_global_norm_too() -> None:
    selection = choose(Preferences("pallas"), MACHINES["H200"], "bf16", 64, strict=True)
    others = chosen(selection) | {"attention": "pallas"}
    assert others == dict.fromkeys(GROUPS, "pallas")
    assert made_by(selection.optimizer.global_norm) == ("pallas_kernels.adamw", "sm_90")


def test_triton_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("llmc_jax.kernels.triton.availability", lambda: None)
    selection = choose(Preferences("triton", "naive"), MACHINES["H200"], "bf16", 64)
    assert chosen(selection) == dict.fromkeys(GROUPS, "xla") | dict.fromkeys(TRITON, "triton") | {
        "attention": "naive, softmax triton"
    }
    for name in TRITON:
        for field in GROUPS[name]:
            assert made_by(functions(selection)[field])[0].startswith("llmc_jax.kernels.triton.")


# --- strict ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "machine", "dtype", "named"),
    [
        (
            Preferences("pallas"),
            "CPU",
            "fp32",
            ["layernorm, gelu", "adamw, global norm: xla, not pallas: there is no GPU"],
        ),
        (Preferences(attention="cudnn"), "CPU", "bf16", ["attention: naive, xla, not cudnn: there is no GPU"]),
        (
            Preferences("triton"),
            "H200",
            "bf16",
            ["layernorm, classifier: xla, not triton: not installed: triton; run X"],
        ),
    ],
)
@pytest.mark.usefixtures("no_triton")
def test_strict_refuses_what_cannot_run(asked: Preferences, machine: str, dtype: str, named: list[str]) -> None:
    choose(asked, MACHINES[machine], dtype, 64)
    with pytest.raises(InputError) as caught:
        choose(asked, MACHINES[machine], dtype, 64, strict=True)
    message = str(caught.value)
    assert message.startswith("--strict-kernels: ") and "\n" not in message
    for part in named:
        assert part in message


questions = st.builds(
    Preferences,
    kernels=st.sampled_from(["auto", "xla", "pallas", "triton"]),
    attention=st.sampled_from(["auto", "naive", "flash", "cudnn", "relu"]),
    gelu_fusion=st.sampled_from([-1, 0, 1, 2]),
    products=st.sampled_from(["auto", "xla", "pallas"]),
)
kinds = st.sampled_from([CAUSAL, RELU, WINDOW])


@given(
    questions, st.sampled_from(list(MACHINES)), st.sampled_from(["fp32", "bf16", "fp16"]), st.integers(1, 300), kinds
)
def test_whatever_is_asked_something_runs_and_says_why(
    asked: Preferences, name: str, dtype: str, head_size: int, kind: Attention
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llmc_jax.kernels.triton.availability", lambda: "not installed: triton; run X")
        selection = choose(asked, MACHINES[name], dtype, head_size, attention=kind)
        assert [choice.operation for choice in selection.choices] == list(GROUPS)
        assert all(choice.why and choice.implementation for choice in selection.choices)
        assert all(callable(each) or name in TWINS for name, each in functions(selection).items())
        fallen = [choice for choice in selection.choices if choice.fell_back]
        assert all("xla" in choice.implementation or "softmax" in choice.implementation for choice in fallen)
        if not fallen:
            strict = choose(asked, MACHINES[name], dtype, head_size, attention=kind, strict=True)
            assert strict.choices == selection.choices
            return
        assert (asked.kernels, asked.attention, asked.products) != ("auto",) * 3 or asked.gelu_fusion > 0
        with pytest.raises(InputError, match="--strict-kernels"):
            choose(asked, MACHINES[name], dtype, head_size, attention=kind, strict=True)


# --- -ge -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "ours"), [(-1, {*PRODUCTS}), (0, {"head"}), (1, {"head", "fc"}), (2, {*PRODUCTS})])
def test_ge_names_the_products_beside_gelu_that_are_ours(level: int, ours: set[str]) -> None:
    selection = choose(Preferences(gelu_fusion=level), MACHINES["H200"], "bf16", 64, strict=True)
    assert {name for name in PRODUCTS if chosen(selection)[name] == "pallas"} == ours


@pytest.mark.parametrize("name", ["A100", "CPU", *WITHOUT_KERNELS])
def test_where_ours_cannot_run_gelu_stays_outside(name: str) -> None:
    selection = choose(Preferences(gelu_fusion=2), MACHINES[name], "bf16", 64)
    assert {choice.operation: choice.by for choice in selection.choices if choice.fell_back} == {
        "fc": "xla", "fcproj": "xla",
    }  # fmt: skip
    with pytest.raises(InputError, match="--strict-kernels: fc, fcproj"):
        choose(Preferences(gelu_fusion=2), MACHINES[name], "bf16", 64, strict=True)


# --- what is imported ---------------------------------------------------------------------------------------------


def test_a_cpu_imports_no_kernel() -> None:
    code = (
        "import sys; from llmc_jax import kernels; from llmc_jax.config.model import RELU; "
        "from llmc_jax.run import loop; "
        "setting = kernels.Setting(kernels.this_machine(), 'fp32', 64, attention=RELU); "
        "kernels.record.choose_again(None, kernels.Preferences('pallas', 'relu'), False, setting); "
        "print([name for name in sys.modules if name.startswith(('pallas_kernels', 'triton', 'jax_triton'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the implementations ---------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_by_xla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """JAX's attention computed by XLA where cuDNN was asked for; the list tells what was."""
    right, asked = jax.nn.dot_product_attention, []

    def attend(*args: Any, implementation: str, **rest: Any) -> jax.Array:
        asked.append(implementation)
        return right(*args, implementation="xla", **rest)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return asked


@pytest.mark.slow
def test_cudnn_s_attention_is_wired_as_ours(cudnn_by_xla: list[str]) -> None:
    """Heads, their order, causality and scale; cuDNN itself computes on a GPU only."""
    rng = np.random.default_rng(0)
    qkv, dout = (rng.normal(size=(2, 5, width)).astype(np.float32) for width in (3 * 12, 12))
    out, att = attention.attention_forward(qkv, 3)
    found, saved = cudnn_attention_forward(jnp.asarray(qkv), 3)
    np.testing.assert_allclose(found, out, atol=1e-6)
    gradient = cudnn_attention_backward(jnp.asarray(dout), qkv, found, saved, 3)
    for each, expected in zip(gradient, attention.attention_backward(dout, qkv, out, att, 3), strict=True):
        np.testing.assert_allclose(each, expected, atol=3e-6)
    assert set(cudnn_by_xla) == {"cudnn"}


@pytest.mark.slow
@pytest.mark.usefixtures("cudnn_by_xla")
@pytest.mark.parametrize("recompute_blocks", [0, 1])
def test_the_model_keeps_what_cudnn_s_backward_needs(recompute_blocks: int) -> None:
    config = ModelConfig(8, 19, 128, 2, 2, 16)
    op = XLA._replace(attention_forward=cudnn_attention_forward, attention_backward=cudnn_attention_backward)
    execution = Execution(op, recompute_blocks=recompute_blocks)
    found, expected = (of_model(each, config, jnp.float32, 2, 7) for each in (execution, Execution()))
    errors = gradient_errors(found, expected, config)
    assert max(errors.values()) < 1e-5, errors

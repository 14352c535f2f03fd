"""The options that programs are compiled with: who decides, and that they reach the compiler."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.machine import compiling, jax_setup
from llmc_jax.machine.compiling import (
    GRAPHS,
    ONEDNN,
    OVERLAP,
    TRITON_GEMM,
    decided_by,
    onednn,
    overlap,
    triton_gemm,
    user_flags,
    without_graphs,
)
from llmc_jax.machine.device import has_cpu_flag
from llmc_jax.machine.gpus import AMX, Machine

ON, OFF = ((TRITON_GEMM, True),), ((TRITON_GEMM, False),)
UNKNOWN = (("xla_no_such_option", True),)


@pytest.mark.parametrize(
    ("wish", "target", "expected"),
    [
        ("auto", "sm_90", OFF), ("on", "sm_90", ON), ("off", "sm_90", OFF),
        ("auto", "sm_80", ()), ("auto", "sm_100", ()), ("off", "sm_80", OFF), ("on", "sm_120", ON),
        ("auto", None, ()), ("off", None, ()), ("on", None, ()),
    ],
)  # fmt: skip
def test_what_is_chosen(wish: str, target: str | None, expected: compiling.Options) -> None:
    assert triton_gemm(wish, target, {}) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"--{TRITON_GEMM}=true", ON), (f"--{TRITON_GEMM}", ON), (f"--{TRITON_GEMM}=1", ON),
        (f"--xla_dump_to=x --{TRITON_GEMM}=False", OFF), (f"--{TRITON_GEMM}=true --{TRITON_GEMM}=0", OFF),
        ("--xla_gpu_enable_triton_gemm_any=true", None), ("--xla_dump_to=x", None), ("", None), ("absent.txt", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wish", ["auto", "on", "off"])
def test_what_the_user_set_in_xla_flags_counts_more(
    flags: str, wish: str, expected: compiling.Options | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = user_flags()
    assert triton_gemm(wish, "sm_90", found) == (triton_gemm(wish, "sm_90", {}) if expected is None else expected)
    assert all(type(value) is bool for _, value in triton_gemm(wish, "sm_90", found))
    assert (decided_by(wish, "sm_90", found) == "XLA_FLAGS") == (expected is not None)
    assert triton_gemm(wish, None, found) == ()


@pytest.mark.parametrize(("flags", "graphs"), [
    ("", True), ("--xla_gpu_enable_command_buffer=FUSION,CUBLAS", True), ("--xla_gpu_enable_command_buffer=", False),
])  # fmt: skip
def test_a_trace_is_of_a_program_without_graphs(flags: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert without_graphs("gpu", user_flags()) == (((GRAPHS, ""),) if graphs else ())
    assert without_graphs("cpu", user_flags()) == ()


def test_values_in_xla_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--a=0 --b=-30 --c=8589934592 --d=1e9 --e= --f=TRUE --g --h=x --b=7")
    found = user_flags()
    assert found == {"a": 0, "b": 7, "c": 2**33, "d": "1e9", "e": "", "f": True, "g": True, "h": "x"}
    assert {name: type(value) for name, value in found.items() if type(value) is bool} == {"f": bool, "g": bool}


def test_several_gpus_overlap_and_nothing_else() -> None:
    assert overlap("sm_90", 1, {}) == overlap(None, 8, {}) == ()
    assert overlap("sm_80", 2, {}) == overlap("sm_100", 8, {}) == OVERLAP
    assert hash(OVERLAP) and len(dict(OVERLAP)) == len(OVERLAP)


def test_xla_flags_count_more_than_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    early, limit, gathers = (
        "xla_gpu_experimental_collective_start_as_early_as_possible",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "xla_gpu_all_gather_combine_threshold_bytes",
    )
    monkeypatch.setenv("XLA_FLAGS", f"--{early}=0 --{limit}=1 --{gathers}=1000 --xla_gpu_autotune_level=0")
    found = dict(overlap("sm_90", 8, user_flags()))
    assert found == dict(OVERLAP) | {early: False, limit: 1, gathers: 1000}
    assert (found[early], type(found[limit])) == (False, int) and type(found[early]) is bool


def test_this_xla_takes_the_options_of_overlap() -> None:
    lowered = jax.jit(double, static_argnums=2).lower(jnp.ones(3), jnp.ones(3), 2)
    np.testing.assert_array_equal(compiling.compiled(lowered, OVERLAP)(jnp.ones(3), jnp.ones(3)), 4 * np.ones(3))


@pytest.mark.parametrize(("dtype", "machine", "flags", "chosen"), [
    ("bf16", Machine("cpu", "Xeon", AMX), "", True), ("fp32", Machine("cpu", "Xeon", AMX), "", False),
    ("bf16", Machine("cpu", "EPYC"), "", False), ("bf16", Machine("gpu", "NVIDIA H200", "9.0"), "", False),
    ("bf16", Machine("cpu", "Xeon", AMX), f"--{ONEDNN}=true", False),
    ("bf16", Machine("cpu", "Xeon", AMX), f"--{ONEDNN}=0", False),
])  # fmt: skip
def test_onednn_makes_products_where_they_are_faster(
    dtype: str, machine: Machine, flags: str, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert onednn(dtype, machine, user_flags()) == (((ONEDNN, True),) if chosen else ())


def test_products_by_onednn_are_right_and_jax_says_nothing_of_its_cache() -> None:
    x, w = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in range(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jax_setup.configure()
        program = compiling.compiled(jax.jit(jnp.dot).lower(x, w), ((ONEDNN, True),))
    assert [str(each.message) for each in said] == []
    assert ("__onednn_fusion" in program.as_text()) == has_cpu_flag("avx512_bf16")
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(np.asarray(program(x, w), np.float64), expected, rtol=2**-8, atol=1e-5)


def test_xla_flags_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "flags.txt"
    path.write_text(f"--xla_dump_to=x\n--{TRITON_GEMM}=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(path))
    assert user_flags()[TRITON_GEMM]


def double(x: jax.Array, y: jax.Array, times: int) -> jax.Array:
    return times * (x + y)


def test_an_option_that_xla_does_not_know_is_one_line() -> None:
    lowered = jax.jit(double, static_argnums=2).lower(jnp.ones(3), jnp.ones(3), 2)
    with pytest.raises(InputError, match=r"^[^\n]*\bxla_no_such_option\b[^\n]*$"):
        compiling.compiled(lowered, UNKNOWN)
    np.testing.assert_array_equal(compiling.compiled(lowered, OFF)(jnp.ones(3), jnp.ones(3)), 4 * np.ones(3))
    np.testing.assert_array_equal(compiling.compiled(lowered, ())(jnp.ones(3), jnp.ones(3)), 4 * np.ones(3))


def test_a_call_is_compiled_with_the_options_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    function, real, options = jax.jit(double, static_argnums=2), compiling.compiled, []

    def compiled(lowered: Any, given: compiling.Options) -> Any:
        options.append(given)
        return real(lowered, given)

    monkeypatch.setattr(compiling, "compiled", compiled)
    for size in (3, 4, 3):
        x, y = jnp.ones(size), np.ones(size, np.float32)
        np.testing.assert_array_equal(compiling.call(function, (x, y), (5,), OFF), 10 * np.ones(size))
        np.testing.assert_array_equal(compiling.call(function, (x, y), (5,), ()), 10 * np.ones(size))
    assert options == [OFF, OFF]
    compiling.call(function, (x, y), (6,), OFF)
    compiling.call(function, (x, y), (6,), ON)
    assert options == [OFF, OFF, OFF, ON]
    assert function._cache_size() == 2  # jit's own, without options
    with pytest.raises(InputError):
        compiling.call(function, (x, y), (5,), UNKNOWN)

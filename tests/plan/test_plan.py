"""What a configuration comes to on machines that are not there: precision, kernels, memory, options, notes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.config.model import ModelConfig, parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.kernels import GROUPS, Findings, Machine
from llmc_jax.kernels.record import differences
from llmc_jax.machine import gpus
from llmc_jax.machine.compiling import ONEDNN, OVERLAP, PINNED, TRITON_GEMM
from llmc_jax.machine.gpus import AMX, machine_of
from llmc_jax.plan.plan import Plan, Repeat, make_plan, resolve_dtype, step_numbers
from llmc_jax.run.programs import shared_of
from llmc_jax.run.table import device_rows, kernel_rows, option_rows, precision_text
from llmc_jax.training.rules.adamw import ADAMW
from llmc_jax.trials.here import case_of

CPU = Machine("cpu", "cpu")
NAMES = ("h200", "h100", "a100", "rtx3090", "rtx4090", "rtx5090", "b200")
MACHINES = {name: machine_of(gpus.TARGETS[name].device_kind) for name in NAMES}
H200, A100, RTX_4090 = MACHINES["h200"], MACHINES["a100"], MACHINES["rtx4090"]
OTHERS = [machine_of("Tesla T4"), Machine("gpu", "AMD Instinct MI300X", "gfx942"), Machine("gpu", "AMD")]
EVERYWHERE = [CPU, *MACHINES.values(), *OTHERS]
SHAPE = ModelConfig(64, 257, 384, 1, 1, 64)
ON, OFF = ((TRITON_GEMM, True),), ((TRITON_GEMM, False),)
GIB = 2**30


def plan(machine: Machine, model: ModelConfig = SHAPE, **options: object) -> Plan:
    return make_plan(TrainConfig(**options), model, machine)  # type: ignore[arg-type]


# ----- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", EVERYWHERE, ids=lambda machine: machine.kind)
def test_auto_dtype_is_bf16_where_there_are_kernels(machine: Machine) -> None:
    assert plan(machine).dtype == ("bf16" if machine in MACHINES.values() else "fp32")
    assert {dtype: resolve_dtype(TrainConfig(dtype=dtype), machine) for dtype in ("fp32", "bf16", "fp16")} == {
        "fp32": "fp32", "bf16": "bf16", "fp16": "fp16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "master_weights", "rounding", "expected", "text"),
    [
        ("bf16", True, "auto", "nearest", "bf16, fp32 master weights, rounded to nearest"),
        ("bf16", False, "auto", "stochastic", "bf16, no master weights, rounded stochastically"),
        ("bf16", True, "stochastic", "stochastic", "bf16, fp32 master weights, rounded stochastically"),
        ("bf16", False, "nearest", "nearest", "bf16, no master weights, rounded to nearest"),
        ("fp32", False, "auto", "nearest", "fp32, products in TF32"),
        ("fp32", True, "stochastic", "nearest", "fp32, products in TF32"),
        ("fp16", False, "auto", "nearest", "fp16, no master weights, rounded to nearest, loss scale 128"),
    ],
)
def test_rounding(dtype: str, master_weights: bool, rounding: str, expected: str, text: str) -> None:
    found = plan(H200, dtype=dtype, master_weights=master_weights, rounding=rounding)
    assert (found.rounding, found.step_options.rounding, precision_text(found)) == (expected, expected, text)
    assert found.master_weights == (master_weights or dtype == "fp32")


def test_what_products_are_computed_in() -> None:
    turing = OTHERS[0]  # knows no TF32
    found = [plan(CPU), plan(H200), plan(H200, dtype="fp32"), plan(H200, dtype="fp32", tf32=False), plan(turing)]
    assert [each.product_precision for each in found] == ["fp32", "bf16", "tf32", "fp32", "fp32"]
    assert precision_text(found[3]) == "fp32"


# ----- what runs ------------------------------------------------------------------------------------------------------


def test_settings_reach_the_step() -> None:
    options = {"triton_gemm": "off", "recompute": 0, "recompute_blocks": 3, "logit_rows": 100, "schedule": "wsd"}
    found = plan(A100, kernels="pallas", attention="naive", **options)
    assert found.execution[1:] == (0, 3, 100, OFF)
    assert found.implementations["attention"] == "naive, softmax pallas"
    assert set(found.implementations) == set(GROUPS)
    assert (found.step_options.schedule, found.step_options.decay) == ("wsd", "none")  # without -c
    assert found.step_options.execution is found.execution
    assert plan(CPU, weight_decay=0.1, decay="all").step_options.decay == "all"
    with pytest.raises(InputError, match="--strict-kernels"):
        plan(CPU, kernels="pallas", strict_kernels=True)


@pytest.mark.parametrize("machine", EVERYWHERE, ids=lambda machine: machine.kind)
def test_a_plan_can_shape_a_compiled_step(machine: Machine) -> None:
    """It is a static argument of jit; a step is begun ahead where a device would wait otherwise."""
    found = plan(machine)
    hash(found.step_options)
    assert found.runs_ahead == (machine != CPU)
    assert found.implementations == {choice.operation: choice.implementation for choice in found.resolved.choices}


def test_the_table_has_one_row_where_the_same_runs_everything() -> None:
    assert kernel_rows(plan(CPU).choices) == [("kernels", "xla (on a CPU)")]
    assert [name for name, _ in kernel_rows(plan(OTHERS[0]).choices)] == ["kernels"]
    several = kernel_rows(plan(H200).choices)
    assert [name for name, _ in several] == list(GROUPS)
    assert ("attention", "flash, pallas (1.38 x cudnn, measured on an NVIDIA H200)") in several


def test_what_was_found_out_decides() -> None:
    findings = Findings(fastest=(("attention", "cudnn"),), options=ON)
    found = make_plan(TrainConfig(), SHAPE, A100, findings=findings)
    assert found.implementations["attention"] == "cudnn" and found.execution.compiler_options == ON
    (note,) = found.notes_on_bits
    assert "attention by cuDNN" in note
    assert plan(A100, attention="flash").notes_on_bits == []
    before = Repeat(Path("there"), plan(A100).resolved)
    again = make_plan(TrainConfig(), SHAPE, A100, findings=findings, before=before)
    assert again.choices == before.resolved.choices and again.execution.compiler_options == ()


# ----- an earlier choice ----------------------------------------------------------------------------------------------

CHOICE = Repeat(Path("there/kernels.json"), plan(H200, attention="cudnn", logit_rows=100).resolved)


@pytest.mark.parametrize("named", [True, False], ids=["--kernels-from", "-y"])
def test_an_earlier_choice_is_repeated(named: bool) -> None:
    config = TrainConfig(kernels_from="there" if named else "")
    found = make_plan(config, SHAPE, H200, before=CHOICE)
    assert (found.repeat, found.problems, found.notes_on_repeat) == (CHOICE, (), [])
    assert found.implementations["attention"] == "cudnn" and found.execution.logit_rows == 100


def test_that_of_another_machine_is_not_and_a_note_says_so() -> None:
    for named, words in (("", "not bit-exact from here: "), ("there", "--kernels-from there: not repeated: ")):
        found = make_plan(TrainConfig(kernels_from=named), SHAPE, A100, before=CHOICE)
        assert found.choices == plan(A100).choices and found.execution == plan(A100).execution
        (note,) = found.notes_on_repeat
        assert note == words + "it was made for sm_90, not for sm_80"
    with pytest.raises(InputError, match=r"^--strict-kernels: --kernels-from there: it was made for sm_90"):
        make_plan(TrainConfig(kernels_from="there", strict_kernels=True), SHAPE, A100, before=CHOICE)


def test_that_of_a_start_with_other_shapes_counts_only_where_it_is_named() -> None:
    config = TrainConfig(batch_size=2)
    assert make_plan(config, SHAPE, H200, before=CHOICE).repeat is None
    assert make_plan(replace(config, kernels_from="there"), SHAPE, H200, before=CHOICE).repeat == CHOICE
    before = Repeat(Path("there"), plan(CPU).resolved)
    for named in ("", "there"):
        found = make_plan(TrainConfig(kernels_from=named), SHAPE, CPU, before=before)
        assert found.repeat == before


# ----- memory ---------------------------------------------------------------------------------------------------------


def test_logits_come_in_chunks_where_a_gpu_s_memory_asks_for_it() -> None:
    def rows_of(machine: Machine, model: ModelConfig = SHAPE, **options: object) -> int:
        return plan(machine, model, dtype="bf16", **options).execution.logit_rows

    unknown = OTHERS[1:]  # how much memory these have
    assert [rows_of(machine) for machine in EVERYWHERE] == [8192 * (machine in unknown) for machine in EVERYWHERE]
    large = {"batch_size": 64, "sequence_length": 1024, "recompute": 0}
    assert [rows_of(machine, parse_descriptor("d24"), **large) for machine in (H200, A100)] == [0, 32_768]
    assert [rows_of(H200, logit_rows=given_rows) for given_rows in (0, 5)] == [0, 5]


def test_memory_counts_the_matrix_of_attention_where_it_is_kept() -> None:
    kept = {"auto": False, "naive": True, "cudnn": False, "relu": False}
    found = {name: plan(H200, attention=name, dtype="bf16", total_batch_size=3 * 4096) for name in kept}
    assert {name: not each.shape.flash for name, each in found.items()} == kept
    assert all(each.shape.micro_batches == 3 for each in found.values())
    assert not plan(CPU).shape.flash and not plan(CPU, attention="relu").shape.flash


@given(
    machine=st.sampled_from(EVERYWHERE),
    depth=st.integers(1, 4),
    batch_size=st.integers(1, 8),
    dtype=st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
    attention=st.sampled_from(["auto", "naive", "flash", "cudnn", "relu"]),
    logit_rows=st.integers(-1, 3),
)
def test_any_plan_is_one_of_its_machine(
    machine: Machine, depth: int, batch_size: int, dtype: str, attention: str, logit_rows: int
) -> None:
    """It repeats itself, serves every operation, and asks for no less memory the larger the batch."""
    model = replace(SHAPE, num_layers=depth)
    config = TrainConfig(batch_size=batch_size, dtype=dtype, attention=attention, logit_rows=logit_rows)
    found = make_plan(config, model, machine)
    again = make_plan(config, model, machine, before=Repeat(Path("there"), found.resolved))
    assert again.resolved == found.resolved and again.problems == ()
    assert found.shape.dtype == found.dtype == found.made_for.dtype
    assert found.execution.logit_rows >= 0 and (logit_rows < 0 or found.execution.logit_rows == logit_rows)
    assert all(choice.by == "xla" for choice in found.choices) or machine.platform == "gpu"
    larger = make_plan(replace(config, batch_size=batch_size + 1), model, machine)
    assert larger.needed.total >= found.needed.total and larger.needed.state == found.needed.state


# ----- XLA's options --------------------------------------------------------------------------------------------------


def test_only_hopper_differs_from_xlas_default() -> None:
    found = {name: plan(machine).execution.compiler_options for name, machine in MACHINES.items()}
    assert {name for name, options in found.items() if options} == {"h100", "h200"}
    assert plan(CPU, triton_gemm="off").execution.compiler_options == ()
    assert option_rows(plan(H200)) == [("triton_gemm", "off (measured on an NVIDIA H200, beside nothing else)")]
    assert option_rows(plan(H200, triton_gemm="off")) == [("triton_gemm", "off (as asked)")]


def test_onednn_is_recorded_and_a_resume_keeps_what_was() -> None:
    xeon, options = Machine("cpu", "cpu", AMX), ((ONEDNN, True),)
    found = plan(xeon, dtype="bf16")
    assert found.execution.compiler_options == found.resolved.options == options
    assert [name for name, _ in option_rows(found)] == ["onednn"]
    assert plan(xeon).execution.compiler_options == plan(CPU, dtype="bf16").execution.compiler_options == ()
    for before, after in ((found, CPU), (plan(CPU, dtype="bf16"), xeon)):
        repeat = Repeat(Path("kernels.json"), before.resolved)
        again = make_plan(TrainConfig(dtype="bf16"), SHAPE, after, before=repeat)
        assert again.repeat is repeat and again.execution.compiler_options == before.execution.compiler_options


def test_several_gpus_send_while_they_compute() -> None:
    assert plan(H200, devices=8).execution.compiler_options == (*OFF, *OVERLAP)
    assert plan(CPU, devices=8).execution.compiler_options == ()
    assert case_of(plan(H200, devices=8)).options == OFF  # kernels are tried on one
    assert option_rows(plan(H200, devices=8)) == option_rows(plan(H200))
    assert differences(plan(H200, devices=8).resolved, plan(H200).resolved) == []
    rows = {name: dict(device_rows(plan(H200, devices=n, zero_stage=2))) for name, n in (("one", 1), ("several", 8))}
    assert rows["one"] == {} and set(rows["several"]) == {"split over devices", "order of sums"}


def test_what_nobody_has_decided_may_be_tried() -> None:
    assert case_of(plan(A100)).other_options == OFF
    assert case_of(plan(CPU)).other_options == case_of(plan(H200)).other_options == ()
    assert all(case_of(plan(A100, triton_gemm=wish)).other_options == () for wish in ("on", "off"))
    by_flags = make_plan(TrainConfig(), SHAPE, A100, xla_flags={TRITON_GEMM: True})
    assert case_of(by_flags).other_options == ()


@pytest.mark.parametrize(("then", "now"), [(1, 8), (8, 1), (8, 2)])
def test_what_several_gpus_need_is_of_this_start(then: int, now: int) -> None:
    before = Repeat(Path("kernels.json"), plan(H200, devices=then).resolved)
    again = make_plan(TrainConfig(devices=now), SHAPE, H200, before=before)
    assert (
        again.repeat is before
        and again.execution.compiler_options == plan(H200, devices=now).execution.compiler_options
    )


def test_xla_flags_count_more() -> None:
    found = make_plan(TrainConfig(), SHAPE, H200, xla_flags={TRITON_GEMM: True})
    assert found.execution.compiler_options == ON and option_rows(found) == [("triton_gemm", "on (XLA_FLAGS)")]


def test_a_file_of_algorithms_is_of_this_start() -> None:
    found = plan(H200, algorithms="algorithms_1.txt", devices=8)
    assert found.execution.compiler_options == (*OFF, *OVERLAP, (PINNED, "algorithms_1.txt"))
    assert found.resolved.options == (*OFF, *OVERLAP)  # config.json has the name
    assert plan(CPU, algorithms="algorithms_1.txt").execution.compiler_options == ()
    assert case_of(found).options == OFF  # what is found out of kernels does not depend on it
    assert option_rows(found) == option_rows(plan(H200))
    before = Repeat(Path("kernels.json"), found.resolved)
    for now in ("", "algorithms_2.txt"):
        again = make_plan(TrainConfig(algorithms=now, devices=8), SHAPE, H200, before=before)
        assert again.repeat is before and dict(again.execution.compiler_options).get(PINNED, "") == now
    mine = make_plan(TrainConfig(algorithms="algorithms_1.txt"), SHAPE, H200, xla_flags={PINNED: "mine.txt"})
    assert mine.execution.compiler_options == OFF
    keys = {
        shared_of(plan(H200, algorithms=name), (), {}).name for name in ("", "algorithms_1.txt", "algorithms_2.txt")
    }
    assert len(keys) == 3  # new runs do not find programs that were compiled with another file


# ----- the step's numbers ---------------------------------------------------------------------------------------------


def test_the_numbers_of_a_step_are_the_options() -> None:
    config = TrainConfig(learning_rate=3e-4, warmup_steps=7, beta2=0.9, weight_decay=0.1, grad_clip=2.0, seed=5)
    numbers = step_numbers(config, ADAMW, 40)
    assert numbers.schedule[:3] == (3e-4, 7, 40)
    assert (numbers.grad_clip, numbers.seed) == (2.0, np.uint32(5))
    assert 0.9 in numbers.optimizer and 0.1 in numbers.optimizer

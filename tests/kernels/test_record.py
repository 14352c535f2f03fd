"""A run's choice as plain data: there and back, repeated, and what cannot be."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax import kernels
from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.plain import to_json
from llmc_jax.config.model import ModelConfig
from llmc_jax.config.train import TrainConfig
from llmc_jax.kernels import Choice, Finding, Findings, Machine, functions, record
from llmc_jax.kernels.functions import GROUPS, PRODUCTS
from llmc_jax.kernels.record import MadeFor, Preferences, Resolved, differences, from_json
from llmc_jax.machine.compiling import TRITON_GEMM
from llmc_jax.plan.asked import with_attention
from llmc_jax.plan.plan import Plan, Repeat, asked_of, make_plan

CPU = Machine("cpu", "cpu")
H200, A100 = Machine("gpu", "NVIDIA H200", "9.0"), Machine("gpu", "NVIDIA A100-SXM4-40GB", "8.0")
SHAPE = ModelConfig(64, 257, 384, 1, 1, 64)

TRITON_OFF = ((TRITON_GEMM, False),)

names = st.text(max_size=8)
counts = st.integers(0, 2**31)
a_choice = st.builds(Choice, names, names, names, names, st.booleans(), st.booleans())
records = st.builds(
    Resolved,
    made_for=st.builds(MadeFor, names, names, *[counts] * 6),
    asked=st.builds(Preferences),
    choices=st.lists(a_choice, max_size=3, unique_by=lambda each: each.operation).map(tuple),
    logit_rows=counts,
    options=st.dictionaries(names, st.booleans() | st.integers(), max_size=2).map(lambda each: tuple(each.items())),
    sources=names,
    format=st.just(record.FORMAT),
)


def planned(
    config: TrainConfig, machine: Machine, dtype: str = "bf16", before: Resolved | None = None, **more: Any
) -> Plan:
    """The plan of a run that is told to repeat a record, if there is one."""
    config = replace(config, dtype=dtype, kernels_from="" if before is None else "there")
    model = with_attention(SHAPE, config)
    return make_plan(config, model, machine, before=None if before is None else Repeat(Path("there"), before), **more)


def resolved(
    config: TrainConfig, machine: Machine, dtype: str = "bf16", before: Resolved | None = None, **more: Any
) -> Resolved:
    """What a run writes down."""
    return planned(config, machine, dtype, before, **more).resolved


def with_choice(found: Resolved, operation: str, /, **fields: Any) -> Resolved:
    """A record with another choice for an operation."""
    changed = [each._replace(**fields) if each.operation == operation else each for each in found.choices]
    return found._replace(choices=tuple(changed))


def chosen(found: Resolved) -> dict[str, str]:
    return {each.operation: each.implementation for each in found.choices}


def problems(found: Resolved, config: TrainConfig, machine: Machine, dtype: str = "bf16", **more: Any) -> list[str]:
    """The operations that cannot be repeated."""
    at = kernels.Setting(machine, dtype, SHAPE.head_size)
    return [each.split(":")[0] for each in record.cannot_repeat(found, asked_of(config), at, **more)]


# --- to and from JSON ------------------------------------------------------------------------------------------------


@given(records)
def test_there_and_back(found: Resolved) -> None:
    again = from_json(json.loads(json.dumps(to_json(found))), "here")
    assert again == found and differences(found, again) == []
    hash(again)


def spoiled(**fields: Any) -> dict[str, Any]:
    return to_json(resolved(TrainConfig(), CPU, "fp32")) | fields


DAMAGES: dict[str, Any] = {
    "no object": [],
    "nothing": {},
    "another format": spoiled(format=2),
    "an unknown field": spoiled(colour="red"),
    "a missing field": {name: each for name, each in spoiled().items() if name != "asked"},
    "a missing field of a choice": spoiled(choices=[{"operation": "gelu"}]),
    "no rows": spoiled(logit_rows=-1),
    "an option that is text": spoiled(options=[[TRITON_GEMM, "on"]]),
    "an operation twice": spoiled(choices=[to_json(Choice("gelu", "xla", "xla", ""))] * 2),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_record_is_refused(damage: str) -> None:
    with pytest.raises(FormatError, match=r"^here: is not a choice of kernels \(.+\)$"):
        from_json(DAMAGES[damage], "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)


@given(records, st.sampled_from(Resolved._fields), json_values)
def test_any_other_value_is_read_or_refused(found: Resolved, name: str, value: Any) -> None:
    """Whatever stands there, nothing but FormatError comes out."""
    with contextlib.suppress(FormatError):
        hash(from_json(to_json(found) | {name: value}, "here"))


# --- repeated --------------------------------------------------------------------------------------------------------

SLOWER = with_choice(
    resolved(TrainConfig(), H200), "attention", implementation="cudnn", by="cudnn", why="measured here"
)._replace(logit_rows=1000, options=((TRITON_GEMM, True),))


def test_a_record_wins_over_what_would_be_chosen() -> None:
    """Over tables, estimates and findings: all that it holds is taken as it stands."""
    assert chosen(resolved(TrainConfig(), H200))["attention"] == "flash, pallas"
    assert resolved(TrainConfig(), H200, before=SLOWER) == SLOWER
    findings = Findings(fastest=(("attention", "flash, pallas"), ("gelu", "xla")))
    plan = planned(TrainConfig(), H200, before=SLOWER, findings=findings)
    assert plan.choices == SLOWER.choices and plan.execution.logit_rows == 1000
    assert problems(SLOWER, TrainConfig(), H200) == []


def test_the_functions_are_those_of_the_record() -> None:
    selection = record.choose_again(SLOWER, Preferences(), False, kernels.Setting(H200, "bf16", 64))
    assert selection.op.attention_forward is functions.cudnn_attention_forward
    assert selection.op.classifier.keywords["target"] == "sm_90"  # type: ignore[attr-defined]


def test_a_record_of_gelu_in_nvidia_s_product_is_read_and_gelu_chosen_anew() -> None:
    earlier = to_json(SLOWER) | {"gelu_fusion": 1}
    earlier["choices"] = [each | {"backward": ""} for each in earlier["choices"]]
    assert from_json(earlier, "here") == SLOWER
    gelu = next(each for each in earlier["choices"] if each["operation"] == "gelu")
    gelu |= {"implementation": "in the product", "by": "cublas", "backward": "pallas"}
    assert problems(from_json(earlier, "here"), TrainConfig(), H200) == ["gelu"]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ({"attention": "naive"}, {"attention"}),
        ({"kernels": "xla"}, set(GROUPS)),
        ({"products": "xla"}, set(PRODUCTS)),
        ({"gelu_fusion": 1}, set(PRODUCTS)),
        ({"logit_rows": 0}, set()),
        ({"triton_gemm": "off"}, set()),
    ],
)
def test_what_is_asked_for_now_counts_more(flags: dict[str, Any], changed: set[str]) -> None:
    config = TrainConfig(**flags)
    found = resolved(config, H200, before=SLOWER)
    fresh = resolved(config, H200)
    for ours, theirs, new in zip(found.choices, SLOWER.choices, fresh.choices, strict=True):
        assert ours == (new if ours.operation in changed else theirs)
    assert found.logit_rows == (fresh if "logit_rows" in flags else SLOWER).logit_rows
    assert found.options == (fresh if "triton_gemm" in flags else SLOWER).options
    assert problems(SLOWER, config, H200) == []  # it is not that it cannot run
    # The same flags again, and auto, leave it so.
    assert resolved(config, H200, before=found) == found
    config = TrainConfig(recompute=config.recompute)
    assert resolved(config, H200, before=found)._replace(asked=found.asked) == found


def test_xla_flags_count_more() -> None:
    assert resolved(TrainConfig(), H200, before=SLOWER, xla_flags={TRITON_GEMM: False}).options == TRITON_OFF


def test_relu_attention_is_another_model_and_never_repeated_unasked() -> None:
    relu = resolved(TrainConfig(attention="relu"), H200)
    assert chosen(resolved(TrainConfig(), H200, before=relu))["attention"] == "flash, pallas"
    assert chosen(resolved(TrainConfig(attention="relu"), H200, before=SLOWER))["attention"] == "relu, pallas"
    assert resolved(TrainConfig(attention="relu"), H200, before=relu) == relu
    assert chosen(resolved(TrainConfig(attention_window=8), H200, before=SLOWER))["attention"] == "naive, xla"


@pytest.mark.parametrize("then", [H200, CPU])
@pytest.mark.parametrize("now", [A100, CPU, Machine("gpu", "Tesla T4", "7.5")])
def test_on_another_architecture_everything_is_chosen_anew(then: Machine, now: Machine) -> None:
    if then == now:
        return
    found = resolved(TrainConfig(), then, "fp32")._replace(logit_rows=77)
    again = resolved(TrainConfig(), now, "fp32", before=found)
    assert again == resolved(TrainConfig(), now, "fp32")
    assert len(problems(found, TrainConfig(), now, "fp32")) == 1


def test_another_card_of_the_same_architecture_repeats_it() -> None:
    h100 = Machine("gpu", "NVIDIA H100 80GB HBM3", "9.0")
    assert resolved(TrainConfig(), h100, before=SLOWER) == SLOWER and problems(SLOWER, TrainConfig(), h100) == []


CANNOT: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown row": ("gelu", {"implementation": "by hand"}),
    "an operation that there is not any more": ("layernorm", {"operation": "batchnorm"}),
}


@pytest.mark.parametrize("what", CANNOT)
def test_what_cannot_run_is_chosen_anew_and_named(what: str) -> None:
    operation, fields = CANNOT[what]
    found = with_choice(SLOWER, operation, **fields)
    assert problems(found, TrainConfig(), H200) == [operation]
    again = resolved(TrainConfig(), H200, before=found)
    fresh = resolved(TrainConfig(), H200)
    for ours, theirs, new in zip(again.choices, SLOWER.choices, fresh.choices, strict=True):
        assert ours == (new if ours.operation == operation else theirs)


def test_what_another_precision_or_a_finding_rules_out_cannot_run() -> None:
    assert problems(SLOWER, TrainConfig(), H200, "fp32") == ["attention", *PRODUCTS]
    wrong = Findings(found=(Finding("gelu", "pallas", problem="its numbers are wrong"),))
    assert problems(SLOWER, TrainConfig(), H200, findings=wrong) == ["gelu"]
    choices = planned(TrainConfig(), H200, before=SLOWER, findings=wrong).choices
    assert next(each.implementation for each in choices if each.operation == "gelu") == "xla"


def test_strict_still_refuses_what_was_asked_for_and_cannot_run() -> None:
    config = TrainConfig(attention="flash", strict_kernels=True)
    with pytest.raises(InputError, match="--strict-kernels"):
        resolved(config, H200, "fp32", before=SLOWER)


# --- differences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "now",
    [
        SLOWER._replace(logit_rows=0),
        SLOWER._replace(options=()),
        SLOWER._replace(options=((TRITON_GEMM, False),)),
        SLOWER._replace(sources="other"),
    ],
)
def test_each_thing_that_decides_bits_is_a_difference(now: Resolved) -> None:
    assert len(differences(SLOWER, now)) == len(differences(now, SLOWER)) == 1


def test_what_is_for_people_is_none() -> None:
    told = with_choice(SLOWER, "attention", why="as asked", fell_back=True)
    assert differences(SLOWER, told._replace(asked=Preferences("pallas"))) == []


def test_sources_count_where_our_kernels_run() -> None:
    on_cpu, on_gpu = resolved(TrainConfig(), CPU, "fp32"), resolved(TrainConfig(), H200)
    assert on_cpu.sources == "" and on_gpu.sources == record.digest_of_sources() != ""
    assert resolved(TrainConfig(kernels="xla"), H200).sources == ""


# --- products of ours -------------------------------------------------------------------------------------------------


def by(found: Plan) -> dict[str, str]:
    return {choice.operation: choice.by for choice in found.choices}


@pytest.mark.parametrize("machine", [H200, CPU])
def test_a_record_from_before_products_of_ours_has_xla_s(machine: Machine) -> None:
    now = resolved(TrainConfig(), machine)
    old = now._replace(choices=tuple(each for each in now.choices if each.operation not in PRODUCTS))
    assert problems(old, TrainConfig(), machine) == []
    again = by(planned(TrainConfig(), machine, before=old))
    assert {again[name] for name in PRODUCTS} == {"xla"}
    assert all(again[each.operation] == each.by for each in old.choices)


def test_products_run_where_they_were_compared_or_asked_for() -> None:
    """A plan takes them by estimate; a run only once a whole step with them was the fastest on its card."""
    found = {"nothing": None, "no check": Findings(), "compared": Findings(fastest=(("head", "pallas"),))}
    chosen = {name: by(planned(TrainConfig(), H200, findings=each)) for name, each in found.items()}
    assert {name: each["head"] for name, each in chosen.items()} == {
        "nothing": "pallas", "no check": "xla", "compared": "pallas",
    }  # fmt: skip
    assert by(planned(TrainConfig(products="pallas"), H200, findings=Findings()))["head"] == "pallas"


def test_fc_s_gelu_has_the_bits_of_the_one_that_a_backward_computes_again() -> None:
    wrong = Findings((Finding("gelu", "pallas", "wrong"),), fastest=tuple((name, "pallas") for name in PRODUCTS))
    assert (
        by(planned(TrainConfig(), H200, findings=wrong)).items()
        >= {"gelu": "xla", "fc": "xla", "head": "pallas"}.items()
    )
    asked = TrainConfig(products="pallas", kernels="xla", strict_kernels=True)
    with pytest.raises(InputError, match="--strict-kernels: fc: xla, "):
        planned(asked, H200)

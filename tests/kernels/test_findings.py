"""What was found out on a card decides what `auto` takes; what was found to be wrong does not run."""

import json

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.base.plain import from_json, to_json
from llmc_jax.kernels import Choice, Finding, Findings, Machine, Preferences
from tests.kernels.test_choice import choose

AUTO = Preferences()
H200 = Machine("gpu", "NVIDIA H200", "9.0")
WRONG = Finding("classifier", "pallas", problem="output 1: error 0.5")
FINDINGS = Findings(
    found=(Finding("attention", "flash, pallas"), Finding("attention", "cudnn"), Finding("layernorm", "pallas"), WRONG),
    fastest=(("attention", "cudnn"), ("layernorm", "pallas")),
    options=(("xla_gpu_enable_dynamic_slice_fusion", False),),
    steps=(("xla", 0.2), ("the kernels", 0.1)),
)


def choice_of(operation: str, asked: Preferences = AUTO, findings: Findings = FINDINGS) -> Choice:
    selection = choose(asked, H200, "bf16", 64, findings)
    return next(choice for choice in selection.choices if choice.operation == operation)


def test_auto_is_what_the_fastest_step_ran_with() -> None:
    for operation, name in FINDINGS.fastest:
        found = choice_of(operation)
        assert (found.implementation, found.why) == (name, "measured here")
    assert choice_of("gelu").why != "measured here"


def test_what_is_wrong_does_not_run() -> None:
    found = choice_of("classifier")
    assert (found.implementation, found.why, found.fell_back) == ("xla", WRONG.problem, False)
    named = choice_of("classifier", Preferences(kernels="pallas"))
    assert (named.implementation, named.fell_back) == ("xla", True)
    with pytest.raises(InputError, match="output 1: error"):
        choose(Preferences(kernels="pallas"), H200, "bf16", 64, FINDINGS, strict=True)


def test_what_was_asked_for_runs() -> None:
    for kind, name in (("flash", "flash, pallas"), ("cudnn", "cudnn")):
        asked = choice_of("attention", Preferences(attention=kind))
        assert (asked.implementation, asked.why) == (name, "as asked")


def test_nothing_is_known() -> None:
    assert choose(AUTO, H200, "bf16", 64, Findings()) == choose(AUTO, H200, "bf16", 64)
    cpu = Machine("cpu", "cpu")
    assert choose(AUTO, cpu, "fp32", 64, FINDINGS) == choose(AUTO, cpu, "fp32", 64)


def test_findings_through_json() -> None:
    assert from_json(Findings, json.loads(json.dumps(to_json(FINDINGS)))) == FINDINGS
    for damage in ([], {"found": [{}]}, to_json(FINDINGS) | {"steps": [["a"]]}):
        with pytest.raises(ValueError):
            from_json(Findings, damage)

"""What was found out on a card decides what `auto` takes; what was found to be wrong does not run."""

import json

import pytest

from llmc_jax.base.errors import InputError
from llmc_jax.kernels import Choice, Finding, Findings, Machine, Preferences
from llmc_jax.kernels.plain import from_json, to_json
from tests.kernels.test_choice import choose, made_by

AUTO = Preferences()
H200 = Machine("gpu", "NVIDIA H200", "9.0")
FLASH = Finding("attention", "flash, pallas", "wgmma", us=1000.0)
CUDNN = Finding("attention", "cudnn", us=1310.0)
LAYERNORM = Finding("layernorm", "pallas", us=90.0)
WRONG = Finding("classifier", "pallas", problem="output 1: error 0.5")
FINDINGS = Findings(
    found=(
        FLASH,
        FLASH._replace(version="mma", us=2000.0),
        CUDNN,
        LAYERNORM,
        WRONG,
        Finding("layernorm", "xla", us=120),
    ),
    fastest=(FLASH, LAYERNORM),
    options=(("xla_gpu_enable_dynamic_slice_fusion", False),),
    steps=(("xla", 0.2), ("proposed", 0.1)),
)


def choice_of(operation: str, asked: Preferences = AUTO, findings: Findings = FINDINGS) -> Choice:
    selection = choose(asked, H200, "bf16", 64, findings)
    return next(choice for choice in selection.choices if choice.operation == operation)


def test_auto_is_what_was_the_fastest() -> None:
    found = choice_of("attention")
    assert (found.implementation, found.version) == ("flash, pallas", "wgmma")
    assert found.text == "flash, pallas wgmma" and found.why == "1.31 x cudnn, measured here"
    assert choice_of("layernorm").why == "1.33 x xla, measured here"
    other = choice_of("attention", findings=FINDINGS._replace(fastest=(CUDNN,)))
    assert (other.implementation, other.why) == ("cudnn", "0.76 x flash, pallas, measured here")


def test_what_is_wrong_does_not_run() -> None:
    found = choice_of("classifier")
    assert (found.implementation, found.why, found.fell_back) == ("xla", WRONG.problem, False)
    named = choice_of("classifier", Preferences(kernels="pallas"))
    assert (named.implementation, named.fell_back) == ("xla", True)
    with pytest.raises(InputError, match="output 1: error"):
        choose(Preferences(kernels="pallas"), H200, "bf16", 64, FINDINGS, strict=True)
    both = FINDINGS._replace(found=(*FINDINGS.found, WRONG._replace(version="other", problem="")))
    assert (choice_of("classifier", findings=both).version) == "other"  # one form of it is right


def test_what_was_asked_for_runs_in_its_fastest_form() -> None:
    asked = choice_of("attention", Preferences(attention="flash"))
    assert (asked.implementation, asked.version, asked.why) == ("flash, pallas", "wgmma", "as asked")
    assert choice_of("attention", Preferences(attention="cudnn")).implementation == "cudnn"


def test_nothing_is_known() -> None:
    assert choose(AUTO, H200, "bf16", 64, Findings()) == choose(AUTO, H200, "bf16", 64)
    cpu = Machine("cpu", "cpu")
    assert choose(AUTO, cpu, "fp32", 64, FINDINGS) == choose(AUTO, cpu, "fp32", 64)


def test_functions_have_the_form() -> None:
    op = choose(AUTO, H200, "bf16", 64, FINDINGS).op
    assert op.attention_forward.keywords == {"target": "sm_90", "interpret": False, "version": "wgmma"}  # type: ignore[attr-defined]
    assert made_by(op.gelu_forward) == ("pallas_kernels.gelu", "sm_90")


def test_findings_through_json() -> None:
    assert from_json(Findings, json.loads(json.dumps(to_json(FINDINGS)))) == FINDINGS
    for damage in ([], {"found": [{}]}, to_json(FINDINGS) | {"steps": [["a"]]}):
        with pytest.raises(ValueError):
            from_json(Findings, damage)

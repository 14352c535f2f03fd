"""What is tried for a run, and what a try says: on a CPU, where kernels are interpreted, at tiny shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.solvers import FUNCTIONS
from llmc_jax.config.model import parse_descriptor
from llmc_jax.kernels import Finding, Machine, Preferences, ours
from llmc_jax.kernels.functions import GROUPS, PLAIN
from llmc_jax.models.gpt2.tensors import flat_size, tensor_specs
from llmc_jax.ops.gelu import gelu_forward_in_product
from llmc_jax.trials import candidates, check, numerics
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.figures import Tried

H200 = Machine("gpu", "NVIDIA H200", "9.0")
TINY = Case(
    model=parse_descriptor("L1-NH2-C64-V100-T32"), batch_size=1, sequence_length=24, accumulation=1, dtype="bf16",
    rounding="nearest", master_weights=True, tf32=True, recompute=1, recompute_blocks=0, logit_rows=8, gelu_fusion=0,
    options=(), asked=Preferences(), machine=H200, interpret=True,
)  # fmt: skip
D12 = TINY._replace(
    model=parse_descriptor("d12"), batch_size=64, sequence_length=1024, logit_rows=8192, interpret=False
)


def labels(case: Case) -> list[str]:
    return [each.label for each in candidates.listed(case)]


def test_what_is_tried_on_hopper() -> None:
    found = labels(D12)
    assert len(found) == len(set(found))
    assert found[:5] == [f"{operation}: {name}" for operation, name in (
        ("layernorm", "pallas"), ("gelu", "pallas"), ("attention", "flash, pallas"), ("classifier", "pallas"),
        ("embedding backward", "pallas"),
    )]  # fmt: skip
    assert {"attention: cudnn", "attention: naive, xla", "layernorm: xla"} <= set(found)
    assert labels(D12._replace(asked=Preferences(kernels="pallas", attention="naive")))[2] == "classifier: pallas"
    assert found[-1] == "attention: flash, pallas mma"
    assert not any("triton" in name or "softmax" in name for name in found)


def test_what_is_tried_elsewhere() -> None:
    found = labels(D12._replace(machine=Machine("gpu", "NVIDIA A100-SXM4-80GB", "8.0")))
    assert "attention: flash, pallas" in found and not any("wgmma" in name or "mma" in name for name in found)
    assert "attention: cudnn" not in labels(D12._replace(dtype="fp32"))
    assert candidates.listed(D12._replace(asked=Preferences(kernels="xla"))) == []
    assert candidates.listed(D12._replace(machine=Machine("cpu", "cpu"))) == []
    cudnn = labels(D12._replace(asked=Preferences(kernels="xla", attention="cudnn")))
    assert cudnn == ["attention: cudnn", "attention: naive, xla"]


def test_shapes_are_the_runs_own() -> None:
    sizes = {part.function: (part.sizes, part.calls) for name in GROUPS for part in candidates.parts(D12, name)}
    assert set(sizes) == FUNCTIONS - {"softmax_forward", "softmax_backward", "relu_attention"}
    assert sizes["residual_layernorm_backward"] == ([65536, 768], 24)
    assert sizes["classifier"] == ([8192, 50257, 50304], 8)
    assert sizes["attention"] == ([64, 1024, 12, 64], 12)
    assert candidates.parts(D12._replace(logit_rows=0), "classifier")[0].sizes[0] == 65536


def tried(finding: Finding, case: Case = TINY) -> Finding:
    return check.measure_candidate(case, finding)


def test_a_right_kernel() -> None:
    found = tried(Finding("gelu", "pallas"))
    assert not found.problem and found.us > 0
    assert not tried(Finding("gelu", "xla")).problem


def test_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one function of several, and there in the gradient that is summed over the rows."""
    real = ours.pallas_kernel

    def spoilt(name: str, *arguments: Any) -> Any:
        right = real(name, *arguments)

        def gelu_backward(*arrays: Any) -> Any:
            dx, bias = right(*arrays)
            return dx, bias * jnp.asarray(1.05, bias.dtype)

        return gelu_backward if name == "gelu_backward" else right

    monkeypatch.setattr(ours, "pallas_kernel", spoilt)
    found = tried(Finding("gelu", "pallas"))
    assert found.problem.startswith("gelu_backward, output 1") and not found.us


def test_a_kernel_whose_bits_change_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its second call on, in a last bit that no tolerance sees."""
    calls = []

    def last_bit(out: Any) -> Any:
        calls.append(None)
        bits = np.array(out).view(np.uint16)
        bits[-1, -1] ^= len(calls) > 1
        return bits.view(jnp.bfloat16)

    def moving(x: Any) -> Any:
        return jax.pure_callback(last_bit, jax.ShapeDtypeStruct(x.shape, x.dtype), PLAIN["gelu_forward"](x))

    monkeypatch.setattr(ours, "pallas_kernel", lambda name, *_: moving if name == "gelu_forward" else PLAIN[name])
    found = tried(Finding("gelu", "pallas"))
    assert found.problem.startswith("gelu_forward, other bits") and not found.us


def test_a_digest_changes_with_each_element() -> None:
    outputs = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.float32(2.5)
    others = [outputs, (outputs[0][::-1], outputs[1]), (outputs[0], -outputs[1])]
    others += [(outputs[0].at[at].set(7), outputs[1]) for at in np.ndindex(2, 3)]
    assert len({numerics.digest(each) for each in others}) == len(others)


def test_the_step_has_gelu_in_the_product_where_the_run_has() -> None:
    fused = check.chosen_functions(TINY._replace(gelu_fusion=1, recompute=0), CHOSEN)
    plain = check.chosen_functions(TINY, CHOSEN)
    assert fused["gelu_forward"] is gelu_forward_in_product is not plain["gelu_forward"]
    assert fused == plain | {"gelu_forward": gelu_forward_in_product}


def test_a_version_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no_such_version"):
        tried(Finding("attention", "flash, pallas", "no_such_version"))


CHOSEN = (Finding("gelu", "pallas"), Finding("classifier", "pallas"))


def step(chosen: tuple[Finding, ...], case: Case = TINY) -> Tried:
    return check.measure_step(case, chosen, ())


def test_steps_side_by_side() -> None:
    """Every tensor's gradient counts, and what is no number is wrong."""
    gradient = np.random.default_rng(0).standard_normal(flat_size(TINY.model)).astype(np.float32)
    reference = check.Step(4.0, gradient, 1.0)

    def wrong(found: check.Step) -> str:
        return "; ".join(numerics.judged_model(TINY.model, TINY.dtype, found[:2], reference[:2])[1])

    assert not wrong(reference._replace(gradient=gradient * 1.01))
    assert "loss off by 0.1" in wrong(reference._replace(loss=4.1))
    for spec in tensor_specs(TINY.model):
        for spoilt in (1.1, np.nan):
            other = gradient.copy()
            other[spec.offset : spec.offset + spec.size] *= spoilt
            assert f"gradient of {spec.name} off" in wrong(check.Step(4.0, other, 1.0))


@pytest.mark.slow
def test_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels as XLA's, of relu attention too; and where the classifier's gradient is off by a little."""
    assert not step(()).problem and not step(CHOSEN).problem
    relu, case = (Finding("attention", "relu, xla"),), TINY._replace(asked=Preferences(attention="relu"))
    assert not step(relu, case).problem and step(relu).problem
    real = check.chosen_functions

    def spoilt(case: Case, chosen: Any) -> Any:
        right = real(case, chosen)

        def classifier(*arguments: Any) -> Any:
            losses, dlogits = right["classifier"](*arguments)
            return losses, dlogits * jnp.asarray(1.05, dlogits.dtype)

        return right | {"classifier": classifier}

    monkeypatch.setattr(check, "chosen_functions", spoilt)
    assert step(CHOSEN).problem.startswith("gradient of")


@pytest.mark.slow
def test_a_step_without_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is too large, XLA's step is compared without it, and its time is not one."""
    monkeypatch.setattr(check, "MATRIX_BYTES", 100)
    found = step((), TINY._replace(batch_size=2))
    assert found == Tried("")
    with pytest.raises(check.NotMeasured):
        tried(Finding("attention", "naive, xla"))

"""What is tried for a run, and what a try says: on a CPU, where kernels are interpreted, at tiny shapes."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.solvers import FUNCTIONS
from llmc_jax.config.model import RELU, parse_descriptor
from llmc_jax.kernels import Finding, Machine, Preferences, functions
from llmc_jax.kernels.functions import GROUPS, PRODUCTS
from llmc_jax.models.layout import flat_size, tensor_specs
from llmc_jax.trials import candidates, check, numerics
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import Tried

H200 = Machine("gpu", "NVIDIA H200", "9.0")
TINY = Case(
    model=parse_descriptor("L1-NH2-C64-V100-T32"), batch_size=1, sequence_length=24, accumulation=1, dtype="bf16",
    rounding="nearest", master_weights=True, tf32=True, recompute=1, recompute_blocks=0, logit_rows=8,
    options=(), asked=Preferences(), machine=H200, interpret=True,
)  # fmt: skip
D12 = TINY._replace(
    model=parse_descriptor("d12"), batch_size=64, sequence_length=1024, logit_rows=8192, interpret=False
)


def labels(case: Case) -> list[str]:
    return [each.label for each in candidates.listed(case)]


AMPERE = ["layernorm: pallas", "gelu: pallas", "attention: flash, pallas", "classifier: pallas",
          "embedding backward: pallas", "adamw: pallas", "attention: cudnn"]  # fmt: skip
OF_HOPPER = [f"{product}: pallas" for product in PRODUCTS]
HOPPER = [*AMPERE[:-1], *OF_HOPPER, AMPERE[-1]]


def test_what_is_tried() -> None:
    """What may run: neither what stands behind XLA's, nor attention with the T x T matrix."""
    assert labels(D12) == HOPPER
    assert labels(D12._replace(machine=Machine("gpu", "NVIDIA A100-SXM4-80GB", "8.0"))) == AMPERE
    assert "attention: cudnn" not in labels(D12._replace(dtype="fp32"))
    asked = {
        ("xla", "auto"): [],
        ("xla", "cudnn"): ["attention: cudnn"],
        ("pallas", "naive"): [
            *(each for each in AMPERE if "attention" not in each),
            "global norm: pallas",
            *OF_HOPPER,
        ],
        ("auto", "flash"): HOPPER[:-1],
    }
    assert {key: labels(D12._replace(asked=Preferences(*key))) for key in asked} == asked
    without = D12._replace(asked=Preferences(products="xla"))
    assert labels(without) == AMPERE and labels(D12._replace(asked=Preferences(gelu_fusion=1)))[6:8] == OF_HOPPER[:2]
    assert labels(D12._replace(machine=Machine("cpu", "cpu"))) == []


def test_shapes_are_the_runs_own() -> None:
    sizes = {name: size for each in GROUPS for name, size in candidates.parts(D12, each).items()}
    assert set(sizes) == FUNCTIONS - {"softmax_forward", "softmax_backward", "relu_attention"}
    assert sizes["residual_layernorm_backward"] == [65536, 768]
    assert sizes["classifier"] == [8192, 50257, 50304]
    assert sizes["attention"] == [64, 1024, 12, 64]
    assert candidates.parts(D12._replace(logit_rows=0), "classifier")["classifier"][0] == 65536


@pytest.mark.slow
def test_a_kernel_that_is_right_and_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one function of several, and there in the gradient that is summed over the rows."""
    finding, real = Finding("gelu", "pallas"), functions.pallas_kernel
    assert check.measure_kernel(TINY, finding) == Tried()

    def spoilt(name: str, *arguments: Any) -> Any:
        right = real(name, *arguments)

        def gelu_backward(*arrays: Any) -> Any:
            dx, bias = right(*arrays)
            return dx, bias * jnp.asarray(1.05, bias.dtype)

        return gelu_backward if name == "gelu_backward" else right

    monkeypatch.setattr(functions, "pallas_kernel", spoilt)
    assert check.measure_kernel(TINY, finding).problem.startswith("gelu_backward, output 1")


@pytest.mark.slow
def test_products_of_ours_and_a_step_on_them_beside_one_without() -> None:
    assert [check.measure_kernel(TINY, Finding(name, "pallas")) for name in PRODUCTS] == [Tried()] * len(PRODUCTS)
    ours, plain = (tuple((name, by) for name in PRODUCTS) for by in ("pallas", "xla"))
    assert check.measure_step(TINY, ours, (), beside=plain) == Tried("", 1.0, beside=1.0)


def test_a_digest_changes_with_each_element() -> None:
    outputs = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jnp.float32(2.5)
    others = [outputs, (outputs[0][::-1], outputs[1]), (outputs[0], -outputs[1])]
    others += [(outputs[0].at[at].set(7), outputs[1]) for at in np.ndindex(2, 3)]
    assert len({numerics.digest(each) for each in others}) == len(others)


CHOSEN = (("gelu", "pallas"), ("classifier", "pallas"))


def step(chosen: check.Rows, case: Case = TINY) -> Tried:
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
    relu, case = (("attention", "relu, pallas"),), TINY._replace(model=replace(TINY.model, attention=RELU))
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
    assert step((), TINY._replace(batch_size=2)) == Tried("")

"""The handwritten kernels as sets of functions: Pallas's for an architecture, and Triton's. Imported when asked for."""

from collections.abc import Sequence
from functools import cache, partial

from llmc_jax.kernels.findings import Variant
from llmc_jax.kernels.functions import GROUPS, PLAIN
from llmc_jax.ops import attention
from llmc_jax.ops.table import Function

DEFAULT = Variant()


def pallas_functions(target: str, interpret: bool = False, variant: Variant = DEFAULT) -> dict[str, Function]:
    """Return the kernels for an architecture ("sm_90") by name; attention is `flash`, in bf16 and fp16 only.

    interpret: simulated on the CPU, slowly, for tests and for whoever wants to look.
    """
    return _pallas_functions(target, interpret, variant)  # the same functions for the same arguments


@cache
def _pallas_functions(target: str, interpret: bool, variant: Variant) -> dict[str, Function]:
    from pallas_kernels import adamw as adamw_kernels
    from pallas_kernels import attention as attention_kernels
    from pallas_kernels import classifier as classifier_kernels
    from pallas_kernels import embedding as embedding_kernels
    from pallas_kernels import gelu as gelu_kernels
    from pallas_kernels import layernorm as layernorm_kernels
    from pallas_kernels import tuning

    modules = (layernorm_kernels, gelu_kernels, attention_kernels, classifier_kernels, embedding_kernels, adamw_kernels)
    tuned = tuning.Tuned(target, variant.sizes) if variant.sizes else target
    return {
        name: partial(getattr(module, name), target=tuned, interpret=interpret, **_version(name, variant))
        for name in PLAIN
        for module in modules
        if hasattr(module, name)
    }


def _version(function: str, variant: Variant) -> dict[str, str]:
    return {"version": variant.version} if variant.version and "attention" in function else {}


def variant_problem(variant: Variant) -> str:
    """Return why there is no such form of our kernels; empty where there is."""
    from pallas_kernels import tuning

    if variant.version and variant.version not in tuning.VERSIONS:
        return f"this version has no {variant.version!r}"
    usual = tuning.SIZES[tuning.TARGETS[0]]._asdict()
    for name, value in variant.sizes:
        if name not in usual:
            return f"this version has no size {name!r}"
        found, known = (each if isinstance(each, tuple) else (each,) for each in (value, usual[name]))
        if len(found) != len(known) or not all(type(each) is int and each > 0 for each in found):
            return f"{name}={value!r} is not a size"
    return ""


@cache
def relu_kernels(target: str, variant: Variant = DEFAULT) -> Sequence[Function]:
    """Return ReLU attention's forward and backward for an architecture."""
    from pallas_kernels import attention as kernels

    more = _version("relu_attention", variant)
    return [
        partial(f, target=target, **more) for f in (kernels.relu_attention_forward, kernels.relu_attention_backward)
    ]


def by_softmax_kernel(target: str) -> Sequence[Function]:
    """Return attention's forward and backward with the T x T matrix and the softmax of an architecture."""
    from pallas_kernels import softmax

    forward = partial(softmax.softmax_forward, target=target)
    return _by_softmax(forward, partial(softmax.softmax_backward, target=target))


def by_triton_softmax() -> Sequence[Function]:
    """Return attention's forward and backward with the T x T matrix and Triton's softmax."""
    from llmc_jax.kernels.triton import softmax

    return _by_softmax(softmax.softmax_forward, softmax.softmax_backward)


def _by_softmax(forward: Function, backward: Function) -> Sequence[Function]:
    return [
        partial(attention.attention_by_softmax_forward, softmax=forward),
        partial(attention.attention_by_softmax_backward, softmax=backward),
    ]


@cache
def triton_functions() -> dict[str, Function]:
    """Return layernorm and classifier as Triton kernels (the extra `[triton]`), by name."""
    from llmc_jax.kernels.triton import classifier as triton_classifier
    from llmc_jax.kernels.triton import layernorm as triton_layernorm

    names = (*GROUPS["layernorm"], *GROUPS["classifier"])
    return {
        name: getattr(module, name)
        for name in names
        for module in (triton_layernorm, triton_classifier)
        if hasattr(module, name)
    }

"""What is lowered and compiled for GPUs that are not there: every kernel over its dtypes and shapes, and whole steps.

Shared by tests/machine/test_deviceless.py (lowering), tests/aot/test_aot.py (compiling) and benchmarks/aot.py (the
table).
"""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.aot import state_bytes
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine import deviceless, gpus
from llmc_jax.models.layout import flat_size
from llmc_jax.plan import compiled
from llmc_jax.plan.plan import Plan
from llmc_jax.training.optimizer import decay_ranges
from llmc_jax.training.rules.adamw import AdamWNumbers
from llmc_jax.training.step import train_step
from pallas_kernels.decode import Tensor
from pallas_kernels.layernorm import longest_row
from pallas_kernels.tuning import VERSIONS, attention_sizes

DTYPES: dict[str, Any] = {
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp32": jnp.float32,
    "int32": jnp.int32,
    "uint32": jnp.uint32,
    "bool": jnp.bool_,
}
EVERY_DTYPE = ("bf16", "fp16", "fp32")
LARGE = 1_000_000  # bytes: copies below are not worth a look

ROWS = 4096  # B=4 T=1024
V, Vp = 50257, 50304
D12 = parse_descriptor("d12")
FLAT = flat_size(D12)


class Case(NamedTuple):
    """One kernel function with the shapes and dtypes of its arguments."""

    function: str  # module.function of pallas_kernels
    dtype: str
    shape: str  # what tells it from the others of this function and dtype
    arguments: dict[str, Any]  # "0", "1", …: positional; else by name. Arrays are jax.ShapeDtypeStruct, the rest static
    donated: tuple[str, ...]  # those whose memory the kernel must reuse

    @property
    def name(self) -> str:
        return f"{self.function} {self.dtype} {self.shape}"

    @property
    def donated_bytes(self) -> int:
        return num_bytes([self.arguments[key] for key in self.donated])

    def lower(self, gpu: str) -> Any:
        return deviceless.lower_for(*self._call(gpu), gpu)

    def compile(self, gpu: str) -> deviceless.Program:
        return deviceless.compile_for(*self._call(gpu), gpu)

    def _call(self, gpu: str) -> tuple[Callable[..., Any], tuple[dict[str, Any], dict[str, Any]]]:
        """A jitted function of the donated arrays and of the others, and both."""
        arrays = {key: value for key, value in self.arguments.items() if has_arrays(value)}
        donated = {key: arrays.pop(key) for key in self.donated}
        function, target = kernel_function(self.function), gpus.known_target(gpu).architecture

        def call(donated: dict[str, Any], kept: dict[str, Any]) -> Any:
            given = {**self.arguments, **donated, **kept}
            positional = [value for key, value in given.items() if key.isdigit()]
            named = {key: value for key, value in given.items() if not key.isdigit()}
            return function(*positional, **named, target=target)

        return jax.jit(call, donate_argnums=0), (donated, arrays)


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def kernel_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(f"pallas_kernels.{module}"), function)


def public_kernels() -> set[str]:
    """Every function of pallas_kernels that a case must exist for: public, made for a target, and interpretable."""
    found = set()
    for info in pkgutil.iter_modules(pallas_kernels.__path__):
        module = importlib.import_module(f"pallas_kernels.{info.name}")
        for name, value in vars(module).items():
            own = callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
            if own and {"target", "interpret"} <= inspect.signature(value).parameters.keys() and info.name != "mosaic":
                found.add(f"{info.name}.{name}")
    return found


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, DTYPES[dtype])


def case(function: str, dtype: str, shape: str, *arguments: Any, donated: tuple[str, ...] = (), **named: Any) -> Case:
    return Case(function, dtype, shape, {str(i): each for i, each in enumerate(arguments)} | named, donated)


# ----- the kernels --------------------------------------------------------------------------------------------------


def layernorm(dtype: str, C: int, weights: str, rows: int = ROWS) -> Iterator[Case]:
    x, w, mean = array(dtype, rows, C), array(weights, C), array("fp32", rows)
    shape = f"rows={rows} C={C}" if weights == dtype else f"rows={rows} C={C} w:{weights}"
    yield case("layernorm.layernorm_forward", dtype, shape, x, w, w)
    yield case("layernorm.layernorm_backward", dtype, shape, x, x, w, mean, mean)
    yield case("layernorm.residual_layernorm_forward", dtype, shape, x, x, w, w)
    yield case("layernorm.residual_layernorm_backward", dtype, shape, x, x, x, w, mean, mean)


def gelu(dtype: str, rows: int, columns: int) -> Iterator[Case]:
    x, shape = array(dtype, rows, columns), f"rows={rows} columns={columns}"
    yield case("gelu.gelu_forward", dtype, shape, x)
    yield case("gelu.gelu_backward", dtype, shape, x, x)


def softmax(dtype: str, T: int) -> Iterator[Case]:
    scores = array(dtype, 4, 12, T, T)
    yield case("softmax.softmax_forward", dtype, f"T={T}", scores, scale=0.125)
    yield case("softmax.softmax_backward", dtype, f"T={T}", scores, scores, scale=0.125)


def classifier(dtype: str, rows: int, vocab_size: int, padded: int) -> Iterator[Case]:
    shape = f"rows={rows} V={vocab_size} Vp={padded}"
    arguments = array(dtype, rows, padded), array("int32", rows), array("fp32", rows), vocab_size
    yield case("classifier.classifier", dtype, shape, *arguments, donated=("0",))


def embedding(dtype: str, B: int, T: int, C: int) -> Iterator[Case]:
    arguments = array(dtype, B, T, C), array("int32", B, T), array(dtype, Vp, C)
    yield case("embedding.embedding_backward", dtype, f"B={B} T={T} C={C}", *arguments, donated=("2",))


def attention(
    dtype: str, T: int, num_heads: int, head_size: int, kind: str = "", version: str | None = None
) -> Iterator[Case]:
    B, C = 4, num_heads * head_size
    qkv, out, lse = array(dtype, B, T, 3 * C), array(dtype, B, T, C), array("fp32", B, num_heads, T)
    shape = f"T={T} NH={num_heads} HS={head_size}" + (f" {version}" if version else "")
    saved = () if kind else lse
    yield case(f"attention.{kind}attention_forward", dtype, shape, qkv, num_heads, version=version)
    yield case(f"attention.{kind}attention_backward", dtype, shape, out, qkv, out, saved, num_heads, version=version)


def products(rows: int, C: int, F: int, vocab_size: int, padded: int) -> Iterator[Case]:
    x, hidden, of_row = array("bf16", rows, C), array("bf16", rows, F), array("fp32", rows)
    head = x, array("bf16", padded, C), array("int32", rows), of_row, vocab_size
    for keep in (True, False):
        shape = f"rows={rows} C={C} V={vocab_size} Vp={padded}" + ("" if keep else " sums alone")
        yield case("matmul.head_weights", "bf16", shape, *head, keep=keep)
    shape, w = f"rows={rows} C={C} F={F}", array("bf16", F, C)
    yield case("matmul.linear_gelu_forward", "bf16", shape, x, w, array("bf16", F))
    yield case("matmul.linear_gelu_backward", "bf16", shape, x, array("bf16", C, F), hidden)


def adamw(dtype: str, rounding: str, gradient: str | None = None, masters: bool = True) -> Iterator[Case]:
    wide, low, scalar = array("fp32", FLAT), array(dtype, FLAT), array("fp32")
    params, copy = (wide, None if dtype == "fp32" else low) if masters else (low, None)
    shape = f"{rounding}, {'fp32 params' if masters else 'no master weights'}"
    yield case(
        "adamw.adamw_update", dtype, shape, params, wide, wide, array(gradient or dtype, FLAT),
        scale=scalar, learning_rate=scalar, update=array("int32"), apply=array("bool"),
        numbers=AdamWNumbers(scalar, scalar, scalar, scalar), decay=decay_ranges(D12, "matrices"), copy=copy,
        rounding=rounding, seed=array("uint32") if rounding == "stochastic" else None,
        donated=("0", "1", "2", "copy") if copy else ("0", "1", "2"),
    )  # fmt: skip


def one_token(dtype: str, B: int, C: int, num_heads: int, layers: int = 2, positions: int = 1024) -> Iterator[Case]:
    """A block's and the head's kernels, with weights where a model of so many layers has some tensor."""
    x, hidden, layer = array(dtype, B, C), array(dtype, B, 4 * C), array("int32")
    model = array(dtype, Vp + 10 * layers * C, C), layer
    norm, shape = (Tensor(Vp, 1), Tensor(Vp + layers, 1)), f"B={B} C={C}"
    for name, outputs, gelu in (("qkv", 3 * C, False), ("fc", 4 * C, True)):
        found = {"weight": Tensor(Vp, outputs), "bias": Tensor(Vp, outputs // C), "outputs": outputs, "gelu": gelu}
        yield case("decode.norm_linear", dtype, f"{name} {shape}", x, *model, norm=norm, **found)
    found = {"weight": Tensor(0), "bias": None, "outputs": Vp, "out_dtype": jnp.float32}
    yield case("decode.norm_linear", dtype, f"head {shape}", x, *model, norm=norm, **found)
    for name, a in (("attproj", x), ("fcproj", hidden)):
        place = Tensor(Vp, C * a.shape[1] // C), Tensor(Vp, 1)
        yield case("decode.linear_residual", dtype, f"{name} {shape}", x, a, *model, weight=place[0], bias=place[1])
    cache = array(dtype, layers, B * num_heads, positions, C // num_heads)
    qkv, shape = array(dtype, B, 3 * C), f"B={B} NH={num_heads} HS={C // num_heads}"
    yield case("decode.attention_step", dtype, shape, qkv, cache, cache, layer, layer, donated=("1", "2"))


def cases(gpu: str) -> list[Case]:
    """Every case of a kernel for a GPU."""
    found: list[Case] = []
    for C in (768, 1024, 1280, 1600, 2560, 12288):
        found += layernorm("bf16", C, "bf16")
    for dtype, weights in (("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")):
        found += layernorm(dtype, 768, weights)
    found += layernorm("bf16", 768, "bf16", rows=1001)
    if longest_row(gpus.known_target(gpu).architecture) < 12288:  # the backward refuses it, with a message
        found = [each for each in found if not ("backward" in each.function and "C=12288" in each.shape)]
    for dtype in EVERY_DTYPE:
        found += gelu(dtype, ROWS, 4 * 768)
        found += softmax(dtype, 1024)
        found += classifier(dtype, ROWS, V, Vp)
        found += embedding(dtype, 4, 1024, 768)
        found += adamw(dtype, "nearest")
        found.append(case("adamw.global_norm", dtype, "d12", array(dtype, FLAT)))
    found += gelu("bf16", 4095, 6400)
    found += softmax("bf16", 1000)
    found += classifier("bf16", 4095, 65, 128)
    found += embedding("bf16", 4, 1000, 1600)
    found += adamw("bf16", "stochastic")
    found += adamw("bf16", "stochastic", masters=False)
    for dtype, B, C, num_heads in (
        *(("bf16", B, 768, 12) for B in (1, 3, 16)), ("bf16", 16, 1600, 25), ("bf16", 1, 1600, 20),
        ("fp32", 1, 1600, 25), ("fp32", 16, 1600, 25), ("fp16", 16, 768, 6), ("fp32", 3, 768, 6),
    ):  # fmt: skip
        found += one_token(dtype, B, C, num_heads)
    target = gpus.known_target(gpu).architecture
    if target == "sm_90":  # no other has their instructions
        found += products(ROWS, 768, 4 * 768, V, Vp)
        found += products(4095, 1600, 6400, 65, 128)
    chosen = attention_sizes(target, 64, None).version
    for head_size in (32, 64, 80, 96, 128):
        found += attention("bf16", 1024, 12, head_size, version=chosen)
    found += attention("fp16", 1024, 12, 64, version=chosen)
    found += attention("bf16", 1000, 25, 64, version=chosen)
    found += attention("bf16", 1024, 12, 64, "relu_", version=chosen)
    for version in VERSIONS if target == "sm_90" else ():  # the others that this GPU could run
        if version != chosen:
            found += attention("bf16", 1024, 12, 64, version=version)
            found += attention("bf16", 1024, 12, 128, version=version)
    return found


# ----- training steps -----------------------------------------------------------------------------------------------


class StepCase(NamedTuple):
    """A whole training step as a run on that GPU would choose it: A micro-batches of B x T tokens, one update."""

    model: str  # descriptor
    dtype: str
    B: int
    A: int
    flags: tuple[str, ...] = ()  # of train.py, beside these

    @property
    def name(self) -> str:
        more = f" A={self.A}" if self.A > 1 else ""
        return f"step {self.model} {self.dtype} B={self.B}{more}" + "".join(f" {word}" for word in self.flags)

    @property
    def donated_bytes(self) -> int:
        return state_bytes(self.plan("h200"))

    def lower(self, gpu: str) -> Any:
        plan = self.plan(gpu)
        given = (*compiled.arguments(plan), plan.model, plan.step_options)
        return deviceless.lower_for(train_step, given, gpu)

    def compile(self, gpu: str) -> deviceless.Program:
        return compiled.compile_step(self.plan(gpu), gpu)

    def plan(self, gpu: str) -> Plan:
        given = parse_args(self.flags) if self.flags else TrainConfig()
        T = parse_descriptor(self.model).max_seq_len
        config = dataclasses.replace(
            given, model=self.model, dtype=self.dtype, batch_size=self.B, sequence_length=T,
            total_batch_size=self.A * self.B * T, weight_decay=0.1,
        )  # fmt: skip
        return compiled.plan_for(gpu, config)


def steps(gpu: str) -> list[StepCase]:
    """Every training step for a GPU: how memory grows with B, and with several micro-batches, hardly depends on it."""
    first = StepCase("d12", "bf16", B=4, A=1)
    more = [StepCase("d12", "bf16", B=16, A=1), StepCase("d12", "bf16", B=4, A=4)] if gpu == "h200" else []
    return [first, *more]


def compiled_for(gpu: str) -> list[Case | StepCase]:
    """What is compiled for a GPU."""
    return [*cases(gpu), *steps(gpu)]


def lowered_for(gpu: str) -> list[Case | StepCase]:
    """What is lowered for a GPU: the first case of every function (attention: of every version), and one step."""
    first: dict[str, Case | StepCase] = {}
    for each in cases(gpu):
        first.setdefault(each.function + str(each.arguments.get("version", "")), each)
    return [*first.values(), StepCase("L2-NH12-C768", "bf16", B=4, A=2)]  # more layers are more of the same

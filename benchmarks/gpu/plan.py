"""Everything that the check measures, as plain data: the parts in their order, the items of each, and their seconds.

An item names a module of this package, whose `measure(**arguments)` returns the figures of one line. `--tiny` has a
plan of its own, which a CPU goes through in interpret mode. Leaves out what the figures should be (targets.py).
"""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from benchmarks.gpu.stepping import QUEUED
from llmc_jax.config.train import BY_NAME, OPTIONS

PARTS = {
    "machine": "what the machine reaches at most: a copy, and matrix products of the models' shapes",
    "numerics": "every kernel, and the model on kernels, against float64",
    "races": "what compute-sanitizer finds in kernels whose threads share memory, where it is installed",
    "kernels": "the time of every kernel beside XLA's version of the operation, and of attention beside cuDNN",
    "step": "training steps: GPT-2 124M to 1558M in bf16, 124M in fp32 with TF32",
    "versus": "the step of another checkout, or of a patch, beside this one's, in turns (--vs)",
    "torch": "the same step in PyTorch, compiled; and its attention alone",
    "repeat": "the same 20 steps in separate processes, and with recomputation: the same bits",
    "generate": "a token of generated text, with a cache of keys and values; its logits beside the whole forward's",
    "resume": "a run killed and continued in a new process: the same bits; and what a save costs",
    "variants": "GPT-2 124M's step with one thing changed at a time",
    "algorithms": "what XLA finds the fastest for a step's products, found several times: the best in a file",
    "start": "seconds from the command to the first training step, with an empty and with a filled compile cache",
    "profile": "where the step's time goes, by `llmc-jax profile`",
    "check": "what train.py finds out about its kernels before a first run, and the seconds that this takes",
    "llmc": "the programs of llm.c, where $LLMC names the folder that they were built in",
}
STEP_PARTS = ("step", "versus", "torch", "llmc", "variants", "algorithms")  # whose items time a whole step
V, VP = 50257, 50304
ROWS = 65_536  # B T of the measured kernels: B=64 T=1024
D12_ELEMENTS, D48_ELEMENTS = 124_518_400, 1_557_725_184  # of the flat buffers
SIDE_BY_SIDE = 3  # processes that share a card, where nothing is timed
ATTENTION = ("wgmma", "mma")  # the versions of our own, as pallas_kernels/tuning.py has them
LAYERNORM = (
    "layernorm_forward", "layernorm_backward", "residual_layernorm_forward", "residual_layernorm_backward",
)  # fmt: skip
PRODUCTS_OF_MLP = ("linear_gelu_forward", "linear_gelu_backward")
GELU, SOFTMAX = (tuple(f"{name}_{way}" for way in ("forward", "backward")) for name in ("gelu", "softmax"))
D12_NUMERICS = (
    *[f"{function} bf16 {ROWS}x768" for function in LAYERNORM], *[f"{function} bf16 {ROWS}x3072" for function in GELU],
    f"classifier bf16 4096x{V}x{VP} form=shared", f"embedding_backward bf16 64x1024x768x{VP}",
    f"head_weights bf16 4096x768x{V}x{VP}", *[f"{function} bf16 {ROWS}x768x3072" for function in PRODUCTS_OF_MLP],
    f"adamw_update bf16 {D12_ELEMENTS}", f"global_norm bf16 {D12_ELEMENTS}",
    *[f"attention bf16 4x1024x12x64 implementation={name}" for name in (*ATTENTION, "cudnn")],
    "model L2-NH12-C768 bf16",
)  # fmt: skip
# No product reads its weights in place of the flat buffer: XLA times no algorithms for one that does.
APART = "--xla_gpu_enable_dynamic_slice_fusion=false"
TINY_MODEL = "L1-NH2-C64-V100-T32"

# Part, pattern of the name; the seconds that it is expected to take with the start of its process, by which calls are
# planned; those after which it is ended. The first that matches counts. Expected: from the records of an NVIDIA H200
# (results/gpu_nvidia_h200.json), with the steps that have been added to a timed step since; or an estimate.
SECONDS = (
    ("machine", "copy", 3.6, 120), ("machine", "product fp8*", 2.5, 120),  # fp8: estimate
    ("machine", "product*", 1.5, 120), ("machine", "*", 0.4, 120),
    ("numerics", D12_NUMERICS[-1], 11.1, 180), ("numerics", "model*", 4.2, 180),
    *[("numerics", name, 11.1, 120) for name in D12_NUMERICS],  # 20 of them took three processes 74 s
    ("numerics", "adamw_update bf16 1557725184*", 20.0, 120),  # estimate
    ("numerics", "*", 4.2, 120),  # 103 of them took four processes 107 s
    ("races", "*", 60.0, 240),  # estimate
    ("kernels", "attention*wgmma", 7.9, 120), ("kernels", "attention*mma", 4.7, 120),
    ("kernels", "attention*", 1.0, 120), ("kernels", "*attention*", 4.0, 120),
    ("kernels", "layernorm_forward*", 4.1, 120), ("kernels", "embedding*", 3.7, 120),
    ("kernels", "classifier*", 2.6, 120), ("kernels", "*", 1.2, 120),
    ("step", "*triton-gemm on*", 200.0, 360),  # estimate
    ("step", "d24*", 23.0, 150), ("step", "d36*", 29.0, 200),  # d36: estimate
    ("step", "d48*", 36.0, 240), ("step", "*", 20.0, 120),
    ("versus", "d48*", 100.0, 240), ("versus", "*", 51.0, 200),
    ("torch", "attention*flash", 5.0, 120), ("torch", "attention*", 0.5, 120), ("torch", "*", 38.0, 180),
    ("repeat", "*", 18.0, 120),
    ("generate", "d12 bf16*", 9.5, 180), ("generate", "*", 15.0, 180),  # others than d12: estimate
    ("resume", "killed*", 60.0, 240), ("resume", "*", 40.0, 240),  # estimate
    ("variants", "*", 17.0, 120), ("algorithms", "*", 120.0, 400),  # algorithms: estimate
    ("start", "*", 43.0, 180), ("profile", "*", 20.0, 150),
    ("check", "*", 65.0, 180),
    ("llmc", "*", 6.4, 240),
)  # fmt: skip


class Item(NamedTuple):
    """One measurement: a line of the table."""

    part: str  # a key of PARTS
    name: str
    module: str  # of this package
    arguments: dict[str, Any]
    fresh: bool = False  # in a process of its own; others share one as long as none of them crashes
    shares: bool = False  # the card, with others that do: nothing is timed
    xla_flags: str = ""  # added to XLA_FLAGS of its process, which must be fresh
    expected: float = 0.0  # seconds
    seconds: float = 120  # after which it is ended


@cache
def plan(tiny: bool = False) -> tuple[Item, ...]:
    """All items, in the order in which they run."""
    parts = (
        machine, numerics, races, kernels, step, torch, repeat, generate, resume, variants, algorithms, start,
        profile, check, llmc,
    )  # fmt: skip
    return tuple(timed(item) for part in parts for item in part(tiny))


def timed(item: Item) -> Item:
    """Return an item with its seconds."""
    expected, limit = next(
        seconds for part, pattern, *seconds in SECONDS if part == item.part and fnmatchcase(item.name, pattern)
    )
    return item._replace(expected=expected, seconds=limit)


def expected_seconds(items: Sequence[Item]) -> float:
    """Return the seconds that items are expected to take, of which some share the card."""
    return sum(item.expected / (SIDE_BY_SIDE if item.shares else 1) for item in items)


# ----- kernels: an item's name is its arguments -----------------------------------------------------------------------


def machine(tiny: bool) -> Iterator[Item]:
    names = ["copy", "copy by a fusion", "read"]
    products = "bf16 64x128x256, fp8 64x128x256" if tiny else (
        f"bf16 {ROWS}x768x2304, bf16 {ROWS}x768x768, bf16 {ROWS}x768x3072, bf16 {ROWS}x3072x768, bf16 {ROWS}x768x{VP}, "
        "bf16 16384x1024x4096, bf16 16384x1280x5120, "
        "bf16 16384x1600x4800, bf16 16384x1600x1600, bf16 16384x1600x6400, bf16 16384x6400x1600, "
        f"bf16 16384x1600x{VP}, "
        f"bf16 768x{ROWS}x3072, bf16 {VP}x{ROWS}x768, "  # gradients of weights
        f"fp8 {ROWS}x768x3072, fp8 {ROWS}x3072x768, fp8 {ROWS}x768x{VP}, "  # the large ones of d12 and d48
        "fp8 16384x1600x4800, fp8 16384x1600x6400, fp8 16384x6400x1600, bf16 8192x8192x8192, fp32 4096x768x3072"
    )  # fmt: skip
    for name in [*names, *_names(["product"], products)]:
        what, *shape = name.split() if name.startswith("product") else [name]
        what = "fusion" if name == "copy by a fusion" else what
        dtype, sizes = shape or ("bf16", f"{2**20 if tiny else 2**31}")
        yield Item("machine", name, "machine", {"what": what, "sizes": _sizes(sizes), "dtype": dtype})


def numerics(tiny: bool) -> Iterator[Item]:
    """The kernels of GPT-2 124M's step at its shapes, then all others. sizes: see llmc_jax/trials/problems.py."""
    model = {"sizes": [2, 24], "interpret": True} if tiny else {"sizes": [4, 1024]}
    for name in dict.fromkeys(_tiny_numerics() if tiny else [*D12_NUMERICS, *_numerics()]):
        alone = name.startswith(f"adamw_update bf16 {D48_ELEMENTS}")  # needs the memory of a whole card
        if name.startswith("model"):
            function, of, dtype = name.split()
            item = Item("numerics", name, "numerics", {"function": function, "dtype": dtype, "model": of, **model})
        else:
            item = _kernel("numerics", "numerics", name, **({"interpret": True} if tiny else {}))
        yield item._replace(shares=not alone)


def _tiny_numerics() -> list[str]:
    return [
        "layernorm_forward bf16 9x100", "gelu_backward bf16 3x700", "softmax_forward bf16 1x2x33",
        "classifier bf16 3x257x384 form=shared", "embedding_backward bf16 2x40x100x128", "global_norm bf16 65536",
        "adamw_update bf16 65536 rounding=stochastic master_weights=False",
        "attention bf16 1x70x2x64 implementation=mma", f"model {TINY_MODEL} bf16",
    ]  # fmt: skip


def _numerics() -> Iterator[str]:
    """Yield names of shapes as in training, and of shapes that need padding."""
    yield from _names(
        LAYERNORM,
        f"bf16 {ROWS}x768, bf16 16384x1024, bf16 16384x1280, bf16 16384x1600, bf16 4096x2560, bf16 1024x12288, "
        "bf16 1001x768, bf16 63x100, bf16 1x1600, fp16 4095x768, fp32 16384x768, fp32 1001x1600",
    )
    yield from _names(GELU, f"bf16 {ROWS}x3072, bf16 4095x6401, fp16 4096x3072, fp32 4096x3072")
    yield from _names(SOFTMAX, "bf16 8x12x1024, bf16 2x3x1000, bf16 2x3x63, bf16 2x3x1, fp16 2x12x1024, fp32 2x12x1024")
    for form in ("shared", "sweeps"):
        shapes = f"bf16 4096x{V}x{VP}, bf16 4095x65x128, bf16 63x{V}x{V}, fp16 1024x{V}x{VP}, fp32 1024x{V}x{VP}"
        yield from _names(["classifier"], shapes, f"form={form}")
    yield from _names(
        ["embedding_backward"],
        f"bf16 64x1024x768x{VP}, bf16 4x1000x1600x{VP}, bf16 2x63x100x384, fp16 4x1024x768x{VP}, fp32 4x1024x768x{VP}",
    )
    yield from _names(["head_weights"], f"bf16 4096x768x{V}x{VP}, bf16 1001x1600x65x128")
    yield from _names(PRODUCTS_OF_MLP, f"bf16 {ROWS}x768x3072, bf16 1001x1600x6400")
    for dtype in ("bf16", "fp32", "fp16"):
        yield from _names(["adamw_update", "global_norm"], f"{dtype} {D12_ELEMENTS}")
    yield f"adamw_update bf16 {D48_ELEMENTS} reference=fp32"  # more than 2^32 bytes
    yield f"global_norm bf16 {D48_ELEMENTS}"
    for masters in (True, False):
        yield f"adamw_update bf16 {D12_ELEMENTS} rounding=stochastic master_weights={masters}"
    usual = "bf16 4x1024x12x64, bf16 2x1000x25x64, bf16 2x63x3x64, fp16 2x1024x12x64"
    heads = "bf16 2x1024x6x32, bf16 2x1024x6x80, bf16 2x1024x6x96, bf16 2x1024x6x128, bf16 3x1x2x64, bf16 1x4096x4x64"
    for function, shapes in (("attention", f"{usual}, {heads}"), ("relu_attention", usual)):
        for version in ATTENTION:
            yield from _names([function], shapes, f"implementation={version}")
    yield "attention bf16 4x1024x12x64 implementation=cudnn"
    yield from ("model L2-NH12-C768 bf16", "model L2-NH12-C768 fp16")


def races(tiny: bool) -> Iterator[Item]:
    """Attention, products of ours, and the kernels without automatic barriers whose threads share memory."""
    names = [f"attention bf16 1x256x2x64 implementation={name}" for name in (ATTENTION[-1:] if tiny else ATTENTION)]
    if not tiny:  # of 6400 columns gelu's warps have rows of their own, unlike 3072
        names += ["layernorm_backward bf16 64x768", "gelu_backward bf16 64x6400"]
        names += [f"classifier bf16 4x{V}x{VP} form={form}" for form in ("shared", "sweeps")]
        names += ["head_weights bf16 512x128x250x256", "linear_gelu_backward bf16 512x128x256"]
    for name in names:
        yield _kernel("races", "races", name)._replace(fresh=True)


def kernels(tiny: bool) -> Iterator[Item]:
    """Times of every kernel beside XLA's, at GPT-2 124M's shapes and at the largest model's."""
    more = {"interpret": True} if tiny else {}
    for name in _tiny_kernels() if tiny else _kernels():
        beside = not any(part in name for part in ("attention", "rounding=", "bf16 8192x", "head_"))
        yield _kernel("kernels", "times", name, **({"against": "xla"} if beside else {}), **more)


def _tiny_kernels() -> list[str]:
    return [
        "layernorm_forward bf16 16x128", "classifier bf16 4x250x256 form=sweeps", "adamw_update bf16 65536",
        "attention bf16 1x64x2x64 implementation=naive",
    ]  # fmt: skip


def _kernels() -> Iterator[str]:
    for functions, width in ((LAYERNORM, 1), (GELU, 4)):
        for C in (768, 1600):
            yield from _names(functions, f"bf16 {ROWS}x{width * C}")
    for form in ("shared", "sweeps"):
        yield from _names(["classifier"], f"bf16 {ROWS // 2}x{V}x{VP}, bf16 8192x{V}x{VP}", f"form={form}")
    yield f"head_weights bf16 {ROWS}x768x{V}x{VP} far=False"  # beside cuBLASLt's: what `variants` has for --products
    yield from _names(PRODUCTS_OF_MLP, f"bf16 {ROWS}x768x3072, bf16 16384x1600x6400")
    yield from (f"classifier fp32 4096x{V}x{VP}", f"embedding_backward bf16 64x1024x768x{VP}")
    for size in (D12_ELEMENTS, D48_ELEMENTS):
        yield from _names(["adamw_update", "global_norm"], f"bf16 {size}")
    yield f"adamw_update bf16 {D12_ELEMENTS} rounding=stochastic"
    yield from _names(SOFTMAX, "bf16 16x12x1024")
    for sizes in ("64x1024x12x64", "16x1024x25x64", "16x1024x12x128", "16x4096x12x64"):
        for name in (*ATTENTION, "cudnn", *(["naive"] if "x1024x" in sizes else [])):
            yield f"attention bf16 {sizes} implementation={name}"
    yield from (f"relu_attention bf16 64x1024x12x64 implementation={name}" for name in ATTENTION)


def _names(functions: Iterable[str], shapes: str, how: str = "") -> list[str]:
    """Return the names of functions on shapes, which a comma divides. how: options, as in `form=shared`."""
    return [f"{function} {shape} {how}".strip() for function in functions for shape in shapes.split(", ")]


def _kernel(part: str, module: str, name: str, **more: Any) -> Item:
    """Return the item of a name: function, dtype, sizes and options."""
    function, dtype, sizes, *how = name.split()
    options = {
        key: {"True": True, "False": False}.get(value, value) for key, value in (each.split("=") for each in how)
    }
    return Item(part, name, module, {"function": function, "dtype": dtype, "sizes": _sizes(sizes), **options, **more})


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split("x")]


# ----- the whole step -----------------------------------------------------------------------------------------------


def _step(part: str, name: str, tiny: bool, xla_flags: str = "", **arguments: Any) -> Item:
    if tiny:
        arguments |= {"model": TINY_MODEL, "B": 2, "T": 24, "steps": 1, "interpret": part == "step"}
    return Item(part, name, "steps", arguments, fresh=True, xla_flags=xla_flags)


def _flags(words: str) -> dict[str, Any]:
    """Return train.py's options by name, as flags give them."""
    by_flag = {flag: option for option in OPTIONS for flag in option.flags}
    pairs = [(by_flag[flag], value) for flag, value in zip(words.split()[::2], words.split()[1::2], strict=True)]
    return {each.name: bool(int(value)) if each.type is bool else each.type(value) for each, value in pairs}


def step_flags(item: Item) -> str:
    """Return train.py's flags for the step that an item times; of a peer's, for ours beside it; else nothing."""
    given = item.arguments
    if item.part not in STEP_PARTS or "B" not in given:
        return ""
    B, T = given["B"], given.get("T", 1024)
    dtype = given.get("dtype", given.get("program"))
    values = {"model": "d12", "recompute": 0} | {name: value for name, value in given.items() if name in BY_NAME}
    values |= {"dtype": {"tf32": "fp32", "cuda": "bf16"}.get(dtype, dtype)}
    model = values.pop("model")
    chosen = [f"{BY_NAME[name].flags[0]} {BY_NAME[name].show(value)}" for name, value in values.items()]
    return " ".join([f"-e {model} -b {B} -t {T} -d {B * T}", *chosen])


def step(tiny: bool) -> Iterator[Item]:
    """As train.py makes it; and once with XLA free to make products itself, in Triton, which autotunes them."""
    sizes = [("d12", B) for B in (64, 32, 16)] + [("d48", 16), ("d36", 16), ("d24", 32), ("d24", 64), ("d48", 8)]
    for model, B in sizes[:1] if tiny else sizes:
        yield _step("step", f"{model} bf16 B={B}", tiny, model=model, B=B, dtype="bf16", recompute=0)
    for flags in () if tiny else ("--triton-gemm on", "--triton-gemm off"):
        more = {"dtype": "bf16", "recompute": 0} | _flags(flags)
        yield _step("step", f"d12 bf16 {flags} B=64", tiny, model="d12", B=64, **more)
    if not tiny:
        yield _step("step", "d12 fp32 TF32 B=4", tiny, model="d12", B=4, dtype="fp32", recompute=0)


def variants(tiny: bool) -> Iterator[Item]:
    """GPT-2 124M in bf16 at B=64; the first line is what the others are changed from."""
    fixed: dict[str, Any] = {"model": "d12", "B": 64, "dtype": "bf16", "recompute": 0}
    yield _step("variants", "as it is", tiny, **fixed)
    for flags in () if tiny else (
        "--kernels xla", "--kernels xla --attention cudnn", "--kernels xla --attention flash", "--attention cudnn",
        "--attention naive", "--kernels pallas", "--logit-rows 8192", "--logit-rows 32768", "-r 1", "-r 2",
        "--recompute-blocks 1", "-w 0", "--dtype fp16", "--products xla",
    ):  # fmt: skip
        yield _step("variants", flags, tiny, **(fixed | _flags(flags)))
    for flag in () if tiny else (
        "--xla_gpu_enable_cublaslt=true", "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_latency_hiding_scheduler=true", APART, "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT",
    ):  # fmt: skip
        yield _step("variants", flag, tiny, flag, **fixed)


def algorithms(tiny: bool) -> Iterator[Item]:
    """tunings: as many as have memory side by side. Last, d12 with the products that XLA otherwise times none for."""
    sizes = [("d12", 64, 3), ("d24", 32, 3), ("d48", 16, 2)]
    cases = [(f"{model} bf16 B={B}", "", model, B, tunings) for model, B, tunings in sizes]
    for name, flag, model, B, tunings in cases[:1] if tiny else [*cases, (f"d12 {APART}", APART, *sizes[0])]:
        fixed = {"model": model, "B": B, "dtype": "bf16", "recompute": 0}
        item = _step("algorithms", name, tiny, flag, **fixed, what="compare", tunings=2 if tiny else tunings)
        yield item._replace(module="algorithms", arguments={"steps": QUEUED} | item.arguments)


def repeat(tiny: bool) -> Iterator[Item]:
    """`cache`: own = an empty compile cache, so everything is compiled and tuned anew."""
    cudnn = "--kernels xla --attention cudnn"
    runs = {"first": {}, "again": {}, "own compile cache": {"cache": "own"}}
    runs |= {flags: _flags(flags) for flags in ("-r 1", "-r 2", "--recompute-blocks 1", cudnn)}
    runs |= {f"{cudnn} again": _flags(cudnn)}
    fixed: dict[str, Any] = {"model": "d12", "B": 16, "dtype": "bf16", "recompute": 0}
    fixed["digest_after"] = 2 if tiny else 20
    for name in ("first", "again") if tiny else runs:
        yield _step("repeat", name, tiny, **(fixed | runs[name]))


def generate(tiny: bool) -> Iterator[Item]:
    def item(name: str, what: str, model: str, B: int, dtype: str) -> Item:
        arguments: dict[str, Any] = {"what": what, "model": model, "B": B, "dtype": dtype}
        arguments |= {"model": TINY_MODEL, "T": 24} if tiny else {}
        return Item("generate", name, "generate", arguments, fresh=True)

    yield item("d12 fp32 numerics", "numerics", "d12", 1, "fp32")
    for dtype, B in [("fp32", 1)] if tiny else [("fp32", 1), ("fp32", 16), ("bf16", 1), ("bf16", 16)]:
        yield item(f"d12 {dtype} B={B} kernels numerics", "kernels", "d12", B, dtype)
    for model, B in [("d12", 1)] if tiny else [("d12", 1), ("d12", 16), ("d48", 1), ("d48", 16)]:
        yield item(f"{model} bf16 B={B}", "times", model, B, "bf16")


def resume(tiny: bool) -> Iterator[Item]:
    """programs: whether the process that goes on finds what was compiled for the run."""
    words = f"-e {TINY_MODEL} -b 2 -t 24 --dtype bf16" if tiny else "-e d12 -b 16 -t 1024 --dtype bf16"
    for programs in ("kept",) if tiny else ("kept", "deleted"):
        arguments = {"what": "killed", "words": words, "steps": 20, "every": 5, "programs": programs}
        yield Item("resume", f"killed with compile cache {programs}", "resume", arguments, fresh=True)
    for dtype in ("bf16",) if tiny else ("bf16", "fp32"):
        small = {"model": TINY_MODEL, "B": 2, "T": 24, "steps": 2, "rounds": 1}
        cost = small if tiny else {"model": "d12", "B": 32, "T": 1024, "steps": 20, "rounds": 3}
        arguments = {"what": "saves", "dtype": dtype, **cost}
        yield Item("resume", f"save of d12 {dtype}", "resume", arguments, fresh=True)


def torch(tiny: bool) -> Iterator[Item]:
    """The step, and the attention kernels that PyTorch has, as part `kernels` measures ours."""
    for B, dtype in [(2, "bf16")] if tiny else [(64, "bf16"), (32, "bf16"), (16, "bf16"), (4, "tf32")]:
        arguments = {"B": B, "dtype": dtype} | ({"T": 32, "compiled": False, "steps": 1} if tiny else {})
        yield Item("torch", f"d12 {dtype} B={B}", "torch_step", arguments, fresh=True)
    if not tiny:
        arguments = {"B": 64, "dtype": "bf16", "attention": "cudnn"}
        yield Item("torch", "d12 bf16 B=64 attention=cudnn", "torch_step", arguments, fresh=True)
    for sizes in [[1, 64, 2, 64]] if tiny else [[64, 1024, 12, 64], [16, 1024, 25, 64]]:
        for backend in ("math",) if tiny else ("flash", "cudnn"):
            name = f"attention bf16 {'x'.join(map(str, sizes))} backend={backend}"
            arguments = {"sizes": sizes, "backend": backend, "quick": tiny}
            yield Item("torch", name, "torch_attention", arguments)


# ----- whole programs -----------------------------------------------------------------------------------------------


def start(tiny: bool) -> Iterator[Item]:
    words = f"-e {TINY_MODEL} -b 2 -t 24" if tiny else "-e d12 -b 16 -t 1024"
    yield Item("start", "d12", "programs", {"what": "start", "words": words}, fresh=True)


def profile(tiny: bool) -> Iterator[Item]:
    words = "-e L1-NH2-C64-V100-T64 -b 2 -t 24 --steps 1" if tiny else "-e d12 -b 64 -t 1024 -r 0 --dtype bf16"
    yield Item("profile", "d12", "programs", {"what": "profile", "words": words}, fresh=True)


def check(tiny: bool) -> Iterator[Item]:
    """As the first start of train.py on a card has it, within a minute."""
    words = f"-e {TINY_MODEL} -b 2 -t 24" if tiny else "-e d12 -b 64 -t 1024 -r 0 --dtype bf16"
    arguments = {"what": "check", "words": f"--seconds 60 {words}"}
    yield Item("check", "d12", "programs", arguments, fresh=True)


def llmc(tiny: bool) -> Iterator[Item]:
    """llm.c on the same shapes."""
    shapes = [("cuda", 32)] if tiny else [("cuda", 64), ("cuda", 32), ("cuda", 16), ("fp32", 4)]
    for program, B in shapes:
        dtype = "bf16" if program == "cuda" else "fp32 TF32"
        arguments = {"what": "llmc", "program": program, "B": B}
        yield Item("llmc", f"d12 {dtype} B={B}", "programs", arguments, fresh=True)

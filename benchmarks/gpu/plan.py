"""Everything that the check measures, as plain data: the parts in their order, and the items of each.

An item names a module of this package, whose `measure(**arguments)` returns the figures of one line. `--tiny` has a
plan of its own, which a CPU goes through in interpret mode. Leaves out what the figures should be (targets.py).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llmc_jax.config.train import BY_NAME

PARTS = {
    "machine": "what the machine reaches at most: a copy, and matrix products of the models' shapes",
    "numerics": "every kernel, and the model on kernels, against float64",
    "races": "what compute-sanitizer finds in kernels whose threads share memory, where it is installed",
    "kernels": "the time of every kernel beside XLA's version of the operation, and of attention beside cuDNN",
    "ncu": "what Nsight Compute counts in the kernels that take longest, where it is installed",
    "tiles": "the kernels once more with other tile sizes",
    "step": "training steps: GPT-2 124M to 1558M in bf16, 124M in fp32 with TF32",
    "versus": "the step of another checkout, or of a patch, beside this one's, in turns (--vs)",
    "torch": "the same step in PyTorch, compiled; and its attention alone",
    "repeat": "the same 20 steps in separate processes, and with recomputation: the same bits",
    "generate": "a token of generated text, with a cache of keys and values; its logits beside the whole forward's",
    "resume": "a run killed and continued in a new process: the same bits; and what a save costs",
    "variants": "GPT-2 124M's step with one thing changed at a time",
    "start": "seconds from the command to the first training step, with an empty and with a filled compile cache",
    "profile": "where the step's time goes, by `llmc-jax profile`",
    "check": "what train.py finds out about its kernels before a first run, and the seconds that this takes",
    "llmc": "the programs of llm.c, where $LLMC names the folder that they were built in",
}
STEP_PARTS = ("step", "versus", "torch", "llmc", "variants")  # whose items time a whole step
MODELS = {"d12": 768, "d24": 1024, "d36": 1280, "d48": 1600}  # channels
V, VP = 50257, 50304
ROWS = 65_536  # B T of the measured kernels: B=64 T=1024
D12_ELEMENTS, D48_ELEMENTS = 124_518_400, 1_557_725_184  # of the flat buffers
# rows, inputs, outputs of the large products of d12 at B=64 and of d48 at B=16
FP8 = (
    (ROWS, 768, 3072),
    (ROWS, 3072, 768),
    (ROWS, 768, VP),
    (16384, 1600, 4800),
    (16384, 1600, 6400),
    (16384, 6400, 1600),
)
SIDE_BY_SIDE = 3  # processes that share a card, where nothing is timed
ATTENTION = ("wgmma", "mma")  # the versions of our own, as pallas_kernels/tuning.py has them


class Item(NamedTuple):
    """One measurement: a line of the table."""

    part: str  # a key of PARTS
    name: str
    module: str  # of this package
    arguments: dict[str, Any]
    fresh: bool = False  # in a process of its own; others share one as long as none of them crashes
    shares: bool = False  # the card, with others that do: nothing is timed
    seconds: int = 120  # after which it is ended
    xla_flags: str = ""  # added to XLA_FLAGS of its process, which must be fresh


def plan(tiny: bool = False) -> list[Item]:
    """All items, in the order in which they run."""
    parts = (
        machine, numerics, races, kernels, ncu, tiles, step, torch, repeat, generate, resume, variants, start, profile,
        check, llmc,
    )  # fmt: skip
    return [item for part in parts for item in part(tiny)]


def machine(tiny: bool) -> Iterator[Item]:
    def product(rows: int, inputs: int, outputs: int, dtype: str = "bf16") -> Item:
        name = f"product {dtype} {rows}x{inputs}x{outputs}"
        return Item("machine", name, "machine", {"what": "product", "sizes": [rows, inputs, outputs], "dtype": dtype})

    size = 2**20 if tiny else 2**31
    yield Item("machine", "copy", "machine", {"what": "copy", "sizes": [size], "dtype": "bf16"})
    yield Item("machine", "copy by a fusion", "machine", {"what": "fusion", "sizes": [size], "dtype": "bf16"})
    yield Item("machine", "read", "machine", {"what": "read", "sizes": [size], "dtype": "bf16"})
    if tiny:
        yield product(64, 128, 256)
        yield product(64, 128, 256, "fp8")
        return
    for C in MODELS.values():
        rows = ROWS if C == 768 else ROWS // 4
        for inputs, outputs in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C), (C, VP)):
            if C in (768, 1600) or outputs == 4 * C:
                yield product(rows, inputs, outputs)
    yield product(768, ROWS, 3072)  # a gradient of weights
    yield product(VP, ROWS, 768)
    for rows, inputs, outputs in FP8:
        yield product(rows, inputs, outputs, "fp8")
    yield product(8192, 8192, 8192)
    yield product(4096, 768, 3072, "fp32")


# ----- kernels ------------------------------------------------------------------------------------------------------


def _kernel_item(part: str, module: str, function: str, dtype: str, sizes: list[int], **more: Any) -> Item:
    told = {name: value for name, value in more.items() if name not in ("interpret", "against", "tuning")}
    told |= more.get("tuning", {})
    changed = [
        f"{name}={'/'.join(map(str, value)) if isinstance(value, list) else value}" for name, value in told.items()
    ]
    name = " ".join([function, dtype, "x".join(map(str, sizes)), *changed])
    return Item(part, name, module, dict(function=function, dtype=dtype, sizes=sizes, **more))


LAYERNORM = (
    "layernorm_forward", "layernorm_backward", "residual_layernorm_forward", "residual_layernorm_backward",
)  # fmt: skip


def numerics(tiny: bool) -> Iterator[Item]:
    """The kernels of GPT-2 124M's step at its shapes, then all others. sizes: see llmc_jax/trials/problems.py."""
    items = {item.name: item for item in _numerics(tiny)}
    names = [] if tiny else D12_NUMERICS
    yield from ({name: items[name] for name in names} | items).values()


D12_NUMERICS = (
    *[f"{function} bf16 {ROWS}x768" for function in LAYERNORM],
    f"gelu_forward bf16 {ROWS}x3072", f"gelu_backward bf16 {ROWS}x3072",
    f"classifier bf16 4096x{V}x{VP} form=shared", f"embedding_backward bf16 64x1024x768x{VP}",
    f"adamw_update bf16 {D12_ELEMENTS}", f"global_norm bf16 {D12_ELEMENTS}",
    *[f"attention bf16 4x1024x12x64 implementation={name}" for name in (*ATTENTION, "cudnn")],
    "model L2-NH12-C768 bf16",
)  # fmt: skip


def _numerics(tiny: bool) -> Iterator[Item]:
    """Shapes as in training, and shapes that need padding."""

    def item(function: str, dtype: str, sizes: list[int], **more: Any) -> Item:
        more |= {"interpret": True} if tiny else {}
        alone = function == "adamw_update" and sizes == [D48_ELEMENTS]  # needs the memory of a whole card
        return _kernel_item("numerics", "numerics", function, dtype, sizes, **more)._replace(shares=not alone)

    for function in LAYERNORM:
        shapes = [("bf16", [9, 100])] if tiny else [
            ("bf16", [ROWS, 768]), ("bf16", [16384, 1024]), ("bf16", [16384, 1280]), ("bf16", [16384, 1600]),
            ("bf16", [4096, 2560]), ("bf16", [1024, 12288]), ("bf16", [1001, 768]), ("bf16", [63, 100]),
            ("bf16", [1, 1600]), ("fp16", [4095, 768]), ("fp32", [16384, 768]), ("fp32", [1001, 1600]),
        ]  # fmt: skip
        for dtype, sizes in shapes:
            yield item(function, dtype, sizes)
    for function in ("gelu_forward", "gelu_backward"):
        shapes = [("bf16", [3, 700])] if tiny else [
            ("bf16", [ROWS, 3072]), ("bf16", [4095, 6401]), ("fp16", [4096, 3072]), ("fp32", [4096, 3072]),
        ]  # fmt: skip
        for dtype, sizes in shapes:
            yield item(function, dtype, sizes)
    for function in ("softmax_forward", "softmax_backward"):
        shapes = [("bf16", [1, 2, 33])] if tiny else [
            ("bf16", [8, 12, 1024]), ("bf16", [2, 3, 1000]), ("bf16", [2, 3, 63]), ("bf16", [2, 3, 1]),
            ("fp16", [2, 12, 1024]), ("fp32", [2, 12, 1024]),
        ]  # fmt: skip
        for dtype, sizes in shapes:
            yield item(function, dtype, sizes)
    for form in ("shared", "sweeps"):
        shapes = [("bf16", [3, 257, 384])] if tiny else [
            ("bf16", [4096, V, VP]), ("bf16", [4095, 65, 128]), ("bf16", [63, V, V]), ("fp16", [1024, V, VP]),
            ("fp32", [1024, V, VP]),
        ]  # fmt: skip
        for dtype, sizes in shapes:
            yield item("classifier", dtype, sizes, form=form)
    for dtype, sizes in [("bf16", [2, 40, 100, 128])] if tiny else [
        ("bf16", [64, 1024, 768, VP]), ("bf16", [4, 1000, 1600, VP]), ("bf16", [2, 63, 100, 384]),
        ("fp16", [4, 1024, 768, VP]), ("fp32", [4, 1024, 768, VP]),
    ]:  # fmt: skip
        yield item("embedding_backward", dtype, sizes)
    d12, d48 = D12_ELEMENTS, D48_ELEMENTS
    for dtype, size in [("bf16", 2**16)] if tiny else [("bf16", d12), ("fp32", d12), ("fp16", d12), ("bf16", d48)]:
        yield item(
            "adamw_update", dtype, [size], **({"reference": "fp32"} if size == d48 else {})
        )  # more than 2^32 bytes
        yield item("global_norm", dtype, [size])
    for masters in (True, False):
        size = 2**16 if tiny else d12
        yield item("adamw_update", "bf16", [size], rounding="stochastic", master_weights=masters)
    shapes = [("bf16", [1, 70, 2, 64])] if tiny else [
        ("bf16", [4, 1024, 12, 64]), ("bf16", [2, 1000, 25, 64]), ("bf16", [2, 63, 3, 64]), ("fp16", [2, 1024, 12, 64]),
        ("bf16", [2, 1024, 6, 32]), ("bf16", [2, 1024, 6, 80]), ("bf16", [2, 1024, 6, 96]), ("bf16", [2, 1024, 6, 128]),
        ("bf16", [3, 1, 2, 64]), ("bf16", [1, 4096, 4, 64]),
    ]  # fmt: skip
    for function in ("attention", "relu_attention"):
        for version in ATTENTION[-1:] if tiny else ATTENTION:
            for dtype, sizes in shapes[: 4 if function == "relu_attention" else None]:
                yield item(function, dtype, sizes, implementation=version)
    if not tiny:
        yield item("attention", "bf16", [4, 1024, 12, 64], implementation="cudnn")
    model = "L1-NH2-C64-V100-T32" if tiny else "L2-NH12-C768"
    for dtype in ("bf16",) if tiny else ("bf16", "fp16"):
        arguments = {"function": "model", "dtype": dtype, "sizes": [2, 24] if tiny else [4, 1024], "model": model}
        more = {"interpret": True} if tiny else {}
        yield Item("numerics", f"model {model} {dtype}", "numerics", arguments | more, seconds=180, shares=True)


def races(tiny: bool) -> Iterator[Item]:
    """Attention, and the kernels without automatic barriers whose threads share memory."""

    def item(function: str, sizes: list[int], **more: Any) -> Item:
        return _kernel_item("races", "races", function, "bf16", sizes, **more)._replace(fresh=True, seconds=240)

    for version in ATTENTION[-1:] if tiny else ATTENTION:
        yield item("attention", [1, 256, 2, 64], implementation=version)
    if not tiny:
        yield item("layernorm_backward", [64, 768])
        yield item("gelu_backward", [64, 6400])  # where warps have rows of their own, unlike 3072 columns
        for form in ("shared", "sweeps"):
            yield item("classifier", [4, V, VP], form=form)


def kernels(tiny: bool) -> Iterator[Item]:
    """Times of every kernel beside XLA's, at GPT-2 124M's shapes and at the largest model's."""

    def item(function: str, dtype: str, sizes: list[int], **more: Any) -> Item:
        more |= {"interpret": True} if tiny else {}
        return _kernel_item("kernels", "times", function, dtype, sizes, **more)

    if tiny:
        yield item("layernorm_forward", "bf16", [16, 128], against="xla")
        yield item("classifier", "bf16", [4, 250, 256], form="sweeps", against="xla")
        yield item("adamw_update", "bf16", [2**16], against="xla")
        yield item("attention", "bf16", [1, 64, 2, 64], implementation="naive")
        return
    for C in (768, 1600):
        for function in LAYERNORM:
            yield item(function, "bf16", [ROWS, C], against="xla")
    for C in (768, 1600):
        for function in ("gelu_forward", "gelu_backward"):
            yield item(function, "bf16", [ROWS, 4 * C], against="xla")
    for form in ("shared", "sweeps"):
        yield item("classifier", "bf16", [ROWS // 2, V, VP], form=form, against="xla")
        yield item("classifier", "bf16", [8192, V, VP], form=form)
    yield item("classifier", "fp32", [4096, V, VP], against="xla")
    yield item("embedding_backward", "bf16", [64, 1024, 768, VP], against="xla")
    for size in (D12_ELEMENTS, D48_ELEMENTS):
        yield item("adamw_update", "bf16", [size], against="xla")
        yield item("global_norm", "bf16", [size], against="xla")
    yield item("adamw_update", "bf16", [D12_ELEMENTS], rounding="stochastic")
    for function in ("softmax_forward", "softmax_backward"):
        yield item(function, "bf16", [16, 12, 1024], against="xla")
    for sizes in ([64, 1024, 12, 64], [16, 1024, 25, 64], [16, 1024, 12, 128], [16, 4096, 12, 64]):
        for implementation in (*ATTENTION, "cudnn", "naive"):
            if implementation != "naive" or sizes[1] == 1024:
                yield item("attention", "bf16", sizes, implementation=implementation)
    for implementation in ATTENTION:
        yield item("relu_attention", "bf16", [64, 1024, 12, 64], implementation=implementation)


def ncu(tiny: bool) -> Iterator[Item]:
    """The three kernels of attention, and layernorm's backward as a block has it."""
    attention, layernorm = ([1, 64, 2, 64], [16, 128]) if tiny else ([64, 1024, 12, 64], [ROWS, 768])
    for kernel in ("attention_forward_wgmma", "attention_dq_wgmma", "attention_dkv_wgmma"):
        arguments = {"kernel": kernel, "function": "attention", "sizes": attention, "implementation": "wgmma"}
        yield Item("ncu", f"{kernel} bf16 {'x'.join(map(str, attention))}", "ncu", arguments)
    function = "residual_layernorm_backward"
    arguments = {"kernel": function, "function": function, "sizes": layernorm, "implementation": "pallas"}
    yield Item("ncu", f"{function} bf16 {'x'.join(map(str, layernorm))}", "ncu", arguments)


def tiles(tiny: bool) -> Iterator[Item]:
    """Other numbers in pallas_kernels/tuning.py."""

    def item(function: str, sizes: list[int], **changed: Any) -> Item:
        more = {"interpret": True} if tiny else {}
        return _kernel_item("tiles", "times", function, "bf16", sizes, tuning=changed, **more)

    if tiny:
        yield item("gelu_forward", [16, 128], gelu_block=1024)
        return
    for blocks in (1, 2, 3, 4, 6, 8):
        yield item("layernorm_backward", [ROWS, 768], layernorm_blocks=blocks)
        yield item("residual_layernorm_backward", [ROWS, 1600], layernorm_blocks=blocks)
    for limits in ([512, 1024, 8192], [768, 1600, 8192], [1600, 2048, 8192]):
        yield item("layernorm_forward", [ROWS, 1600], layernorm_forward=limits)
        yield item("residual_layernorm_forward", [ROWS, 768], layernorm_forward=limits)
    for limits in ([512, 1024, 4096], [1024, 2048, 4096], [1600, 2048, 4096]):
        yield item("layernorm_backward", [ROWS, 1600], layernorm_backward=limits)
        yield item("layernorm_backward", [ROWS, 768], layernorm_backward=limits)
    for block in (1024, 2048, 4096, 8192):
        yield item("gelu_forward", [ROWS, 3072], gelu_block=block)
        yield item("gelu_backward", [ROWS, 3072], gelu_block=block)
    for vector in (2, 4, 8):
        yield item("adamw_update", [D12_ELEMENTS], adamw_vector=vector)
    for rows in (16, 32, 64, 128):
        yield item("embedding_backward", [64, 1024, 768, VP], embedding_rows=rows)
    for block in (256, 512, 1024):
        yield item("softmax_forward", [16, 12, 1024], softmax_block=block)


# ----- the whole step -----------------------------------------------------------------------------------------------

TINY_MODEL = "L1-NH2-C64-V100-T32"


LIMITS = {"d12": 120, "d24": 150, "d36": 200, "d48": 240}  # seconds of a step's compilation and measurement


def _step_item(part: str, name: str, tiny: bool, xla_flags: str = "", seconds: int = 0, **arguments: Any) -> Item:
    """seconds: more than its model's, where the compiler tries more."""
    within = max(seconds, LIMITS[arguments["model"]])
    if tiny:
        arguments |= {"model": TINY_MODEL, "B": 2, "T": 24, "steps": 1, "interpret": part == "step"}
    return Item(part, name, "steps", arguments, fresh=True, seconds=within, xla_flags=xla_flags)


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
        yield _step_item("step", f"{model} bf16 B={B}", tiny, model=model, B=B, dtype="bf16", recompute=0)
    if not tiny:
        fixed: dict[str, Any] = {"model": "d12", "recompute": 0}
        for choice in ("on", "off"):
            name, more = f"d12 bf16 --triton-gemm {choice} B=64", {"B": 64, "dtype": "bf16", "triton_gemm": choice}
            yield _step_item("step", name, tiny, seconds=360 if choice == "on" else 0, **fixed, **more)
        yield _step_item("step", "d12 fp32 TF32 B=4", tiny, B=4, dtype="fp32", **fixed)


def variants(tiny: bool) -> Iterator[Item]:
    """GPT-2 124M in bf16 at B=64; the first line is what the others are changed from."""
    fixed: dict[str, Any] = {"model": "d12", "B": 64, "dtype": "bf16", "recompute": 0}
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "--kernels xla": {"kernels": "xla"},
        "--kernels xla --attention cudnn": {"kernels": "xla", "attention": "cudnn"},
        "--kernels xla --attention flash": {"kernels": "xla", "attention": "flash"},
        "--attention cudnn": {"attention": "cudnn"},
        "--attention naive": {"attention": "naive"},
        "--kernels pallas": {"kernels": "pallas"},
        "--logit-rows 8192": {"logit_rows": 8192},
        "--logit-rows 32768": {"logit_rows": 32768},
        "-r 1": {"recompute": 1},
        "-r 2": {"recompute": 2},
        "--recompute-blocks 1": {"recompute_blocks": 1},
        "-ge 1": {"gelu_fusion": 1},
        "-w 0": {"master_weights": False},
        "--dtype fp16": {"dtype": "fp16"},
    }
    for name, change in list(changes.items())[:1] if tiny else changes.items():
        yield _step_item("variants", name, tiny, **(fixed | change))
    flags = (
        "--xla_gpu_enable_cublaslt=true", "--xla_gpu_enable_command_buffer=",
        "--xla_gpu_enable_latency_hiding_scheduler=true", "--xla_gpu_enable_dynamic_slice_fusion=false",
    )  # fmt: skip
    for flag in () if tiny else flags:
        yield _step_item("variants", flag, tiny, flag, **fixed)


def repeat(tiny: bool) -> Iterator[Item]:
    """`cache`: own = an empty compile cache, so everything is compiled and tuned anew."""
    runs: dict[str, dict[str, Any]] = {
        "first": {},
        "again": {},
        "own compile cache": {"cache": "own"},
        "-r 1": {"recompute": 1},
        "-r 2": {"recompute": 2},
        "--recompute-blocks 1": {"recompute_blocks": 1},
        "--kernels xla --attention cudnn": {"kernels": "xla", "attention": "cudnn"},
        "--kernels xla --attention cudnn again": {"kernels": "xla", "attention": "cudnn"},
    }
    fixed: dict[str, Any] = {"model": "d12", "B": 16, "dtype": "bf16", "recompute": 0}
    fixed["digest_after"] = 2 if tiny else 20
    for name, change in list(runs.items())[:2] if tiny else runs.items():
        yield _step_item("repeat", name, tiny, **(fixed | change))


def generate(tiny: bool) -> Iterator[Item]:
    def item(name: str, what: str, model: str, B: int, dtype: str) -> Item:
        arguments: dict[str, Any] = {"what": what, "model": model, "B": B, "dtype": dtype}
        arguments |= {"model": TINY_MODEL, "T": 24} if tiny else {}
        return Item("generate", name, "generate", arguments, fresh=True, seconds=180)

    yield item("d12 fp32 numerics", "numerics", "d12", 1, "fp32")
    for model, B in [("d12", 1)] if tiny else [("d12", 1), ("d12", 16), ("d48", 1), ("d48", 16)]:
        yield item(f"{model} bf16 B={B}", "times", model, B, "bf16")


def resume(tiny: bool) -> Iterator[Item]:
    """programs: whether the process that goes on finds what was compiled for the run."""
    words = f"-e {TINY_MODEL} -b 2 -t 24 --dtype bf16" if tiny else "-e d12 -b 16 -t 1024 --dtype bf16"
    for programs in ("kept",) if tiny else ("kept", "deleted"):
        arguments = {"what": "killed", "words": words, "steps": 20, "every": 5, "programs": programs}
        yield Item("resume", f"killed with compile cache {programs}", "resume", arguments, fresh=True, seconds=240)
    for dtype in ("bf16",) if tiny else ("bf16", "fp32"):
        small = {"model": TINY_MODEL, "B": 2, "T": 24, "steps": 2, "rounds": 1}
        cost = small if tiny else {"model": "d12", "B": 32, "T": 1024, "steps": 20, "rounds": 3}
        arguments = {"what": "saves", "dtype": dtype, **cost}
        yield Item("resume", f"save of d12 {dtype}", "resume", arguments, fresh=True, seconds=240)


def torch(tiny: bool) -> Iterator[Item]:
    """The step, and the attention kernels that PyTorch has, as part `kernels` measures ours."""
    for B, dtype in [(2, "bf16")] if tiny else [(64, "bf16"), (32, "bf16"), (16, "bf16"), (4, "tf32")]:
        arguments = {"B": B, "dtype": dtype} | ({"T": 32, "compiled": False, "steps": 1} if tiny else {})
        yield Item("torch", f"d12 {dtype} B={B}", "torch_step", arguments, fresh=True, seconds=180)
    if not tiny:
        arguments = {"B": 64, "dtype": "bf16", "attention": "cudnn"}
        yield Item("torch", "d12 bf16 B=64 attention=cudnn", "torch_step", arguments, fresh=True, seconds=180)
    for sizes in [[1, 64, 2, 64]] if tiny else [[64, 1024, 12, 64], [16, 1024, 25, 64]]:
        for backend in ("math",) if tiny else ("flash", "cudnn"):
            name = f"attention bf16 {'x'.join(map(str, sizes))} backend={backend}"
            arguments = {"sizes": sizes, "backend": backend, "quick": tiny}
            yield Item("torch", name, "torch_attention", arguments)


# ----- whole programs -----------------------------------------------------------------------------------------------


def start(tiny: bool) -> Iterator[Item]:
    words = f"-e {TINY_MODEL} -b 2 -t 24" if tiny else "-e d12 -b 16 -t 1024"
    yield Item("start", "d12", "programs", {"what": "start", "words": words}, fresh=True, seconds=180)


def profile(tiny: bool) -> Iterator[Item]:
    words = "-e L1-NH2-C64-V100-T64 -b 2 -t 24 --steps 1" if tiny else "-e d12 -b 64 -t 1024 -r 0 --dtype bf16"
    yield Item("profile", "d12", "programs", {"what": "profile", "words": words}, fresh=True, seconds=150)


def check(tiny: bool) -> Iterator[Item]:
    """As the first start of train.py on a card has it, within a minute."""
    words = f"-e {TINY_MODEL} -b 2 -t 24" if tiny else "-e d12 -b 64 -t 1024 -r 0 --dtype bf16"
    arguments = {"what": "check", "words": f"--seconds 60 {words}"}
    yield Item("check", "d12", "programs", arguments, fresh=True, seconds=180)


def llmc(tiny: bool) -> Iterator[Item]:
    """llm.c on the same shapes."""
    shapes = [("cuda", 32)] if tiny else [("cuda", 64), ("cuda", 32), ("cuda", 16), ("fp32", 4)]
    for program, B in shapes:
        dtype = "bf16" if program == "cuda" else "fp32 TF32"
        arguments = {"what": "llmc", "program": program, "B": B}
        yield Item("llmc", f"d12 {dtype} B={B}", "programs", arguments, fresh=True, seconds=240)

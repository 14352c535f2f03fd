"""Times of a kernel and of XLA's version of the same operation, on random inputs of a real size.

Several calls on inputs of their own stand in one compiled program, and several runs of it are queued: neither the cache
nor the time to start a kernel is measured. GB/s are compulsory bytes over time: whatever else is moved counts as loss.
"""

import time
from statistics import median
from typing import Any

import jax

from llmc_jax.trials import problems
from llmc_jax.trials.lines import Figures, NotMeasured, seconds_per_call
from llmc_jax.trials.problems import Function, Problem

SETS_BYTES = 12e9  # of inputs at most
SETS = 4


def measure(
    function: str,
    dtype: str,
    sizes: list[int],
    implementation: str = "pallas",
    *,
    against: str = "",
    interpret: bool = False,
    form: str = "",
    tuning: dict[str, Any] | None = None,
    **options: Any,
) -> Figures:
    """us and GB/s of one implementation; of another too, and how many times slower it is, where `against` names one.

    tuning: fields of pallas_kernels/tuning.py's Sizes that are given another value.
    """
    if function in ("attention", "relu_attention"):
        return measure_attention(function, dtype, sizes, implementation, interpret=interpret)
    if tuning:
        change_sizes(tuning)
    seed = problems.seed_of(f"{function} {sizes}")
    least = problems.problem(function, dtype, sizes, seed, **options)
    number = 1 if interpret else max(1, min(SETS, int(SETS_BYTES / sum(array.nbytes for array in least.arrays))))
    sets = [least] + [problems.problem(function, dtype, sizes, seed + k, **options) for k in range(1, number)]
    solver = problems.implementation(function, implementation, interpret=interpret, form=form)
    seconds, spread = _seconds(solver, sets, quick=interpret)
    figures: Figures = {"us": 1e6 * seconds, "GB/s": least.bytes / seconds / 1e9, "spread": spread}
    if against:
        other, _ = _seconds(problems.implementation(function, against), sets, quick=interpret)
        figures |= {f"{against} us": 1e6 * other, f"{against} / ours": other / seconds}
    return figures


def change_sizes(changes: dict[str, Any]) -> None:
    """Gives the tuning table's row of this GPU other numbers, for everything that is traced from now on."""
    from pallas_kernels import tuning

    target = problems.target()
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    if unknown := changes.keys() - tuning.Sizes._fields:
        raise NotMeasured(f"pallas_kernels/tuning.py has no {', '.join(sorted(unknown))}")
    tuning.SIZES[target] = tuning.SIZES[target]._replace(**changes)
    jax.clear_caches()


def _seconds(solver: Function, sets: list[Problem], *, quick: bool) -> tuple[float, float]:
    """Seconds of one call, and the spread."""
    calls, repeats = (1, 1) if quick else (5, 9)
    bound = sets[0].bind(solver)
    if sets[0].donated:
        return _seconds_in_place(bound, sets, rounds=1 if quick else 9)
    run = jax.jit(lambda *sets: [bound(*arrays) for arrays in sets])
    seconds, spread = seconds_per_call(lambda: run(*[each.arrays for each in sets]), calls, repeats)
    return seconds / len(sets), spread


def _seconds_in_place(bound: Function, sets: list[Problem], *, rounds: int) -> tuple[float, float]:
    """As `_seconds`, of what overwrites its inputs: each round has copies, so that the data stays random."""
    donated = sets[0].donated

    def call(changed: list[dict[int, jax.Array]], kept: list[dict[int, jax.Array]]) -> list[Any]:
        arrays = [mine | others for mine, others in zip(changed, kept, strict=True)]
        return [bound(*[of_set[k] for k in sorted(of_set)]) for of_set in arrays]

    run = jax.jit(call, donate_argnums=0)
    kept = [{k: array for k, array in enumerate(each.arrays) if k not in donated} for each in sets]
    times = []
    for _ in range(rounds + 2):
        changed = jax.block_until_ready([{k: each.arrays[k].copy() for k in donated} for each in sets])
        start = time.perf_counter()
        jax.block_until_ready(run(changed, kept))
        times.append((time.perf_counter() - start) / len(sets))
    times = times[2:]  # compiled, and once more
    return median(times), (max(times) - min(times)) / median(times)


def measure_attention(function: str, dtype: str, sizes: list[int], implementation: str, *, interpret: bool) -> Figures:
    """Forward, and forward with backward; FLOPs of what lies inside the mask, five products backward for two forward.

    implementation: mma, wgmma, wgmma2, cudnn, naive.
    """
    given = problems.problem(function, dtype, sizes, problems.seed_of(f"attention {sizes}"))
    pair = problems.implementation(function, implementation, interpret=interpret)
    num_heads = sizes[2]
    dout, qkv = given.arrays
    forward = jax.jit(lambda qkv: pair[0](qkv, num_heads)[0])
    both = jax.jit(given.bind(pair))
    calls, repeats = (1, 1) if interpret else (10, 9)
    once, _ = seconds_per_call(lambda: forward(qkv), calls, repeats)
    seconds, spread = seconds_per_call(lambda: both(dout, qkv), calls, repeats)
    flops = given.flops
    return {
        "us": 1e6 * seconds, "TFLOP/s": flops / seconds / 1e12, "spread": spread,
        "forward us": 1e6 * once, "forward TFLOP/s": flops * 2 / 7 / once / 1e12,
        "backward us": 1e6 * (seconds - once), "backward TFLOP/s": flops * 5 / 7 / max(seconds - once, 1e-9) / 1e12,
    }  # fmt: skip

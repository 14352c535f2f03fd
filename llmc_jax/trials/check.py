"""One implementation at a run's own shapes: is it right? And a whole step on several: is it right, and how fast?

A task of children.py. Leaves out what is tried (candidates.py) and what follows from it (start.py).
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from llmc_jax import kernels
from llmc_jax.config.model import CAUSAL
from llmc_jax.config.train import TrainConfig
from llmc_jax.kernels import GROUPS, Finding
from llmc_jax.kernels.choice import implementations
from llmc_jax.machine import compiling
from llmc_jax.models.execution import Execution
from llmc_jax.models.layout import letters
from llmc_jax.ops import attention
from llmc_jax.ops.table import Function
from llmc_jax.plan.plan import step_numbers
from llmc_jax.training.state import DTYPES, initial_state
from llmc_jax.training.step import StepOptions, train_step
from llmc_jax.trials import candidates, numerics, problems
from llmc_jax.trials.candidates import Case
from llmc_jax.trials.children import NotMeasured, Tried, running

MATRIX_BYTES = 2e9  # of attention's T x T matrix in one layer, beyond which XLA's step does without it, and has no time
LAYERS = 6  # of the step that is compared: a deeper model repeats them, and its compilation takes as much longer
WHOLE_IN_FP64 = 2**28  # elements of AdamW's buffers; larger ones are compared in float32
ROUND, ROUNDS = 0.3, 3  # seconds of a round of steps, in which the device never waits for the host
Rows = tuple[tuple[str, str], ...]  # operations, and the names of the rows that run them


def measure(what: str, case: Case, **arguments: Any) -> Tried:
    """Try one implementation (what: kernel) or a whole step (what: step), as the run would compute it.

    what: device: raise NotMeasured if this process computes on another one than the run.
    """
    if not case.tf32:
        jax.config.update("jax_default_matmul_precision", "highest")
    if what == "device":
        found = kernels.this_machine()
        if (found.platform, found.capability) != ("gpu", case.machine.capability):
            raise NotMeasured(f"JAX computes on {found.kind} there")
        return Tried()
    return measure_kernel(case, **arguments) if what == "kernel" else measure_step(case, **arguments)


def measure_kernel(case: Case, finding: Finding) -> Tried:
    """Return what is wrong with an implementation's functions."""
    row = implementations(finding.operation)[finding.implementation]
    by_name, wrong = row.functions(case.setting), []
    for function, sizes in candidates.parts(case, finding.operation).items():
        adamw, seed = function == "adamw_update", problems.seed_of(function)
        given = problems.problem(
            function, case.dtype, sizes, seed, rounding=case.rounding, master_weights=case.master_weights
        )
        solver: Any = tuple(by_name.values()) if "attention" in function else by_name[function]
        run = jax.jit(given.bind(solver)).lower(*given.arrays).compile()
        large = adamw and given.arrays[0].size > WHOLE_IN_FP64  # its buffers are not cut into parts
        wide = jnp.float32 if large else jnp.float64
        _, found = numerics.judged(
            given, run, promised=row.repeats_bits, interpret=case.interpret, wide=wide, rounding=case.rounding
        )
        wrong += [f"{function}, {each}" for each in found]
        del given, run
    return Tried("; ".join(wrong))


# ----- a whole step -------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What a step gave."""

    loss: float  # in nats per token
    gradient: np.ndarray  # (flat_size,) float32
    seconds: float  # 0: not known
    beside: float = 0.0  # of the step that took turns with it


def measure_step(case: Case, chosen: Rows, options: compiling.Options, beside: Rows = ()) -> Tried:
    """Return what is wrong with a step on what was chosen beside XLA's, and its seconds.

    chosen: nothing is XLA's step itself. options: of XLA, beside the run's own. Both steps are the run's own program,
    but for their number of layers (LAYERS); the gradient is what AdamW makes of it in its first step. beside: the rows
    of a step that is timed in turns with this one, because the clock of a GPU moves more than some steps differ.
    """
    if getattr(case.model, "num_layers", 0) > LAYERS:
        case = case._replace(model=replace(case.model, num_layers=LAYERS))
    reference = _xla_step(case)
    if not chosen:
        return Tried("", reference.seconds)
    found = _step(case, chosen_functions(case, chosen), options, chosen_functions(case, beside) if beside else None)
    _, wrong = numerics.judged_model(case.model, case.dtype, found[:2], reference[:2])
    return Tried("; ".join(wrong), found.seconds, beside=found.beside)


@cache
def _xla_step(case: Case) -> Step:
    """Return XLA's step; where the T x T matrix is too large for it, without that, and its time does not count."""
    usual = case.setting.attention == CAUSAL  # of another one nothing computes it without that
    elements = case.batch_size * letters(case.model).get("NH", 1) * case.sequence_length**2
    if not usual or elements * (4 if case.dtype == "fp32" else 2) <= MATRIX_BYTES:
        try:
            with_matrix = {f"attention_{way}": getattr(attention, f"attention_{way}") for way in problems.WAYS}
            return _step(case, with_matrix, case.other_options)
        except jax.errors.JaxRuntimeError as error:
            if not usual or "RESOURCE_EXHAUSTED" not in str(error):
                raise
    without = dict(zip(GROUPS["attention"], problems.plain_twin("attention"), strict=True))
    return _step(case, without, case.other_options)._replace(seconds=0.0)


def chosen_functions(case: Case, chosen: Rows) -> dict[str, Function]:
    """Return the functions of what was chosen, by name."""
    by_name: dict[str, Function] = {}
    for operation, name in chosen:
        by_name |= implementations(operation)[name].functions(case.setting)
    return by_name


def _step(
    case: Case, given: dict[str, Function], options: compiling.Options, beside: dict[str, Function] | None = None
) -> Step:
    """Run the program on random weights and tokens: loss and gradient of its first step, seconds of the next ones.

    beside: the functions of another one, which goes on with the same state.
    """
    model, kind = case.model, DTYPES[case.dtype]
    merged = tuple((dict(case.options) | dict(options)).items())
    scale = 128.0 if case.dtype == "fp16" else None
    master = case.master_weights or case.dtype == "fp32"
    states = [initial_state(problems.random_weights(case.model), kind, master_weights=master, loss_scale=scale)]
    shape = case.accumulation, case.batch_size, case.sequence_length + 1
    tokens = problems.skewed_tokens(shape, model.vocab_size, seed=1)
    batch = jnp.asarray(tokens[..., :-1]), jnp.asarray(tokens[..., 1:])
    # Nothing is clipped, and the weights hardly move: AdamW's first m is the gradient times 1 - beta1.
    config = TrainConfig(learning_rate=1e-6, grad_clip=0.0)

    def made(given: dict[str, Function]) -> Callable[[int], Any]:
        op, optimizer = kernels.assembled(given)
        execution = Execution(op, case.recompute, case.recompute_blocks, case.logit_rows, merged)
        step_options = StepOptions("constant", "matrices", execution, case.rounding, optimizer)
        numbers = jax.device_put(step_numbers(config, optimizer, 1000))
        program = compiling.compiled(train_step.lower(states[0], *batch, numbers, model, step_options), merged)

        def run_calls(calls: int) -> Any:
            for _ in range(calls):
                states[0], metrics = program(states[0], *batch, numbers)
            return jax.block_until_ready(metrics)

        return run_calls

    programs = [made(each) for each in (given, beside) if each is not None]
    with running():
        loss = float(programs[0](1).loss)
        gradient = np.asarray(states[0].buffers["m"]) / np.float32(1 - config.beta1)
        return Step(loss, gradient, *([1.0] * len(programs) if case.interpret else _seconds_of(programs)))


def _seconds_of(programs: Sequence[Callable[[int], Any]]) -> list[float]:
    """Return the seconds of a call of each, in turns: the median of rounds.

    Each takes a number of calls, queues so many and waits for the last.
    """

    def took(run_calls: Callable[[int], Any], calls: int) -> float:
        start = time.perf_counter()
        run_calls(calls)
        return (time.perf_counter() - start) / calls

    calls = [math.ceil(ROUND / took(each, 1)) for each in programs]
    rounds = [[took(*each) for each in zip(programs, calls, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(each) for each in zip(*rounds, strict=True)]

"""Whether the step of a plan fits in a memory, and with which other flags it would.

Leaves out what takes the memory (memory.py) and what the compiler says of it (run/fitting.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.config.train import BY_NAME, TrainConfig
from llmc_jax.machine.device import gib
from llmc_jax.models.gpt2.tensors import num_parameters
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.search import largest_size, limit_of

ROOM = 0.9  # of what a step takes by estimate: what another may take where the memory was full all the same


Remedy = Mapping[str, Any]  # options by name that change so that a step fits


class DoesNotFit(InputError):
    """A step takes more memory than there is."""

    def __init__(self, words: str, remedies: tuple[Remedy, ...] = ()) -> None:
        super().__init__(words)
        self.remedies = remedies


def check_fits(plan: Plan) -> None:
    """Raise DoesNotFit, with what would fit, where a step needs more memory than there is, whatever the compiler does.

    One that passes may still not fit: what it needs at least is a lower bound.
    """
    config, model, need, available = plan.config, plan.model, plan.needed, plan.available
    if available is None or need.total <= available:
        return
    shape = f"L={model.num_layers} NH={model.num_heads} C={model.channels}, {num_parameters(model):,} parameters"
    words = (
        f"-e: this model ({shape}) needs at least {gib(need.total)} of memory with -b {config.batch_size} "
        f"-t {config.sequence_length}: {gib(need.state)} for parameters, gradient, the optimizer's state and the "
        f"step's copies, {gib(need.total - need.state)} more for activations; this machine has {gib(available)}"
    )
    raise refusal(plan, words, limit_of(plan.machine.platform, available))


def check_program(plan: Plan, taken: int) -> None:
    """Raise DoesNotFit where the compiled step of a plan takes more bytes than there are."""
    available = plan.available
    if available is not None and taken > available:
        words = f"-b {plan.config.batch_size}: the compiled step takes {gib(taken)}, and there are {gib(available)}"
        raise refusal(plan, words, limit_of(plan.machine.platform, available), taken)


def refusal(plan: Plan, words: str, available: int, taken: int | None = None) -> DoesNotFit:
    """Return the error for a plan whose step does not fit: words on that, and what would fit into so many bytes.

    taken: bytes that the step takes by its compiler, where that is known. Estimates count as much more, or less.
    """
    found = remedies(plan, available if taken is None else available * computed(plan).program // taken)
    instead = "lower -b or -t, or take a smaller model"
    if found:
        instead = f"by estimate these fit, with as many tokens in an update: {', or '.join(map(_flags, found))}"
    return DoesNotFit(f"{words}; {instead}; {typed('plan')} with these flags shows more", found)


def _flags(remedy: Remedy) -> str:
    """Return the options of a remedy as one types them: `-r 2 -b 8`."""
    return " ".join(f"{BY_NAME[name].flags[0]} {BY_NAME[name].show(value)}" for name, value in remedy.items())


def remedies(plan: Plan, available: int) -> tuple[Remedy, ...]:
    """Return other options with which a plan's step would fit by estimate, with as many tokens in an update.

    The largest -b that fits as it is; and more split over the devices or more computed again, where that lets it be
    larger. A resumed run keeps its -b.
    """
    asked, limit = plan.config, min(available, int(ROOM * computed(plan).program))
    same, goes_on = replace(asked, total_batch_size=asked.tokens_per_step), asked.reuse and plan.repeat is not None

    def fits(config: TrainConfig) -> bool:
        found = make_plan(config, plan.model, plan.machine, xla_flags=plan.xla_flags)
        return config.batch_size <= asked.batch_size and computed(found).program <= limit

    found, best = list[Remedy](), dict[str, int]()
    for change in ({}, *_changes(asked)):
        config, kind = replace(same, **change), next(iter(change), "")
        size = largest_size(config, fits)
        if size is None or (goes_on and size != asked.batch_size):
            continue
        if size > max(best.get("", 0), best.get(kind, 0)):
            best[kind] = size
            found.append({**change, **_of_batch(asked, size)})
    return tuple(found)


def _changes(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Yield what takes less memory, one option each, what costs least first."""
    if config.devices > 1:
        yield from ({"zero_stage": stage} for stage in range(config.zero_stage + 1, 3))
    if not config.recompute_blocks:
        yield from ({"recompute": level} for level in range(config.recompute + 1, 3))
    if config.recompute_blocks != 1:
        yield {"recompute_blocks": 1}


def _of_batch(config: TrainConfig, size: int) -> dict[str, int]:
    """Return the options that change with -b, so that an update has as many tokens."""
    if size == config.batch_size:
        return {}
    tokens = {"total_batch_size": config.tokens_per_step} if config.total_batch_size == -1 else {}
    return {"batch_size": size, **tokens}

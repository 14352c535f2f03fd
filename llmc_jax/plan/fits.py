"""Memory that does not suffice for the step of a plan, and the -b with which it would.

Leaves out what takes the memory (memory.py) and what the compiler says of it (run/fitting.py).
"""

from dataclasses import replace

from llmc_jax.base.commands import typed
from llmc_jax.base.errors import InputError
from llmc_jax.config.train import TrainConfig
from llmc_jax.machine.device import gib
from llmc_jax.models.layout import num_parameters, shape_words
from llmc_jax.plan.memory import computed
from llmc_jax.plan.plan import Plan, make_plan
from llmc_jax.plan.search import largest_size, limit_of

ROOM = 0.9  # of what a step takes by estimate: what another may take where the memory was full all the same


class DoesNotFit(InputError):
    """A step takes more memory than there is."""


def check_fits(plan: Plan) -> None:
    """Raise DoesNotFit, with what would fit, where a step needs more memory than there is, whatever the compiler does.

    One that passes may still not fit: what it needs at least is a lower bound.
    """
    config, model, need, available = plan.config, plan.model, plan.needed, plan.available
    if available is None or need.total <= available:
        return
    shape = f"{shape_words(model)}, {num_parameters(model):,} parameters"
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
    size = smaller_batch(plan, available if taken is None else available * computed(plan).program // taken)
    instead = "lower -b or -t, or take a smaller model"
    if size is not None:
        tokens = f" -d {plan.config.tokens_per_step}" if plan.config.total_batch_size == -1 else ""
        instead = f"by estimate -b {size}{tokens} fits, with as many tokens in an update"
    return DoesNotFit(f"{words}; {instead}; {typed('plan')} with these flags shows what else would fit")


def smaller_batch(plan: Plan, available: int) -> int | None:
    """Return the largest smaller -b with which a plan's step fits by estimate, with as many tokens in an update.

    None where none does, and of a resumed run, which keeps its -b.
    """
    asked, limit = plan.config, min(available, int(ROOM * computed(plan).program))
    if asked.reuse and plan.repeat is not None:
        return None

    def fits(config: TrainConfig) -> bool:
        found = make_plan(config, plan.model, plan.machine, xla_flags=plan.xla_flags)
        return config.batch_size < asked.batch_size and computed(found).program <= limit

    return largest_size(replace(asked, total_batch_size=asked.tokens_per_step), fits)

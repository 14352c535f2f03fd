"""The figures of one training step: the log keeps them, the screen shows them, the picture is drawn from them."""

from typing import Any, NamedTuple

from llmc_jax.base.numbers import flop_rate

EMA_DECAY = 0.95  # llm.c's


class StepFigures(NamedTuple):
    """What one step gave, in the order of metrics.jsonl; None for what only some runs or steps have."""

    step: int  # from 0 as everywhere in the code; the screen counts from 1
    loss: float  # nats per token
    norm: float  # of the gradient, before clipping
    lr: float
    ms: float
    tokens_per_second: float  # of this step alone
    skipped: bool = False  # the step updated nothing
    tokens: int = 0  # seen so far, with this step's
    loss_scale: float | None = None  # None where the loss is not scaled
    z_loss: float | None = None  # the loss among the last 128, in standard deviations; None until there are so many
    z_norm: float | None = None  # the norm likewise
    memory: int | None = None  # bytes: the most so far on the first GPU; on a CPU, of this process now

    def known(self) -> dict[str, Any]:
        """Return the figures that there are, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Average(NamedTuple):
    """llm.c's exponential average with bias correction of a figure that each step has; the first, which compiles, is
    left out.

    Source: llm.c train_gpt2.cu, `ema_tokens_per_second`.
    """

    steps: int = 0  # seen, the first included
    ema: float = 0.0  # biased

    def then(self, value: float) -> "Average":
        """Return the average after another step."""
        if self.steps == 0:
            return Average(1)
        return Average(self.steps + 1, EMA_DECAY * self.ema + (1 - EMA_DECAY) * value)

    @property
    def mean(self) -> float | None:
        """Return the average so far; None until a step without compilation has been seen."""
        return None if self.steps < 2 else self.ema / (1 - EMA_DECAY ** (self.steps - 1))


def utilization_text(flops_per_second: float, peak: float | None, precision: str) -> str:
    """Return `38.0% bf16 MFU` where the peak is known, else the rate itself: `12.3 GFLOP/s`, `98.76 TFLOP/s`.

    flops_per_second and peak in FLOP/s, peak of all devices together. llm.c prints -100% for a card it does not know.
    """
    if peak is not None:
        return f"{100 * flops_per_second / peak:.1f}% {precision} MFU"
    return flop_rate(flops_per_second)

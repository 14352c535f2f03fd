"""The charts of a page: which figures they show, and where those stand in a run's events."""

from collections.abc import Collection
from dataclasses import replace

from llmc_jax.report.content import Panel, PanelCurve

FACTORS = {"memory": 2.0**-30, "accuracy_norm": 100.0, "accuracy": 100.0}  # from a log's units to those of the panels
BEFORE = ("val.loss", "train.estimate", "accuracy_norm", "accuracy")  # the step's update; the others come after it


def _panel(key: str, title: str, unit: str, *curves: tuple[str, str], log: bool = False, points: str = "") -> Panel:
    """Return a panel; points: keys of curves that have single points and no line."""
    drawn = [PanelCurve(name, label, "points" if name in points.split() else "line") for name, label in curves]
    return Panel(key, title, unit, log, drawn)


PANELS = (
    _panel(
        "loss", "Loss", "nats per token",
        ("train.loss", "training"), ("val.loss", "validation"), ("train.estimate", "training data, evaluation"),
        log=True, points="val.loss train.estimate",
    ),
    _panel(
        "hellaswag", "HellaSwag", "% correct",
        ("accuracy_norm", "by mean loss per token (llm.c's)"), ("accuracy", "by summed loss"),
        points="accuracy_norm accuracy",
    ),
    _panel("norm", "Gradient norm", "", ("norm", "before clipping"), log=True),
    _panel("lr", "Learning rate", "", ("lr", "learning rate")),
    _panel("tokens_per_second", "Speed", "tokens per second", ("tokens_per_second", "per step")),
    _panel("ms", "Time per step", "ms", ("ms", "per step"), log=True),
    _panel("mfu", "Model FLOPs utilization", "% of peak", ("mfu", "per step")),
    _panel("flops", "Model compute rate", "GFLOP/s", ("flops", "per step")),
    _panel("memory", "Memory", "GiB", ("memory", "peak of the first GPU, else of the process")),
    _panel("loss_scale", "Loss scale", "", ("loss_scale", "per step"), log=True),
    _panel("z", "Outliers", "standard deviations", ("z_loss", "loss"), ("z_norm", "gradient norm")),
    _panel("gpu_clock", "GPU clock", "MHz", ("gpu.clock", "SM clock")),
    _panel("gpu_power", "GPU power", "W", ("gpu.power", "power")),
    _panel("gpu_temperature", "GPU temperature", "°C", ("gpu.temperature", "GPU")),
    _panel("gpu_load", "GPU load", "%", ("gpu.compute", "compute"), ("gpu.memory_busy", "memory busy")),
)  # fmt: skip

KEYS = tuple(curve.key for panel in PANELS for curve in panel.curves)


def panels_of(keys: Collection[str]) -> list[Panel]:
    """Return the panels that have data, with the curves that do."""
    kept = [replace(panel, curves=[each for each in panel.curves if each.key in keys]) for panel in PANELS]
    return [panel for panel in kept if panel.curves]

"""The settings of a run, what ran it and how it went, in rows of words; the settings in which runs differ.

A configuration may be damaged or of another version: what is not as expected is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmc_jax.base.numbers import count, duration, flop_rate, number, plural
from llmc_jax.base.options import show_value, without_credentials
from llmc_jax.config.train import BY_NAME
from llmc_jax.logs.curves import NONE, Curve, finite, median, window_of
from llmc_jax.logs.files import finite_number, table_of
from llmc_jax.machine.device import gib
from llmc_jax.report.content import Difference, Groups, Rows, Status
from llmc_jax.report.series import Axes, Figures

Config = Mapping[str, Any]
OPTIONS, MODEL, OPERATIONS, MACHINE, VERSIONS, ENVIRONMENT = (
    "Options", "Model", "Operation implementations", "Machine", "Versions", "Environment",
)  # fmt: skip


def positive(value: Any) -> float | None:
    """Return a number above 0; None for what is none."""
    return finite_number(value, 0, 1e30) or None


def settings(config: Config, kernels: Config) -> dict[str, dict[str, str]]:
    """Return all settings of a run by group and name, as shown."""
    found = {
        OPTIONS: {flag_of(name): shown_option(name, value) for name, value in table_of(config.get("options")).items()},
        MODEL: _texts(config.get("model")),
        OPERATIONS: _operations(kernels),
        MACHINE: _machine(config),
        VERSIONS: _versions(config),
        ENVIRONMENT: _texts(config.get("environment"), named="_"),
    }
    return {group: rows for group, rows in found.items() if rows}


def flag_of(name: str) -> str:
    """Return an option's flag; its own name where it has none, or one that says the opposite (--no-save)."""
    about = BY_NAME.get(name)
    return name if about is None or (about.switch and about.default) else about.long_flag


def shown_option(name: str, value: Any) -> str:
    """Return an option's value, as the command line has it."""
    is_word = isinstance(value, str) or name not in BY_NAME
    return _text(value) if is_word else without_credentials(BY_NAME[name].show(value))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    text = value if isinstance(value, str) else "none" if value is None else show_value(value)
    return without_credentials(text)


def _texts(table: Any, named: str = " ") -> dict[str, str]:
    """Return what a JSON object says. named: what stands between the words of a name."""
    return {name.replace("_", named): _text(value) for name, value in table_of(table).items()}


def _operations(kernels: Config) -> dict[str, str]:
    choices = kernels.get("choices")
    rows = [table_of(each) for each in choices] if isinstance(choices, list) else []
    why = [f" ({each['why']})" if each.get("why") else "" for each in rows]
    return {
        str(each.get("operation")): f"{each['implementation']}{words}"
        for each, words in zip(rows, why, strict=True)
        if "implementation" in each
    }


def _machine(config: Config) -> dict[str, str]:
    device = {name: value for name, value in table_of(config.get("device")).items() if value is not None}
    rows = _texts(device)
    if (memory := positive(device.get("memory_bytes"))) is not None:
        rows.pop("memory bytes")
        rows["memory"] = gib(int(memory))
    if config.get("platform"):
        rows["operating system"] = _text(config["platform"])
    return rows


def _versions(config: Config) -> dict[str, str]:
    rows = _texts(config.get("versions"), named="_")
    git = table_of(config.get("git"))
    if "commit" in git:
        rows["commit"] = f"{_text(git['commit'])}{', modified' if git.get('modified') else ''}"
    return rows


def facts_of(groups: Groups, config: Config) -> list[tuple[str, Rows]]:
    """Return settings by group, the command first, the options as train.py's --help groups them."""
    found: list[tuple[str, Rows]] = []
    command = {name: _text(config[name]) for name in ("command_line", "started") if config.get(name)}
    if command:
        found.append(("Command", [(name.replace("_", " "), value) for name, value in command.items()]))
    for group, rows in groups.items():
        found += _by_help(rows) if group == OPTIONS else [(group, list(rows.items()))]
    return found


def _by_help(options: Mapping[str, str]) -> list[tuple[str, Rows]]:
    groups = {flag_of(name): about.group for name, about in BY_NAME.items()}
    found: dict[str, Rows] = {}
    for flag, value in options.items():
        found.setdefault(f"{OPTIONS}: {groups.get(flag, 'others')}", []).append((flag, value))
    return list(found.items())


# ----- how it went ----------------------------------------------------------------------------------------------------


def summary_of(status: Status, figures: Figures, axes: Axes, start: Config) -> Rows:
    """Return a dozen figures: how far, how good, how fast. start: the last start's event."""

    def of(key: str) -> Curve:
        return figures.get(key, NONE)

    rows = [
        ("steps", steps_words(status.step, status.steps)),
        ("best validation loss", _best(of("val.loss"))),
        ("last validation loss", _last(of("val.loss"))),
        ("training loss", _recent(of("train.loss"))),
        ("HellaSwag", _last(of("accuracy_norm"), 2, " %")),
        ("tokens", _tokens(axes, figures)),
        ("speed", _median(of("tokens_per_second"), "{:,.0f} tokens per second")),
        ("time per step", _median(of("ms"), "{:,.2f} ms")),
        ("utilization", _median(of("mfu"), "{:.1f} % of peak")),
        ("compute rate", _median(of("flops"), "{:,.1f} GFLOP/s")),
        ("memory", _most(of("memory"), "{:,.2f} GiB")),
        ("time", _time(figures, axes)),
        ("parameters", count(size) if (size := positive(start.get("parameters"))) else ""),
        ("peak", flop_rate(peak) if (peak := positive(start.get("peak_flops"))) else ""),
    ]
    return [(name, words) for name, words in rows if words]


def _best(series: Curve) -> str:
    good = finite(series)
    if not len(good.steps):
        return ""
    place = int(good.values.argmin())
    return f"{number(good.values[place])} at step {good.steps[place]:,}"


def _last(series: Curve, digits: int = 4, unit: str = "") -> str:
    if not len(series.steps):
        return ""
    return f"{number(series.values[-1], digits)}{unit} at step {series.steps[-1]:,}"


def _recent(series: Curve) -> str:
    """Return the mean of the last values that are finite, as many as the smooth curve of a picture averages."""
    good = finite(series).values
    if not len(good):
        return ""
    window = window_of(len(good))
    return f"{number(float(good[-window:].mean()))}{f', mean of {window} steps' if window > 1 else ''}"


def _tokens(axes: Axes, figures: Figures) -> str:
    train = figures.get("train.loss")
    if axes.tokens is None or train is None:
        return ""
    return count(float(axes.tokens.at(train.steps[-1:] + 1)[0]))


def _median(series: Curve, words: str) -> str:
    middle = median(series)
    return "" if middle is None else words.format(middle)


def _most(series: Curve, words: str) -> str:
    good = finite(series).values
    return words.format(good.max()) if len(good) else ""


def _time(figures: Figures, axes: Axes) -> str:
    train = figures.get("train.loss")
    if train is None or train.times is None or axes.began is None:
        return ""
    return duration(float(train.times[-1]) - axes.began)


def steps_words(step: int | None, steps: int | None) -> str:
    """Return how far a run is."""
    if step is None:
        return ""
    return plural(step, "step") if steps is None or steps == step else f"{step:,} of {plural(steps, 'step')}"


# ----- what differs ---------------------------------------------------------------------------------------------------

# Flags that say where a run is and not what it is; they differ between any two.
PLACES = ("output_dir", "reuse")
LEFT_OUT = {(OPTIONS, flag_of(name)) for name in PLACES} | {(MACHINE, "process")}

# What an option was in a version that did not have it yet.
DEFAULTS = {flag_of(name): shown_option(name, about.default) for name, about in BY_NAME.items()}


def differences_of(runs: Sequence[Groups]) -> Iterator[Difference]:
    """Yield the settings whose values differ among the runs that have settings of that group at all."""
    for group in dict.fromkeys(group for run in runs for group in run):
        having = [run[group] for run in runs if group in run]
        for name in dict.fromkeys(name for rows in having for name in rows):
            absent = DEFAULTS.get(name, "") if group == OPTIONS else ""
            if len({rows.get(name, absent) for rows in having}) > 1 and (group, name) not in LEFT_OUT:
                yield Difference(group, name, [run[group].get(name, absent) if group in run else "" for run in runs])

"""The settings in which runs differ: options, model, kernels, machine, versions, environment."""

from collections.abc import Iterator, Mapping, Sequence

from llmc_jax.config.train import BY_NAME
from llmc_jax.report.content import Difference, Differences
from llmc_jax.report.facts import MACHINE, OPTIONS, flag_of, shown_option

# Flags that say where a run is and not what it is; they differ between any two.
PLACES = ("output_dir", "reuse")
LEFT_OUT = {(OPTIONS, flag_of(name)) for name in PLACES} | {(MACHINE, "process")}

# What an option was in a version that did not have it yet.
DEFAULTS = {flag_of(name): shown_option(name, about.default) for name, about in BY_NAME.items()}

Groups = Mapping[str, Mapping[str, str]]


def differences_of(names: Sequence[str], runs: Sequence[Groups]) -> Differences:
    """Return the settings whose values differ among the runs that have settings of that group at all."""
    return Differences(list(names), list(_rows(runs)))


def _rows(runs: Sequence[Groups]) -> Iterator[Difference]:
    for group in dict.fromkeys(group for run in runs for group in run):
        having = [run[group] for run in runs if group in run]
        for name in dict.fromkeys(name for rows in having for name in rows):
            absent = DEFAULTS.get(name, "") if group == OPTIONS else ""
            if len({rows.get(name, absent) for rows in having}) > 1 and (group, name) not in LEFT_OUT:
                yield Difference(group, name, [run[group].get(name, absent) if group in run else "" for run in runs])

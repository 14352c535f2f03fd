"""What has been measured on one machine: kept as JSON, shown as one page of tables."""

import json
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import groups
from benchmarks.gpu.plan import PARTS, Item, plan
from llmc_jax.base.errors import InputError
from llmc_jax.base.files import digest_of_files
from llmc_jax.trials.children import Figures
from pallas_kernels import tuning

DONE, SKIPPED, FAILED, UNJUDGED = "done", "skipped", "failed", "not judged"
COPIES = ("copy", "copy by a fusion")  # items of part machine: what a kernel's GB/s are compared with
NO_MEMORY = "RESOURCE_EXHAUSTED"  # in a message: says nothing of the kernel
MORE = ("_profile", "_groups")  # what the names of other JSON files than the results end with
Key = tuple[str, str]  # part, name of the item


class Record(NamedTuple):
    """One item, measured or tried."""

    status: str  # DONE, SKIPPED, FAILED, or UNJUDGED: the machine failed, which says nothing of what was measured
    figures: Figures
    message: str  # why not; of what is done, what there is to know beside the figures
    date: str
    source: str  # of llmc_jax and pallas_kernels, as `source_digest` has it
    seconds: float  # that measuring took


class Results:
    """The records of one machine. Each change is written at once."""

    def __init__(self, folder: Path, device: str, name: str = "") -> None:
        """name: of the files, where it is not that of the device."""
        self.name = name or "gpu_" + re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
        self.json_file, self.page = folder / f"{self.name}.json", folder / f"{self.name}.md"
        self.groups_file = folder / f"{self.name}_groups.json"  # of part profile
        self.machine: dict[str, str] = {}
        self.commands: list[str] = []
        self.records: dict[Key, Record] = {}

    def read(self) -> None:
        """Take the records of the file. Raises InputError if it is something else, or not there."""
        try:
            content = json.loads(self.json_file.read_text())
            self.machine, self.commands = content["machine"], content["commands"]
            self.records = {(part, name): Record(*fields) for part, name, *fields in content["records"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.json_file}: not what this check writes ({problem})") from error

    @property
    def card(self) -> str:
        """Return the device's name: no figure is shown without it."""
        return self.machine.get("device", "GPU")

    def save(self) -> None:
        """Writes the JSON file, whole or not at all."""
        rows = [[*key, *record] for key, record in self.records.items()]
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        about = f'"machine": {json.dumps(self.machine)},\n "commands": {json.dumps(self.commands)}'
        text = f'{{{about},\n "records": [\n{lines}\n]}}\n'
        temporary = self.json_file.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(self.json_file)

    def add(self, item: Item, record: Record) -> None:
        """Keeps a record, in place of an earlier one of the same item."""
        self.records[item.part, item.name] = record
        self.save()

    def figures(self, part: str, pattern: str, figure: str) -> Iterator[tuple[str, float]]:
        """(name, number) of a figure of every item that was measured and whose name matches a pattern like `d12*`.

        What is said of a kernel that computes something wrong is left out.
        """
        for (of_part, name), record in self.records.items():
            if of_part == part and fnmatchcase(name, pattern) and record.status == DONE:
                number = self.shown(of_part, name, record).get(figure)
                if isinstance(number, (int, float)) and not self.is_wrong(of_part, name):
                    yield name, float(number)

    def copy_rate(self) -> float | None:
        """GB/s of the faster of the two measured copies: the plain one, and XLA's kernel."""
        records = [self.records.get(("machine", name)) for name in COPIES]
        rates = [float(record.figures["GB/s"]) for record in records if record and record.status == DONE]
        return max(rates, default=None)

    def shown(self, part: str, name: str, record: Record) -> Figures:
        """The figures, with GB/s as a share of the measured copy's where both are known."""
        rate, figures = self.copy_rate(), dict(record.figures)
        if part == "kernels" and rate and "GB/s" in figures:
            figures["of copy"] = float(figures["GB/s"]) / rate
        unchanged = self.unchanged_step()
        if part == "variants" and unchanged and "tok/s" in figures:
            figures["of the step"] = float(figures["tok/s"]) / unchanged
        return figures

    def unchanged_step(self) -> float | None:
        """Tokens per second of the step that the variants change."""
        for key in (("variants", "as it is"), ("step", "d12 bf16 B=64")):
            record = self.records.get(key)
            if record and record.status == DONE:
                return float(record.figures["tok/s"])
        return None

    def wrong(self) -> dict[Key, str]:
        """Return what failed its comparison, with float64 or of a continued run with the whole one, and how.

        For what had no memory for the comparison nothing is known.
        """
        found = {}
        for (part, name), record in self.records.items():
            if part in ("numerics", "resume") or name.endswith(" numerics"):  # of part generate
                verdict = str(record.figures.get("verdict", ""))
                if (record.status == FAILED and NO_MEMORY not in record.message) or verdict.startswith("WRONG"):
                    found[part, name] = ". ".join(filter(None, [verdict, record.message]))
        return found

    def failed(self) -> dict[Key, str]:
        """Return what failed otherwise, and how."""
        wrong = self.wrong()
        failed = {key: each for key, each in self.records.items() if each.status in (FAILED, UNJUDGED)}
        return {key: each.message for key, each in failed.items() if key not in wrong}

    def is_wrong(self, part: str, name: str) -> bool:
        """Return whether the kernel that an item times failed, in this dtype and form, on any shape."""
        return part == "kernels" and any(_same_kernel(name, failed) for _, failed in self.wrong())


def _same_kernel(timed: str, failed: str) -> bool:
    """Return whether an item that measures time runs the kernel that an item of numerics tested."""

    def of(name: str) -> tuple[list[str], set[str]]:
        words = name.split()
        return words[:2], {word for word in words if word.startswith(("form=", "implementation="))}

    (timed_of, timed_how), (failed_of, failed_how) = of(timed), of(failed)
    same = timed_of == failed_of and _streams_rows(timed) == _streams_rows(failed)
    return same and (timed_how == failed_how or not timed_how or not failed_how)


def _streams_rows(name: str) -> bool:
    """Return whether an item's layernorm has rows too long for registers: what streams them is another kernel."""
    function, _, sizes, *_ = [*name.split(), "", ""]
    if "layernorm" not in function:
        return False
    limits = getattr(tuning.sizes("sm_90"), function.removeprefix("residual_"))
    return int(sizes.rpartition("x")[2]) > limits[-1]


def result_files(folder: Path) -> list[Path]:
    """Return the files of results in a folder, one for each card."""
    return sorted(path for path in folder.glob("gpu_*.json") if not path.stem.endswith(MORE))


# ----- the page -----------------------------------------------------------------------------------------------------


def number(value: float | int | str) -> str:
    """A figure for the table."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def columns_of(rows: Iterable[Figures]) -> list[str]:
    """All names of figures, in the order in which they first appear."""
    found: dict[str, None] = {}
    for row in rows:
        found |= dict.fromkeys(row)
    return list(found)


def part_table(results: Results, part: str) -> str:
    """The Markdown table of one part; empty if nothing of it was tried."""
    place = {item.name: at for at, item in enumerate(plan()) if item.part == part}  # lanes end in any order
    names = sorted((name for p, name in results.records if p == part), key=lambda name: place.get(name, len(place)))
    of_part = {name: results.records[part, name] for name in names}
    if not of_part:
        return ""
    shown = {name: results.shown(part, name, record) for name, record in of_part.items()}
    columns = columns_of(shown.values()) or ["why not"]
    dates = sorted({record.date for record in of_part.values()})
    sources = sorted({record.source for record in of_part.values()})
    lines = [f"## {part}: {results.card}", "", f"{PARTS[part][0].upper()}{PARTS[part][1:]}.", ""]
    lines += [f"Measured {' and '.join(dates[:: max(1, len(dates) - 1)])}; source {', '.join(sources)}.", ""]
    lines += [f"| item | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for name, record in of_part.items():
        if record.status == DONE:
            cells = [number(shown[name][column]) if column in shown[name] else "" for column in columns]
            if part == "kernels" and results.is_wrong(part, name):
                cells[-1] += " (its numerics are wrong: not to be believed)"
        else:
            cells = [f"{record.status}: {record.message}", *[""] * (len(columns) - 1)]
        lines.append(f"| {name} | {' | '.join(cells)} |".replace("\n", " "))
    return "\n".join(lines)


def page(results: Results, summary: str, lines_for_kernels: str) -> str:
    """The whole page."""
    machine = ", ".join(f"{name} {value}" for name, value in results.machine.items() if name != "device")
    head = [f"# {results.card}", "", f"{machine}.", ""]
    head += ["Made by:", "", "```", *results.commands, "```", ""]
    head += ["Times are medians; the spread is the largest less the least, as a share. docs: [gpu.md](../gpu.md).", ""]
    for title, found in (("Wrong", results.wrong()), ("Failed", results.failed())):
        if found:
            head += [f"## {title}", "", *[f"- {': '.join(key)}: {how}" for key, how in found.items()], ""]
    head += ["## Summary", "", summary, ""]
    if by_group := groups.read(results.groups_file):
        head += [groups.section(by_group, results.card), ""]
    if lines_for_kernels:
        head += ["## For `MEASURED` in llmc_jax/kernels/choice.py", "", "```python", lines_for_kernels, "```", ""]
    tables = [table for part in PARTS if (table := part_table(results, part))]
    return "\n".join([*head, "\n\n".join(tables), ""])


def source_digest(root: Path) -> str:
    """Return twelve digits of a digest of all that is measured: a copy of the repository has no commit to name."""
    return digest_of_files(p for folder in ("llmc_jax", "pallas_kernels") for p in (root / folder).rglob("*.py"))[:12]

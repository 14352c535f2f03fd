"""The whole check of an NVIDIA GPU, part by part: benchmarks/gpu_check.sh starts it, benchmarks/gpu.md explains it.

Each item is measured in a process that may crash or hang without the others (llmc_jax/trials/worker.py), what it says
is kept at once, and an item that has been measured is not measured again unless its part is named. Leaves out how
anything is measured (gpu/, llmc_jax/trials/). Imports neither JAX nor anything that is not in Python's library.
"""
# ruff: noqa: E402

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import clocks, first, groups, targets, versus
from benchmarks.gpu.plan import PARTS, SIDE_BY_SIDE, Item, expected_seconds, plan, step_flags
from benchmarks.gpu.results import (
    DONE,
    FAILED,
    SKIPPED,
    UNJUDGED,
    Record,
    Results,
    number,
    page,
    result_files,
    source_digest,
)
from llmc_jax.base.errors import InputError
from llmc_jax.base.kit import exit_status
from llmc_jax.machine.jax_setup import MEMORY_SHARE
from llmc_jax.machine.nvml import GpuReading
from llmc_jax.trials.children import Children, Outcome, Stuck, Task

MARGIN = 0.02  # of a card's memory, for the contexts of processes that share it
LEAST_SECONDS = 5  # that are not worth beginning an item for
DESCRIBE_SECONDS = 120
STATUS = {"DONE": DONE, "SKIPPED": SKIPPED, "FAILED": FAILED, "UNJUDGED": UNJUDGED}


class Check:
    """One run of the check."""

    def __init__(self, results: Results, scratch: Path, tiny: bool) -> None:
        self.results, self.scratch, self.tiny = results, scratch, tiny
        self.source = source_digest(ROOT)
        self.read_card: clocks.Read | None = None  # its clock, where the driver tells
        self.began = False  # something has been measured in this call
        self._writing = threading.Lock()  # of results and page, by lanes side by side

    def environment(self, item: Item | None = None, processes: int = 1) -> dict[str, str]:
        """Of a measuring process, one of so many that share the card."""
        found = dict(os.environ)
        found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
        found["JAX_COMPILATION_CACHE_DIR"] = str(self.scratch / "xla")
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        found["GPU_CHECK_OUTPUT"] = str(self.results.json_file.parent.resolve())
        found["GPU_CHECK_SCRATCH"], found["GPU_CHECK_NAME"] = str(self.scratch), self.results.name
        if self.tiny:
            found["JAX_PLATFORMS"] = "cpu"
            # An interpreted kernel of several warpgroups waits in as many of XLA's threads: with one for each of two
            # cores it may wait for ever.
            found["PJRT_NPROC"] = "8"
        if item is not None and item.xla_flags:
            found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {item.xla_flags}".strip()
        if item is not None and item.arguments.get("cache") == "own":
            found["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(dir=self.scratch)
        if processes > 1:
            found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{(MEMORY_SHARE - MARGIN) / processes:.3f}"
        return found

    @property
    def lanes(self) -> int:
        """Return how many processes may share the card: one where the driver lets only one in."""
        return SIDE_BY_SIDE if self.results.machine.get("compute_mode", "Default") == "Default" else 1

    def run_items(self, title: str, items: list[Item], end: float) -> bool:
        """Measure items until a time of `time.monotonic`; False if it came before all of them were measured.

        Those that may share the card are measured side by side, each of the others alone on it. What `end` interrupts
        has no record, and is begun again next time; unless it is the first one of the whole call, which had all of its
        time: no call would ever get beyond that one. Raises Stuck.
        """
        measured = 0
        for shares, group in groupby(items, key=lambda item: item.shares):
            stretch = list(group)
            found: list[Item | Exception] = []
            lane = partial(self._lane, iter(stretch), end, found)
            threads = [threading.Thread(target=lane, daemon=True) for _ in range(self.lanes if shares else 1)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            if problem := next((each for each in found if isinstance(each, Exception)), None):
                raise problem
            measured += len(found)
            if len(found) < len(stretch):
                print(f"{title}: time is up, {len(items) - measured} items are left for the next call", flush=True)
                return False
        return True

    def _lane(self, items: Iterator[Item], end: float, found: list[Item | Exception]) -> None:
        """Measure one item after the other until none is left or time is up, and note each, or the problem, as found.

        Lanes that run side by side take from the same items.
        """
        children = last = None
        try:
            for item in items:
                if children is None or item.fresh or (last and last.fresh):
                    if children is not None:
                        children.close()
                    children = Children(self.environment(item, self.lanes if item.shares else 1), ROOT)
                if time.monotonic() > end - LEAST_SECONDS or not self._measure(item, children, end):
                    return
                found.append(last := item)
        except Exception as problem:
            found.append(problem)
        finally:
            if children is not None:
                children.close()

    def _measure(self, item: Item, children: Children, end: float) -> bool:
        """Measure one item; False if time ran out before it was done. Raises Stuck."""
        task = Task(item.name, f"benchmarks.gpu.{item.module}", item.arguments, item.seconds)
        with clocks.sampled(None if item.shares else self.read_card) as readings:
            outcome = children.measure(task, end)
        done = outcome.kind != "TIME"
        with self._writing:
            if done:
                self._keep(item, *with_clock(outcome, readings)[:3])
            elif not self.began:
                told = f"not done after {outcome.seconds:.0f} s, all the time of a call; give it more with --minutes"
                self._keep(item, "FAILED", told, outcome.seconds)
            self.began = True
        if children.stuck is not None:
            raise Stuck(f"{item.part}: {item.name}: process {children.stuck} cannot be ended")
        return done

    def _keep(self, item: Item, kind: str, content: Any, seconds: float) -> None:
        """Adds a record and shows it. content: the figures, or why there are none."""
        figures, message = (content, "") if kind == "DONE" else ({}, content)
        if figures and (flags := step_flags(item)):
            figures = figures | {"flags": flags}
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        record = Record(STATUS[kind], figures, message, today, self.source, round(seconds, 1))
        self.results.add(item, record)
        write_page(self.results)
        shown = self.results.shown(item.part, item.name, record)
        text = "  ".join(f"{name} {number(value)}" for name, value in shown.items())
        print(f"{item.part}: {item.name}: {text or f'{record.status}: {message}'}", flush=True)

    def compare(self, given: Path, items: list[Item], end: float) -> None:
        """Measure steps beside those of another checkout or a patch. Raises InputError where it is neither."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            other = versus.other_side(given, Path(folder))
            for item in versus.items_of(items, given):
                with clocks.sampled(self.read_card) as readings:
                    outcome = versus.compare(item, other, partial(self.environment, item), end, self.lanes > 1)
                if outcome.kind == "TIME":
                    print(f"versus: time is up before {item.name}", flush=True)
                    return
                self._keep(item, *with_clock(outcome, readings)[:3])

    def describe(self) -> dict[str, str]:
        """Return what there is to know of the machine, asked in a process of its own. Raises InputError."""
        code = "import json; from benchmarks.gpu.machine import describe; print(json.dumps(describe()))"
        command = [sys.executable, "-c", code]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=self.environment(), timeout=DESCRIBE_SECONDS,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(f"JAX does not find its devices within {DESCRIBE_SECONDS} s: is the GPU in use?") from None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise InputError(f"JAX cannot be used with {sys.executable} (set PYTHON to another): {said[-1][-300:]}")
        return json.loads(done.stdout.splitlines()[-1])


def with_clock(outcome: Outcome, readings: Sequence[GpuReading]) -> Outcome:
    """Return an outcome with what the card did meanwhile among its figures."""
    if outcome.kind != "DONE":
        return outcome
    return outcome._replace(content={**outcome.content, **clocks.figures_of(readings)})


def left(results: Results, items: Iterable[Item]) -> list[Item]:
    """The items that were neither measured nor failed. What was skipped may be possible by now."""
    known = {key for key, record in results.records.items() if record.status not in (SKIPPED, UNJUDGED)}
    return [item for item in items if (item.part, item.name) not in known]


def continued(source: Path, output: Path, name: str) -> None:
    """Copy the results of an earlier call, so that this one goes on from them. name: of the results' files.

    Raises InputError where there are none of this machine, or two to choose from.
    """
    if not source.is_dir():
        raise InputError(f"--from {source}: there is no such folder; it is one that an earlier call had as --output")
    if not (source / f"{name}.json").is_file():
        others = ", ".join(path.name for path in result_files(source))
        raise InputError(f"--from {source}: has no {name}.json, the results of this machine; it has {others or 'none'}")
    if source.resolve() == output.resolve():
        return
    if (output / f"{name}.json").exists():
        raise InputError(f"--from {source}: {output} has a {name}.json of its own; go on with that, without --from")
    for path in sorted(source.glob(f"{name}*")):
        if path.is_file():
            shutil.copyfile(path, output / path.name)


def write_page(results: Results) -> str:
    """Write the page and return its summary."""
    said = [targets.summary(results)]
    if by_group := groups.read(results.groups_file):
        said += groups.wrong_estimates(by_group, results.card)
    summary = "\n\n".join(said)
    lines = targets.measured_lines(results)
    results.page.write_text(page(results, summary, lines))
    return summary + (f"\n\nFor MEASURED in llmc_jax/kernels/choice.py:\n{lines}" if lines else "")


def page_of(file: Path) -> Path:
    """Write the page of results that were measured elsewhere; return its path. Raises InputError for another file."""
    if file.suffix != ".json" or not file.is_file():
        raise InputError(f"--page {file}: is no gpu_….json that this check wrote")
    results = Results(file.parent, "", file.stem)
    results.read()
    try:
        write_page(results)
    except OSError as error:
        raise InputError(f"--page {file}: {results.page} cannot be written: {error.strerror}") from error
    return results.page


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    epilog = "\n".join([
        "parts:", *(f"  {name:10} {about}" for name, about in PARTS.items()),
        "", "first: what matters most, in two calls of five minutes (see --minutes), each of which goes on where the",
        "last one stopped, given the same --output, or --from; then the rest, as time allows",
    ])  # fmt: skip
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_check.sh", description="Checks and measures everything on an NVIDIA GPU.", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "parts", nargs="*", metavar="PART",
        help="what to measure, again if need be; or `first`; without: all that is missing",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, kernels interpreted: no figures")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT[,TEXT]", help="items whose names contain one of these"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="end after so many (default of `first` 5)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the results (default benchmarks/results)")
    parser.add_argument(
        "--from", type=Path, dest="source", metavar="DIR", help="begin with a copy of the results there"
    )
    parser.add_argument("--page", type=Path, metavar="JSON", help="write the page of these results: needs no GPU")
    parser.add_argument(
        "--vs", type=Path, metavar="PATH", help="the step of another checkout, or of a patch to this one, beside ours"
    )
    parser.add_argument(
        "--list", action="store_true", help="the items, how long they take, which are done: needs no GPU"
    )
    args = parser.parse_args(argv)
    if "tiny" in args.parts:
        args.tiny, args.parts = True, [part for part in args.parts if part != "tiny"]
    args.first = "first" in args.parts
    if args.first and len(args.parts) > 1:
        parser.error("`first` has an order of its own: name no part beside it")
    args.parts = [] if args.first else args.parts
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    args.only = [text.strip() for texts in args.only for text in texts.split(",") if text.strip()]
    if args.vs and (args.first or args.parts):
        parser.error("--vs compares steps: name no part beside it, but --only which of them")
    if "versus" in args.parts:
        parser.error("part versus is what --vs measures: name the other checkout, or the patch")
    if args.page and args.list:
        parser.error("--page and --list: one at a time")
    parts = ["step"] if args.vs else args.parts or PARTS
    args.items = items = [item for item in plan(args.tiny) if item.part in parts]
    if unknown := [text for text in args.only if not any(text in item.name for item in items)]:
        known = ", ".join(sorted({item.name.split()[0] for item in items}))
        parser.error(f"--only: no item's name contains {' or '.join(unknown)}; they begin with {known} (see --list)")
    if args.only:
        args.items = [item for item in items if any(text in item.name for text in args.only)]
    if args.vs and not args.only:
        args.items = [item for item in items if item.name in versus.STEPS]
    args.scratch = Path(tempfile.gettempdir()) / f"gpu_check_{os.getuid()}"  # for what is not a result
    args.output = args.output or (args.scratch if args.tiny else ROOT / "benchmarks/results")
    if args.minutes is None:
        args.minutes = first.MINUTES if args.first else 1e6
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: must be more than 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 unless a kernel is wrong, something failed, or there is no GPU."""
    began, args = time.monotonic(), parse(argv)
    try:
        if args.page or args.list:
            print(page_of(args.page)) if args.page else show_items(args)
            return 0
        check = prepare(args, shlex.join(["benchmarks/gpu_check.sh", *(sys.argv[1:] if argv is None else argv)]))
        results = check.results
        run(check, args, began + 60 * args.minutes)
    except InputError as error:
        print(f"gpu_check.sh: {error}", file=sys.stderr)
        return 2
    except Stuck as stuck:
        results.save()
        write_page(results)
        print(f"{stuck}: it holds the GPU until the machine restarts", file=sys.stderr, flush=True)
        return 1
    results.save()
    print(f"{write_page(results)}\n\n{results.page}", flush=True)
    wrong, failed = results.wrong(), results.failed()
    for title, found in (("WRONG", wrong), ("FAILED", failed)):
        for key, how in found.items():
            print(f"{title} {': '.join(key)}: {how}", flush=True)
    return 1 if failed or wrong else 0


def prepare(args: argparse.Namespace, command: str) -> Check:
    """Return the check of this machine with what is known of it. Raises InputError for what cannot be checked."""
    output = args.output
    try:
        args.scratch.mkdir(exist_ok=True)
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: no folder can be made there: {error.strerror}") from error
    check = Check(Results(output, "tiny"), args.scratch, args.tiny)
    machine = check.describe()
    if not args.tiny and not machine["capability"]:
        raise InputError("JAX sees no NVIDIA GPU here; `--tiny` goes through the check on a CPU")
    device = "tiny" if args.tiny else machine["device"]
    if args.source:
        continued(args.source, output, Results(output, device).name)
    check.results = Results(output, device)
    if check.results.json_file.exists():
        check.results.read()
        said_before(check.results)
    check.read_card = clocks.reader(machine.pop("pci", ""))
    check.results.machine = machine
    check.results.commands.append(command)
    return check


def said_before(results: Results) -> None:
    """Print which records count as done: they may be another machine's with such a card, or another source's."""
    if dates := sorted(record.date for record in results.records.values() if record.status == DONE):
        sources = ", ".join(sorted({record.source for record in results.records.values()}))
        print(
            f"{len(dates)} items are done, in {results.json_file}, {dates[0]} to {dates[-1]}, source {sources}; "
            "--output of an empty folder measures all anew",
            flush=True,
        )


def show_items(args: argparse.Namespace) -> None:
    """Print the items in the order in which they run, the seconds that they take, and on which cards they are done."""
    cards = [Results(file.parent, "", file.stem) for file in result_files(args.output)]
    for card in cards:
        card.read()
    items = versus.items_of(args.items, args.vs) if args.vs else args.items
    groups_of = {part: [item for item in items if item.part == part] for part in PARTS}
    if args.first:
        groups_of = first.calls(items, args.tiny)
    for title, items in groups_of.items():
        if not items:
            continue
        seconds = expected_seconds(items) + (first.CALL if args.first else 0)
        expected = "" if args.tiny else f", {seconds:.0f} s expected on an NVIDIA H200"
        print(f"----- {title}: {len(items)} items{expected}")
        for item in items:
            known = {card.card: record for card in cards if (record := card.records.get((item.part, item.name)))}
            said = [f"{record.status} {record.date} on {name}" for name, record in known.items()] or ["not measured"]
            print(f"{item.part}: {item.name}: {'' if args.tiny else f'{item.expected:.1f} s; '}{'; '.join(said)}")


def run(check: Check, args: argparse.Namespace, deadline: float) -> None:
    """Measure what was asked for until a time of `time.monotonic`. Raises Stuck, and InputError of --vs."""
    if args.vs:
        check.compare(args.vs, args.items, deadline)
        return
    if args.first:
        for leg in first.LEGS:
            if items := left(check.results, first.items_of(leg, args.items, args.tiny)):
                print(f"----- {leg.call}, {leg.what}: {leg.part}", flush=True)
                if not check.run_items(leg.part, items, deadline):
                    return
        return
    for part in PARTS:
        items = [item for item in args.items if item.part == part]
        if not args.parts and items and not (items := left(check.results, items)):
            print(f"----- {part}: done before", flush=True)
        if items and time.monotonic() < deadline:
            print(f"----- {part}: {PARTS[part]}", flush=True)
            check.run_items(part, items, deadline)


if __name__ == "__main__":
    sys.exit(exit_status("gpu_check.sh", main))

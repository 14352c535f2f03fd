"""The whole check of an NVIDIA GPU, part by part: benchmarks/gpu_check.sh starts it, benchmarks/gpu.md explains it.

Each item is measured in a process that may crash or hang without the others (llmc_jax/trials/worker.py), what it says
is kept at once, and an item that has been measured is not measured again unless its part is named. Leaves out how
anything is measured (gpu/, llmc_jax/trials/). Imports neither JAX nor anything that is not in Python's library.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import targets  # noqa: E402
from benchmarks.gpu.plan import PARTS, Item, plan  # noqa: E402
from benchmarks.gpu.results import DONE, FAILED, SKIPPED, Record, Results, number, page, source_digest  # noqa: E402
from llmc_jax.platform import MEMORY_SHARE  # noqa: E402
from llmc_jax.trials.children import Children, Stuck, Task  # noqa: E402

PART_SECONDS = 480
STATUS = {"DONE": DONE, "SKIPPED": SKIPPED, "FAILED": FAILED, "SPOILT": FAILED}


class Check:
    """One run of the check."""

    def __init__(self, results: Results, scratch: Path, tiny: bool) -> None:
        self.results, self.scratch, self.tiny = results, scratch, tiny
        self.source = source_digest(ROOT)
        self.began = False  # something has been measured

    def environment(self, item: Item | None = None) -> dict[str, str]:
        """Of a measuring process."""
        found = dict(os.environ)
        found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY_SHARE))
        found["JAX_COMPILATION_CACHE_DIR"] = str(self.scratch / "xla")
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        found["GPU_CHECK_OUTPUT"] = str(self.results.json_file.parent.resolve())
        found["GPU_CHECK_SCRATCH"], found["GPU_CHECK_NAME"] = str(self.scratch), self.results.name
        if self.tiny:
            found["JAX_PLATFORMS"] = "cpu"
        if item is not None and item.xla_flags:
            found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {item.xla_flags}".strip()
        if item is not None and item.arguments.get("cache") == "own":
            found["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(dir=self.scratch)
        return found

    def run_part(self, part: str, items: list[Item], deadline: float) -> bool:
        """Measures what is left of a part; False if time ran out before all of it was.

        An item that the end of the part interrupts has no record, and is begun again next time; unless it is the first
        of the whole check: that one has its own time, or no run would ever get beyond it.
        """
        end = min(time.monotonic() + PART_SECONDS, deadline)
        children: Children | None = None
        try:
            for number, item in enumerate(items):
                if children is None or item.fresh or items[number - 1].fresh:
                    if children is not None:
                        children.end()
                    children = Children(self.environment(item), ROOT)
                if end - time.monotonic() < 5 or not self._measure(item, children, end):
                    print(f"{part}: time is up, {len(items) - number} items are left for the next run", flush=True)
                    return False
        finally:
            if children is not None:
                children.end()
        return True

    def _measure(self, item: Item, children: Children, end: float) -> bool:
        """Measures one item; False if time ran out before it was done. Raises Stuck."""
        task = Task(item.name, home(item.module), item.arguments, item.seconds)
        outcome = children.measure(task, end, patient=not self.began)
        if outcome.kind != "TIME":
            self._keep(item, outcome.kind, outcome.content, outcome.seconds)
            self.began = True
        if children.stuck is not None:
            raise Stuck(f"{item.part}: {item.name}: process {children.stuck} cannot be ended")
        return outcome.kind != "TIME"

    def _keep(self, item: Item, kind: str, content: Any, seconds: float) -> None:
        """Adds a record and shows it. content: the figures, or why there are none."""
        figures, message = (content, "") if kind == "DONE" else ({}, content)
        today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
        record = Record(STATUS[kind], figures, message, today, self.source, round(seconds, 1))
        self.results.add(item, record)
        shown = self.results.shown(item.part, item.name, record)
        text = "  ".join(f"{name} {number(value)}" for name, value in shown.items())
        print(f"{item.part}: {item.name}: {text or f'{record.status}: {message}'}", flush=True)

    def describe(self) -> dict[str, str]:
        """The machine, asked in a process of its own."""
        code = "import json; from benchmarks.gpu.machine import describe; print(json.dumps(describe()))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=self.environment(), timeout=120, check=False
        )
        if done.returncode:
            sys.exit(f"JAX cannot be used with {sys.executable} (set PYTHON to another):\n{done.stderr[-800:]}")
        return json.loads(done.stdout.splitlines()[-1])


def home(module: str) -> str:
    """The full name of a module that an item names."""
    return f"llmc_jax.trials.{module}" if module in ("numerics", "times") else f"benchmarks.gpu.{module}"


def left(results: Results, items: Iterable[Item]) -> list[Item]:
    """The items that were neither measured nor failed. What was skipped may be possible by now."""
    known = {key for key, record in results.records.items() if record.status != SKIPPED}
    return [item for item in items if (item.part, item.name) not in known]


def write_page(results: Results) -> str:
    """Writes the page and returns its summary."""
    summary = targets.summary(results)
    lines = targets.measured_lines(results, f"benchmarks/results/{results.page.name}")
    results.page.write_text(page(results, summary, lines))
    return summary + (f"\n\nFor MEASURED in llmc_jax/kernels/choice.py:\n{lines}" if lines else "")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    epilog = "parts:\n" + "\n".join(f"  {name:10} {about}" for name, about in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_check.sh", description="Checks and measures everything on an NVIDIA GPU.", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="what to measure, again if need be; without: all that is missing"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, kernels interpreted: no figures")
    parser.add_argument("--only", default="", metavar="TEXT", help="items whose names contain it")
    parser.add_argument("--minutes", type=float, default=1e6, metavar="N", help="end after so many")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the results (default benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="the items, and which are done")
    args = parser.parse_args(argv)
    if "tiny" in args.parts:
        args.tiny, args.parts = True, [part for part in args.parts if part != "tiny"]
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the check; 0 unless a kernel is wrong, something failed, or there is no GPU."""
    args = parse(argv)
    began = time.monotonic()
    scratch = Path(tempfile.gettempdir()) / f"gpu_check_{os.getuid()}"
    scratch.mkdir(exist_ok=True)
    output = args.output or (scratch if args.tiny else ROOT / "benchmarks/results")
    output.mkdir(parents=True, exist_ok=True)
    check = Check(Results(output, "tiny"), scratch, args.tiny)
    machine = check.describe()
    if not args.tiny and not machine["capability"]:
        print("JAX sees no NVIDIA GPU here; `--tiny` goes through the check on a CPU", file=sys.stderr)
        return 2
    if not args.tiny:
        check.results = Results(output, machine["device"])
    results = check.results
    results.machine = machine
    results.commands = [
        *results.commands,
        shlex.join(["benchmarks/gpu_check.sh", *(sys.argv[1:] if argv is None else argv)]),
    ]
    items = [item for item in plan(args.tiny) if args.only in item.name]
    asked = {part: [item for item in items if item.part == part] for part in PARTS if part in (args.parts or PARTS)}
    if not args.parts:
        asked = {part: left(results, of_part) for part, of_part in asked.items()}
    if args.list:
        for item in items:
            known = results.records.get((item.part, item.name))
            print(f"{item.part}: {item.name}: {known.status + ' ' + known.date if known else 'not measured'}")
        return 0
    deadline = began + 60 * args.minutes
    for part, of_part in asked.items():
        if of_part and time.monotonic() < deadline:
            print(f"----- {part}: {PARTS[part]}", flush=True)
            try:
                check.run_part(part, of_part, deadline)
            except Stuck as stuck:
                results.save()
                write_page(results)
                print(f"{stuck}: it holds the GPU until the machine restarts", file=sys.stderr, flush=True)
                return 1
            write_page(results)
        elif not of_part:
            print(f"----- {part}: done before", flush=True)
    results.save()
    print(f"{write_page(results)}\n\n{results.page}", flush=True)
    for (_, name), verdict in results.wrong().items():
        print(f"WRONG {name}: {verdict}", flush=True)
    failed = [key for key, record in results.records.items() if record.status == FAILED]
    for key in failed:
        print(f"FAILED {': '.join(key)}: {results.records[key].message}", flush=True)
    return 1 if failed or results.wrong() else 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole check of an NVIDIA GPU, part by part: benchmarks/gpu_check.sh starts it, benchmarks/gpu.md explains it.

Each item is measured in a process that may crash or hang without the others (llmc_jax/trials/worker.py), what it says
is kept at once, and an item that has been measured is not measured again unless its part is named. Leaves out how
anything is measured (gpu/, llmc_jax/trials/). Imports neither JAX nor anything that is not in Python's library.
"""

import argparse
import datetime
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import targets  # noqa: E402
from benchmarks.gpu.plan import PARTS, Item, plan  # noqa: E402
from benchmarks.gpu.results import DONE, FAILED, SKIPPED, Record, Results, number, page, source_digest  # noqa: E402
from llmc_jax.trials.lines import heard  # noqa: E402

PART_SECONDS = 480
STATUS = {"DONE": DONE, "SKIPPED": SKIPPED, "FAILED": FAILED, "SPOILT": FAILED}


class Check:
    """One run of the check."""

    def __init__(self, results: Results, scratch: Path, tiny: bool) -> None:
        self.results, self.scratch, self.tiny = results, scratch, tiny
        self.source = source_digest(ROOT)

    def environment(self, item: Item | None = None) -> dict[str, str]:
        """Of a measuring process."""
        found = dict(os.environ)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
        found.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
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
        """Measures what is left of a part; False if time ran out before all of it was."""
        end = min(time.monotonic() + PART_SECONDS, deadline)
        waiting, began = list(items), False
        while waiting:
            if end - time.monotonic() < 5:
                print(f"{part}: time is up, {len(waiting)} items are left for the next run", flush=True)
                return False
            group = waiting[:1]
            if not waiting[0].fresh:
                same = [item for item in waiting if not item.fresh and item.module == waiting[0].module]
                group = same
            done = self._run_group(group, end, patient=not began)
            began = began or done > 0
            waiting = [item for item in waiting if item not in group[:done]]
            if done == 0:
                print(f"{part}: time is up, {len(waiting)} items are left for the next run", flush=True)
                return False
        return True

    def _run_group(self, items: list[Item], end: float, *, patient: bool) -> int:
        """Measures items in one process, until one of them ends it; how many of them have a record now.

        An item that the end of the part interrupts has none, and is begun again next time; unless it is the first
        one of all (patient): it has its own time, or no run would ever get beyond it.
        """
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "llmc_jax.trials.worker", home(items[0].module)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=self.environment(items[0]),
                start_new_session=True,
            )  # fmt: skip
            said = _lines_of(process)
            assert process.stdin is not None
            process.stdin.write("".join(json.dumps(item._asdict()) + "\n" for item in items))
            process.stdin.close()
            done, began = 0, time.monotonic()
            try:
                for item in items:
                    limit = began + item.seconds + (30 if done == 0 else 0)  # the first one starts the process
                    within = limit if patient and done == 0 else min(limit, end)
                    kind, content = _wait(item, said, within)
                    if kind == "TIME" and within < limit:
                        break
                    if kind == "TIME":
                        kind, content = "SPOILT", f"not done after {item.seconds} s"
                    elif kind == "ENDED":
                        kind, content = "SPOILT", _last_words(process, errors)
                    self._keep(item, kind, content, time.monotonic() - began)
                    done, began = done + 1, time.monotonic()
                    if kind == "SPOILT":
                        break
            finally:
                _end(process)
        return done

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


def _lines_of(process: "subprocess.Popen[str]") -> "queue.Queue[str | None]":
    """What a process prints, line by line, then None."""
    said: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line)
        said.put(None)

    threading.Thread(target=read, daemon=True).start()
    return said


def _end(process: "subprocess.Popen[str]") -> None:
    """Ends a process that we started and what it started."""
    if process.poll() is None:
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(item: Item, said: "queue.Queue[str | None]", within: float) -> tuple[str, Any]:
    """What came of an item: kind and content as `lines.tell` has them; ENDED: the process did; TIME: it ran out."""
    while True:
        try:
            line = said.get(timeout=max(0.0, within - time.monotonic()))
        except queue.Empty:
            return "TIME", None
        if line is None:
            return "ENDED", None
        message = heard(line)
        if message is not None and message[0] != "BEGIN" and message[1] == item.name:
            return message[0], message[2]


def _last_words(process: "subprocess.Popen[str]", errors: Any) -> str:
    status = process.wait()
    errors.seek(0)
    lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
    return f"the process ended with status {status}: {' / '.join(lines[-2:])[-300:]}"


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
            check.run_part(part, of_part, deadline)
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

"""The process that measures: `python -m llmc_jax.trials.worker`, a task as JSON in each line of stdin.

A task names a module, which has a function `measure`, and the arguments that go to it. Says on stdout what it begins
and what came out (lines.py). Ends after a failure that may have spoilt the GPU's context (SPOILT), so that the parent
starts a new process for the rest; and where stdin ends, in the middle of a task too: then its parent is gone.
"""

import gc
import importlib
import json
import os
import queue
import sys
import threading
import traceback

from llmc_jax.trials.lines import NotMeasured, error_text, note, tell


def main() -> None:
    """Measure every task of stdin."""
    tasks = _tasks()
    while True:
        item = json.loads(tasks.get())
        tell("BEGIN", item["name"])
        try:
            figures = importlib.import_module(item["module"]).measure(**item["arguments"])
        except NotMeasured as reason:
            tell("SKIPPED", item["name"], str(reason))
        except Exception as error:
            note(traceback.format_exc())
            harmless = isinstance(error, (ValueError, TypeError, ImportError, AttributeError))
            tell("FAILED" if harmless else "SPOILT", item["name"], error_text(error))
            if not harmless:
                return
        else:
            tell("DONE", item["name"], figures)
        gc.collect()  # arrays that a cycle still holds


def _tasks() -> "queue.Queue[str]":
    """The lines of stdin, as they come. At their end the process ends, without clean-up: its context may be broken."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of a GPU context that may be broken

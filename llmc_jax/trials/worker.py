"""The process that measures: `python -m llmc_jax.trials.worker MODULE`, items as JSON on stdin, one line each.

MODULE has a function `measure`, which an item's arguments go to. Says on stdout what it begins and what came out
(lines.py). Ends after a failure that may have spoilt the GPU's context (SPOILT), so that the parent starts a new
process for the rest.
"""

import gc
import importlib
import json
import os
import sys
import traceback

from llmc_jax.trials.lines import NotMeasured, error_text, note, tell


def main() -> None:
    """Measures every item of stdin."""
    module = importlib.import_module(sys.argv[1])
    for line in sys.stdin.read().splitlines():
        item = json.loads(line)
        tell("BEGIN", item["name"])
        try:
            figures = module.measure(**item["arguments"])
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


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without the clean-up of a GPU context that may be broken

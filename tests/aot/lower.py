"""Lowers one case of every kernel and a training step for one GPU, and prints {case: error, or empty} as JSON.

    python tests/aot/lower.py a100

A program of its own, so that the tests can have a process per GPU: a kernel that the compiler aborts on would end them.
"""

import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.aot import cases


def main() -> None:
    (gpu,) = sys.argv[1:]
    found = {}
    for case in cases.lowered_for(gpu):
        print(case.name, file=sys.stderr, flush=True)  # the last one, should the process be aborted
        try:
            text = case.lower(gpu).as_text()
            found[case.name] = "" if "mosaic_gpu" in text else "no Mosaic kernel in it"
        except Exception as error:
            found[case.name] = "".join(traceback.format_exception(error)[-3:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

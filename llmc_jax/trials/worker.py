"""The process that measures for a parent (children.py), task by task: `python -m llmc_jax.trials.worker FD`.

Answers each with its kind and content (`Outcome`) over the connection FD, and says when it runs what is compiled
(RUNNING). The parent ends it after a failure, and it ends where the parent is gone, in the middle of a task too:
without clean-up, since the GPU's context may be broken.
"""

import gc
import importlib
import os
import pickle
import queue
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from llmc_jax.models import family
from llmc_jax.trials import children
from llmc_jax.trials.children import OF_THE_MACHINE, NotMeasured


def main() -> NoReturn:
    """Measure every task that the parent sends."""
    family.load_of_parent()
    parent = Connection(int(sys.argv[1]))
    tasks: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(parent, tasks), daemon=True).start()
    children.tell = lambda runs: parent.send(("RUNNING", runs))
    while True:
        parent.send(_measured(tasks.get()))
        gc.collect()  # arrays that a cycle still holds


def _listen(parent: Connection, tasks: "queue.Queue[bytes]") -> None:
    try:
        while True:
            tasks.put(parent.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _measured(sent: bytes) -> tuple[str, Any]:
    """Return kind and content of a task's answer."""
    try:
        task = pickle.loads(sent)
        return "DONE", importlib.import_module(task.module).measure(**task.arguments)
    except NotMeasured as reason:
        return "SKIPPED", str(reason)
    except Exception as error:
        traceback.print_exc()  # the parent keeps the log of a process that fails
        text = " ".join(f"{type(error).__name__}: {error}".split())
        short = text if len(text) <= 400 else f"{text[:200]} … {text[-190:]}"
        of_the_machine = isinstance(error, (MemoryError, OSError)) or OF_THE_MACHINE.search(text)
        return "UNJUDGED" if of_the_machine else "FAILED", short


if __name__ == "__main__":
    main()

"""A run of several processes without JAX, which tests start and disturb: python -m tests.cluster.fake '{"rank": 0, …}'.

The parent is ours; the worker, started by it with the same command, goes through a few steps and does what it is told.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llmc_jax.cluster import worker


def main() -> None:
    told = json.loads(sys.argv[1])
    group = worker.joined(os.environ)
    if group:
        work(group, told)
    from llmc_jax.cluster import judge, messages, parent  # here, because the worker does without
    from llmc_jax.cluster.launchers import Member

    judge.LIMITS.update(told.get("limits", {}))
    judge.MEETING = told.get("meeting", judge.MEETING)
    folder = told.get("address_folder")
    member = Member(
        told["rank"], told["size"], told.get("host", "127.0.0.1"), told.get("port", 0), "test", told.get("job", ""),
        Path(folder) if folder else None,
    )  # fmt: skip
    said = parent.Parent.tell

    def tell(self: parent.Parent, verdict: messages.Verdict) -> None:
        Path(told["out"]).joinpath(f"verdict_{told['name']}.json").write_text(json.dumps(verdict.fields))
        said(self, verdict)

    parent.Parent.tell = tell  # type: ignore[method-assign]
    sys.exit(parent.supervise(member, told["timeout"]))


def work(group: worker.Group, told: dict[str, Any]) -> None:
    assert worker.VARIABLE not in os.environ
    out = Path(told["out"])
    stop = threading.Event()
    if told.get("heeds_signals", True):
        signal.signal(signal.SIGTERM, lambda *_: os._exit(130) if stop.is_set() else stop.set())
    if told.get("folder"):
        from llmc_jax.logs.files import rank_log  # here, because most of these workers do without

        group.folder(told["folder"], str(rank_log(Path(told["folder"]), group.rank)))
    facts = group.meet("facts", {"rank": group.rank, "words": "ä" * 1000})
    assert facts == [{"rank": rank, "words": "ä" * 1000} for rank in range(group.size)]
    seen = {"pid": os.getpid(), "hosts": group.hosts, "local": [group.local_rank, group.local_size]}
    out.joinpath(f"worker_{told['name']}.json").write_text(json.dumps(seen))
    for step in range(told.get("steps", 3)):
        group.phase("step", step)
        if step == 1:
            out.joinpath(f"there_{told['name']}").touch()
            disturb(group, told.get("does", ""))
            while told.get("does") == "wait for two":
                time.sleep(0.01)  # and not stop.wait, which the handler would find locked
                if stop.is_set():
                    out.joinpath(f"first_{told['name']}").touch()
        time.sleep(0.02)
        group.phase("step", step + 1)
        if any(group.meet(f"step {step}", stop.is_set())):
            group.leave(130)
    group.phase("end", told.get("steps", 3))
    group.leave(told.get("status", 0))


def disturb(group: worker.Group, what: str) -> None:
    match what.split():
        case ["exit", status]:
            sys.exit(int(status))
        case ["leave", kind, status]:
            group.leave(int(status), "as told", kind)
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
            time.sleep(1000)
        case ["hang"]:
            time.sleep(1000)
        case ["phase", name]:
            group.phase(name, 1)
            time.sleep(1000)


if __name__ == "__main__":
    main()

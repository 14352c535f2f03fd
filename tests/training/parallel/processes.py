"""Trains the tiny model of spread.py on devices that belong to several processes, over gloo.

    python -m tests.training.parallel.processes RANK SIZE DEVICES PORT FOLDER

One of SIZE processes with DEVICES devices each, which find each other at a port of localhost; SIZE 1: alone. The cases
are in FOLDER/cases.json. Each process writes its blocks of the flat buffers after the run of case i to
FOLDER/i-RANK.npz, and the rest of all runs to FOLDER/RANK.json.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.training.parallel.spread import DEVICES, ROOT, B, Case, T, digest, ran, replicas

SECONDS = 300  # after which processes that wait for each other are ended


class Layout(NamedTuple):
    """How many processes, and devices of each."""

    processes: int
    devices: int

    @property
    def name(self) -> str:
        return f"{self.processes}x{self.devices}"


class Told(NamedTuple):
    """What a process says of a run."""

    losses: list[float]
    norms: list[float]
    applied: list[bool]
    validated: list[float]  # the loss of a batch on each device, after the first run
    votes: list[int]
    replicas: int  # as in spread.Result
    whole: dict[str, str | None]  # digests of whole flat buffers
    rest: str  # a digest of everything else in the state


class Found(NamedTuple):
    """A run, of all processes."""

    told: list[Told]
    blocks: dict[str, list[np.ndarray]]  # of each flat buffer, in their order


def runs_of(cases: dict[Layout, list[Case]], folder: Path) -> dict[tuple[Layout, Case], Found]:
    """The runs of each layout, whose processes are started once; or if the folder holds them already, those.

    folder: of all workers of pytest. One of them makes the runs, while the others wait.
    """
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            for layout, some in cases.items():
                _start(layout, some, folder / layout.name)
            (folder / "done").touch()
    return {
        (layout, case): _found(layout, folder / layout.name, i)
        for layout, some in cases.items()
        for i, case in enumerate(some)
    }


def _found(layout: Layout, folder: Path, case: int) -> Found:
    told, blocks = [], dict[str, dict[int, np.ndarray]]()
    for rank in range(layout.processes):
        told.append(Told(*json.loads((folder / f"{rank}.json").read_text())[case]))
        for key, block in np.load(folder / f"{case}-{rank}.npz").items():
            name, number = key.split()
            assert int(number) not in blocks.setdefault(name, {})
            blocks[name][int(number)] = block
    return Found(told, {name: [each[k] for k in range(len(each))] for name, each in blocks.items()})


def _start(layout: Layout, cases: Sequence[Case], folder: Path) -> None:
    """Start the processes of a layout, which leave what they find in a folder of its own, and wait for them."""
    folder.mkdir(parents=True)
    env = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": str(DEVICES), "TF_CPP_MIN_LOG_LEVEL": "2"}
    env.pop("XLA_FLAGS", None)
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as held:
        # Bound while they run, so that nobody else is given the port. gRPC, which listens there, shares it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("localhost", 0))
        numbers = [str(layout.processes), str(layout.devices), str(held.getsockname()[1])]
        started = []
        for rank in range(layout.processes):
            command = [sys.executable, "-m", "tests.training.parallel.processes", str(rank), *numbers, str(folder)]
            with open(folder / f"{rank}.txt", "w") as words:
                started.append(subprocess.Popen(command, stdout=words, stderr=words, cwd=ROOT, env=env))
        try:
            codes = [each.wait(SECONDS) for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()
    said = [f"rank {rank}: {(folder / f'{rank}.txt').read_text()[-2000:]}" for rank in range(layout.processes)]
    assert codes == [0] * layout.processes, f"{codes}\n" + "\n".join(said)


# ----- in a process of several ----------------------------------------------------------------------------------------


def own_run(case: Case, rank: int, size: int, file: Path, validates: bool) -> Told:
    """Make the run, write this process's blocks and say the rest."""
    import jax

    from llmc_jax.machine import compiling
    from llmc_jax.models.execution import PLAIN
    from llmc_jax.models.tensors import BLOCKS
    from llmc_jax.training.step import evaluate_losses
    from tests.comparisons import QUICK, skewed_tokens

    place, _, state, metrics, found = ran(case)
    assert (place.process, place.processes) == (rank, size)
    votes = [place.vote(value) for value in (rank, 10 - rank)]  # both under way at once
    tokens = skewed_tokens(1, place.model.vocab_size, (case.devices, B, T + 1))[list(place.own_devices)]
    validated: Any = []
    if validates:
        batch = place.weights(state), place.rows(tokens[..., :-1]), place.rows(tokens[..., 1:])
        with place.context():
            validated = np.asarray(compiling.call(evaluate_losses, batch, (place.model, PLAIN), tuple(QUICK.items())))
    numbers = [k for k in range(BLOCKS) if k * size // BLOCKS == rank]
    blocks = {name: place.blocks(buffer, numbers) for name, buffer in state.flat.items()}
    whole = {name: place.whole(buffer) for name, buffer in state.flat.items()}
    np.savez(file, **{f"{name} {k}": block for name, each in blocks.items() for k, block in each.items()})
    rest = state.with_flat(dict.fromkeys(state.flat))
    return Told(
        losses=[float(each.loss) for each in found],
        norms=[float(each.norm) for each in found],
        applied=[bool(each.applied) for each in found],
        validated=[float(loss) for loss in validated],
        votes=[place.read_vote(vote) for vote in votes],
        replicas=replicas((state, metrics)),
        whole={name: None if array is None else digest(array) for name, array in whole.items()},
        rest="".join(map(digest, jax.tree.leaves(jax.device_get(rest)))),
    )


def main() -> None:
    import jax

    rank, size, devices = map(int, sys.argv[1:4])
    port, folder = sys.argv[4], Path(sys.argv[5])
    jax.config.update("jax_num_cpu_devices", devices)
    if size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", size, rank, initialization_timeout=SECONDS)
    cases = [Case(*values) for values in json.loads((folder / "cases.json").read_text())]
    found = [own_run(case, rank, size, folder / f"{i}-{rank}.npz", i == 0) for i, case in enumerate(cases)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

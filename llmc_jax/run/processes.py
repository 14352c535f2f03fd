"""What the processes of a run do together: meet, connect JAX, agree when to stop, take turns at compiling, part.

A run of one process does nothing of it. Leaves out how the processes talk (cluster/), the checkpoint that they write
together (saver.py) and what each device computes (training/parallel/).
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from llmc_jax import cluster
from llmc_jax.base.plain import to_json
from llmc_jax.checkpoint.contents import fingerprint
from llmc_jax.cluster.agreement import Agreed, of_all, of_first
from llmc_jax.cluster.start import Facts, differences, facts, own_gpus, ranks_on_hosts
from llmc_jax.config.train import TrainConfig
from llmc_jax.data.corpora import stdlib_corpus
from llmc_jax.data.tokenfile import expand_pattern
from llmc_jax.logs.files import KERNELS, config_file
from llmc_jax.machine.driver import seen_cards
from llmc_jax.models.family import chosen
from llmc_jax.plan.plan import Plan
from llmc_jax.training.parallel.placement import Placement
from llmc_jax.training.rules import named

# ----- before JAX has a device ----------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What one of several processes computes on."""

    platform: str  # gpu, cpu
    devices: int  # that it takes, as many as every other
    gpus: list[int] | None  # their numbers, as CUDA counts what this process sees; None on a CPU


def introduced(config: TrainConfig) -> Share | None:
    """Tell the other processes what this one has and is told, and compare; None for a process alone.

    Raises Agreed with all that differs.
    """
    group = cluster.here()
    if group.size == 1:
        return None
    check_earlier(config)
    # the built-in corpus becomes a file: on each host one process makes it
    makes = group.local_rank == 0 and "stdlib" in data_files(config).values()
    of_all("corpus", lambda: stdlib_corpus() and None if makes else None)
    found = of_all("facts", lambda: own_facts(config)._asdict())
    everybody = [Facts.from_json(each) for each in found]
    if problems := differences(everybody, group.hosts):
        raise Agreed("\n  ".join(["the processes of this run cannot train together:", *problems]))
    gpus = own_gpus(everybody, group.hosts, group.rank)
    if not gpus:
        return Share("cpu", max(1, everybody[group.rank].asked), None)
    return Share("gpu", len(gpus), gpus)


def check_earlier(config: TrainConfig) -> None:
    """Raise Agreed where some of the processes find a run to resume, and others do not.

    Its options are those of the ones that find it, so that everything else would differ too.
    """
    folder = config.output_dir if config.reuse else ""
    found = of_all("earlier run", lambda: bool(folder) and config_file(Path(folder)) is not None)
    if len(set(found)) > 1:
        there, not_there = (
            ranks_on_hosts([rank for rank, each in enumerate(found) if each is wanted], cluster.here().hosts)
            for wanted in (True, False)
        )
        raise Agreed(
            f"-y 1: there is a run in the folder of -o for {there}, and none for {not_there}; give all the same -y "
            "and -o, on a file system that all hosts share"
        )


def own_facts(config: TrainConfig) -> Facts:
    """Return what this process tells the others. Raises InputError where a data file or the model's is not there."""
    cards = seen_cards()
    questions = config.hellaswag_file if config.hellaswag and config.val_every else ""
    kernels = Path(config.kernels_from) / KERNELS if Path(config.kernels_from).is_dir() else config.kernels_from
    others = {"-e": config.model, "--init-from": config.init_from, "--hellaswag-file": questions}
    others |= {"--kernels-from": str(config.kernels_from and kernels), "--algorithms": config.algorithms}
    files = {flag: _fingerprint(name, flag) for flag, name in data_files(config).items()}
    files |= {flag: fingerprint([Path(name)]) for flag, name in others.items() if Path(name).is_file()}
    files |= {"--model": chosen(config.model_file).source} if config.model_file else {}
    files |= {"--optimizer": optimizer.source} if (optimizer := named(config.optimizer)).source else {}
    device = f"{cards[0].name} (gpu)" if cards else "cpu"
    return facts(config, cluster.here().size, device, tuple(card.uuid for card in cards), files)


def data_files(config: TrainConfig) -> dict[str, str]:
    """Return what the run reads, by flag."""
    trains, validates = config.max_steps != 0 and not config.overfit, config.val_every > 0 or config.overfit
    named = {"-i": config.train_data if trains else "", "-j": config.val_data if validates else ""}
    return {flag: name for flag, name in named.items() if name}


def _fingerprint(name: str, flag: str) -> str:
    return stdlib_corpus().fingerprint if name == "stdlib" else fingerprint(expand_pattern(name, flag))


def connect(own: Share | None) -> None:
    """Connect JAX's runtimes of all processes; nothing of one alone.

    Raises Agreed where process 0 finds no free port.
    """
    group = cluster.here()
    if own is None:
        return
    port = of_first("port of JAX", free_port)
    addresses = of_all("addresses of rank 0", lambda: group.address)
    here = all(address == "127.0.0.1" for address in addresses)  # then no other machine need reach it
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which asks for a checkpoint here
    if own.gpus is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{group.address}:{port}",
        group.size,
        group.rank,
        local_device_ids=own.gpus,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"127.0.0.1:{port}" if here else None,  # None: all networks
        # The parents find a lost process first, and say which. JAX would end this one without a word.
        heartbeat_timeout_seconds=int(2 * group.peer_timeout) + 60,
    )


def first_exchange(place: Placement, plan: Plan) -> None:
    """Let the devices of all processes meet, while all processes are there.

    Gloo, which connects CPUs, does so at the first exchange and waits 30 s for the others. Later ones may take as long
    as they like. It writes a line to standard output, which is dropped. Raises Agreed where a process has planned
    another step than the first one: each would wait for what the other never sends.
    """
    if cluster.here().size == 1:
        return
    planned = of_all("devices", lambda: [to_json(plan.resolved), plan.config.algorithms])
    others = [rank for rank, each in enumerate(planned) if each != planned[0]]
    if others:
        raise Agreed(
            f"{ranks_on_hosts(others, cluster.here().hosts)}: would compute by other kernels or options than rank 0; "
            "give all processes the same environment (XLA_FLAGS, JAX_*) and the same --algorithms"
        )
    sys.stdout.flush()
    with open(os.devnull, "wb") as nowhere:
        before = os.dup(1)
        try:
            os.dup2(nowhere.fileno(), 1)
            place.read_vote(place.vote(0))
        finally:
            os.dup2(before, 1)
            os.close(before)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


# ----- while the run goes on ------------------------------------------------------------------------------------------


class Votes:
    """Tell whether the run ends. With every step the devices of several processes find out whether any of them was
    asked to stop, so that all read the same answer after the same step.
    """

    def __init__(self, place: Placement | None = None, request: threading.Event | None = None) -> None:
        """request: is set when this process is asked to stop."""
        self.request = request or threading.Event()
        self.stop = self.request if cluster.here().size == 1 else threading.Event()
        self._place = None if cluster.here().size == 1 else place

    def cast(self) -> Any:
        """Begin to find out whether any process was asked; all call it after the same step. Returns what `count`
        reads.
        """
        return None if self._place is None else self._place.vote(int(self.request.is_set()))

    def count(self, cast: Any) -> None:
        """Set `stop` where some process was asked to stop when that vote was cast. Waits for the devices."""
        if self._place is not None and self._place.read_vote(cast):
            self.stop.set()

    def ask(self) -> bool:
        """Return whether the run ends, after a vote."""
        self.count(self.cast())
        return self.stop.is_set()


@contextmanager
def in_turn() -> Iterator[None]:
    """Let process 0 run the block before the others: what it compiles they find in the cache, where that is shared."""
    group = cluster.here()
    if group.rank:
        group.meet("compiled")
    yield
    if group.rank == 0:
        group.meet("compiled")


def disconnect(step: int) -> None:
    """End the connection, once all processes have come here, after so many steps."""
    if cluster.here().size > 1:
        cluster.here().phase("end", step)
        of_all("end", lambda: None)
        jax.distributed.shutdown()

"""What processes compare before they connect, and who can reach JAX's own service: others only where there are some."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from llmc_jax import cluster
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.worker import Group
from llmc_jax.config.flags import parse_args
from llmc_jax.config.model import parse_descriptor
from llmc_jax.kernels import this_machine
from llmc_jax.plan.plan import make_plan
from llmc_jax.run import processes


class OfTwo(Group):
    size = 2

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses

    def meet(self, name: str, value: Any = None) -> list[Any]:
        return [{"value": each} for each in self.addresses] if name == "addresses of rank 0" else [value, value]


@pytest.mark.parametrize(("other", "local"), [("127.0.0.1", True), ("10.0.0.1", False), ("node1", False)])
def test_the_service_listens_for_this_machine_alone_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, other: str, local: bool
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **given: told.update(given))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(cluster, "_here", OfTwo(["127.0.0.1", other]))
    processes.connect(processes.Share("cpu", 1, None))
    bind = told["coordinator_bind_address"]
    assert bind is None if not local else bind.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "flags"),
    [("-x 5", "-i -j"), ("-x 5 -v 0", "-i"), ("-x 0", "-j"), ("-x 5 -v 0 -a 1", "-j"), ("-x 0 -v 0", "")],
)
def test_the_files_that_are_read_are_compared_and_no_others(words: str, flags: str) -> None:
    assert list(processes.data_files(parse_args(words.split()))) == flags.split()


def test_a_process_that_plans_another_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any exchange on the devices, in which each would wait for the other."""

    class Other(Group):
        rank, size, hosts = 0, 2, ("a", "b")

        def meet(self, name: str, value: Any = None) -> list[Any]:
            return [value, {"value": {**value["value"], "logit_rows": 7}}]

    resolved = make_plan(parse_args(["-b", "1"]), parse_descriptor("d12"), this_machine()).resolved
    monkeypatch.setattr(cluster, "_here", Other())
    plan: Any = SimpleNamespace(resolved=resolved)
    with pytest.raises(Agreed, match=r"rank 1 \(host b\): .*XLA_FLAGS"):
        processes.first_exchange(SimpleNamespace(), plan)  # type: ignore[arg-type]

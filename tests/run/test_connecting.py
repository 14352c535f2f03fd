"""Who can reach JAX's own service among several processes: other machines only where there are some."""

from typing import Any

import jax
import pytest

from llmc_jax.cluster.worker import Group
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
    processes.connect(OfTwo(["127.0.0.1", other]), processes.Own("cpu", 1, None))
    bind = told["coordinator_bind_address"]
    assert bind is None if not local else bind.startswith("127.0.0.1:")

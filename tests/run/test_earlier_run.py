"""Several processes of which only some find the run that -y 1 goes on with."""

from pathlib import Path
from typing import Any

import pytest

from llmc_jax import cluster
from llmc_jax.cluster.agreement import Agreed
from llmc_jax.cluster.worker import Group
from llmc_jax.config.train import TrainConfig
from llmc_jax.run.processes import check_earlier


class Three(Group):
    """Rank 1 of three, whose others have found what they are told to have found."""

    rank, size, hosts = 1, 3, ("a", "a", "b")

    def __init__(self, others: bool) -> None:
        self.others = others

    def meet(self, name: str, value: Any = None) -> list[Any]:
        return [{"value": self.others}, value, {"value": self.others}]


@pytest.mark.parametrize("there", [True, False])
def test_all_find_a_run_or_none_does(tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if there:
        (tmp_path / "config.json").write_text("{}")
    config = TrainConfig(reuse=True, output_dir=str(tmp_path))
    monkeypatch.setattr(cluster, "_here", Three(others=there))
    check_earlier(config)
    monkeypatch.setattr(cluster, "_here", Three(others=not there))
    with pytest.raises(Agreed) as error:
        check_earlier(config)
    ones, others = "rank 1 (host a)", "ranks 0, 2 (hosts a, b)"
    first, second = (ones, others) if there else (others, ones)
    assert f"there is a run in the folder of -o for {first}, and none for {second}; give all" in str(error.value)


def test_without_y_no_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_here", Three(others=False))
    (tmp_path / "config.json").write_text("{}")
    check_earlier(TrainConfig(reuse=False, output_dir=str(tmp_path)))

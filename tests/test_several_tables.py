"""The tables of several GPUs: how a collective is told, and how the largest batch is found."""

from benchmarks.collectives import about, beside
from benchmarks.memory_by_stage import Size, largest
from benchmarks.sent import Collective, Operation
from llmc_jax.training.parallel.traffic import Sent

SENT = [Sent("all-reduce", "loss", 4), Sent("all-reduce", "layer 1", 100), Sent("all-reduce", "wte", 300)]


def collective(scope: str = "", size: int = 100, scopes: tuple[str, ...] | None = None) -> Collective:
    between = tuple(Operation("x", "fusion", "", each, False) for each in scopes or ())
    return Collective("all-reduce", "x", (scope,), size, 1, 8, scopes is not None, between, "main", 1)


def test_what_a_collective_is_about() -> None:
    assert about(collective("backward/layer_01/reduce"), SENT) == "layer 1"
    assert about(collective("reduce"), SENT) == "a layer"  # summed at the end, when the scope is gone
    assert about(collective("reduce", 300), SENT) == "wte"
    assert about(collective("", 4), SENT) == "loss"
    assert about(collective("update/norm", 4), SENT) == "norm"
    assert about(collective("", 5), SENT) == ""


def test_what_stands_beside_it() -> None:
    assert beside(collective()) == "nothing: the GPU waits for it"
    layers = ("backward/layer_11/fc", "backward/layer_02/qkv", "while/body/backward/embedding/embedding_windows")
    assert beside(collective(scopes=layers)) == "layers 11 to 2, embedding"
    assert beside(collective(scopes=("backward/layer_00/fc",))) == "layer 0"


def test_the_largest_batch_is_one_that_was_tried() -> None:
    """The compiler takes 1.2 times the bound, and at first 1.1 times."""
    tried: list[int] = []

    def size_at(batch: int) -> Size:
        tried.append(batch)
        return Size(batch, 0, 12 * batch, 10 * batch)

    found = largest(Size(64, 0, 704, 640), size_at, lambda batch: 10 * batch, 1200, 8)
    assert tried == [104, 96] and found.batch == 96 and found.total <= 1200

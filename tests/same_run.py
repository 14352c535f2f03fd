"""What a run left, and whether two run folders hold the same run, bit for bit.

Everything counts but wall-clock figures, the events that say how a run was started, saved and resumed, and which of its
checkpoints are still there.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.checkpoint.sources import flat_parameters, open_source
from llmc_jax.checkpoint.store import Checkpoint, entries, open_checkpoint
from llmc_jax.data.tokenfile import write_token_file
from llmc_jax.models.layout import num_parameters
from tests.metrics import read_metrics

WALL_CLOCK = {"ms", "tokens_per_second", "time", "seconds", "memory"}
OF_THE_RUN = ("train", "val", "eval", "sample")  # the events that must be the same; and the last "end"


def write_shards(folder: Path, sizes: dict[str, tuple[int, ...]], vocab_size: int = 257) -> None:
    """Token files <name>_<k>.bin of so many tokens each, skewed so that there is something to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(7)
    share = 1.0 / np.arange(1, vocab_size + 1)
    for name, counts in sizes.items():
        for k, count in enumerate(counts):
            ids = rng.choice(rng.permutation(vocab_size), count, p=share / share.sum())
            write_token_file(folder / f"{name}_{k}.bin", ids.astype(np.uint16))


def steps_of(run: Path, what: str) -> list[int]:
    """The steps of the folders state_%08d, or of the files DONE_%08d or model_%08d.bin, in order."""
    return sorted(int(path.name[len(what) + 1 :].removesuffix(".bin")) for path in run.glob(f"{what}_[0-9]*"))


def leftovers(run: Path) -> list[str]:
    """What a save that was interrupted may leave: hidden files and folders."""
    return sorted(path.name for path in run.iterdir() if path.name.startswith("."))


def healthy(run: Path) -> list[int]:
    """The steps of a run's checkpoints, each complete and right to the byte; and nothing else may have been left."""
    found = list(entries(run))
    assert [entry for entry in found if entry.problem is not None] == []
    assert leftovers(run) == []
    return [entry.step for entry in found]


def events(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of the run itself, without wall-clock figures."""
    found = [
        {name: value for name, value in each.items() if name not in WALL_CLOCK}
        for each in read_metrics(run / "metrics.jsonl")
    ]
    return [*[each for each in found if each["event"] in OF_THE_RUN], found[-1]]


READ = Checkpoint.read  # though a test spoils what a run reads, the comparison reads what is there


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint."""
    checkpoint = open_checkpoint(run / f"state_{step:08d}")
    return {name: READ(checkpoint, name) for name in checkpoint.manifest.tensors}


def differences(found: Path, expected: Path) -> Iterator[str]:
    """What is not the same in two run folders, a line each."""
    ours, theirs = events(found), events(expected)
    for k, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if json.dumps(one) != json.dumps(other):  # as text, so that NaN is NaN
            yield f"event {k}: {one}, expected {other}"
            break
    if len(ours) != len(theirs):
        yield f"{len(ours)} events, expected {len(theirs)}"
    for name in ("main.log", "samples.txt", "kernels.json"):
        if (found / name).read_bytes() != (expected / name).read_bytes():
            yield f"{name} differs"
    last = steps_of(expected, "state")[-1]
    if steps_of(found, "state")[-1:] != [last] or steps_of(found, "DONE")[-1:] != [last]:
        yield f"checkpoints {steps_of(found, 'state')}, complete {steps_of(found, 'DONE')}; expected {last} last"
        return
    ours, theirs = arrays(found, last), arrays(expected, last)
    if ours.keys() != theirs.keys():
        yield f"arrays {sorted(ours.keys() ^ theirs.keys())} are in one of them alone"
    for name in ours.keys() & theirs.keys():
        one, other = ours[name], theirs[name]
        if (one.dtype, one.shape, one.tobytes()) != (other.dtype, other.shape, other.tobytes()):
            yield f"{name} differs"
    metadata, wanted = (open_checkpoint(run / f"state_{last:08d}").stored for run in (found, expected))
    for name in ("step", "model", "dtype", "loader", "data", "val_loss", "kernels"):
        if metadata[name] != wanted[name]:
            yield f"{name} is {metadata[name]}, expected {wanted[name]}"


def check_same(found: Path, expected: Path) -> None:
    """Fails with everything that differs."""
    problems = list(differences(found, expected))
    assert not problems, "\n".join(problems)


class Result(NamedTuple):
    """What the command line said, and what the run left."""

    code: int
    folder: Path
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        metrics = self.folder / "metrics.jsonl"
        return read_metrics(metrics) if metrics.exists() else []

    def values(self, event: str, field: str, *default: Any) -> list[Any]:
        """A field of all events of a kind; default: where it has none."""
        take = dict.get if default else dict.__getitem__
        return [take(each, field, *default) for each in self.events if each["event"] == event]

    @property
    def losses(self) -> list[float]:
        return self.values("train", "loss")

    @property
    def models(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("model_*.bin"))

    @property
    def checkpoints(self) -> list[int]:
        return healthy(self.folder)

    def state(self, step: int) -> dict[str, np.ndarray]:
        """The arrays of a checkpoint."""
        return arrays(self.folder, step)

    def bits(self, step: int) -> dict[str, bytes]:
        """The same, as it lies in memory."""
        return {name: array.tobytes() for name, array in self.state(step).items()}

    def model(self, step: int) -> np.ndarray:
        """The parameters of a checkpoint (N,): the master weights where there are any."""
        checkpoint = open_checkpoint(self.folder / f"state_{step:08d}")
        return READ(checkpoint, "params")[: num_parameters(checkpoint.metadata.identity.model)]

    def exported(self, step: int) -> np.ndarray:
        """The parameters (N,) in the model file of a step."""
        source = open_source(self.folder / f"model_{step:08d}.bin")
        return flat_parameters(source)[: num_parameters(source.config)]

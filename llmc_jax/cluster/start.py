"""What must be the same for all processes of a run, compared before they are connected; and who takes which GPU.

Each process makes its `Facts`, all of them meet, and every process comes to the same conclusions. Leaves out how they
meet, and what only the processes' devices tell once they are connected.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from llmc_jax.base.errors import InputError
from llmc_jax.base.options import show_value
from llmc_jax.config.checks import devices_of_each
from llmc_jax.config.train import BY_NAME, OPTIONS, PROCESSES, TrainConfig
from llmc_jax.machine.device import git_state, installed, versions

# Packages beside JAX's whose versions must agree on GPUs: the plugin, and what the processes talk through.
GPU_PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
DIGITS = 12  # of a fingerprint
MOST = 3  # hosts that a message names, and values; the others are counted


class Facts(NamedTuple):
    """What one process tells the others, as JSON can hold it."""

    options: Mapping[str, Any] = {}  # by name: all but those of PROCESSES, which say who it is
    versions: Mapping[str, str] = {}  # of Python and of packages
    commit: str = ""  # of the source, and whether files differ from it
    device: str = ""  # NVIDIA H200 (gpu)
    asked: int = 0  # devices for each process, as --devices says; 0: all
    gpus: Sequence[str] = ()  # the uuid of each that it sees, as CUDA counts them; none: it computes on its CPU
    files: Mapping[str, str] = {}  # fingerprints of what is read, by flag

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return what `_asdict` gave, another version's too: what is not known is left out."""
        return cls(**{name: values[name] for name in cls._fields if name in values})


def facts(
    config: TrainConfig, processes: int, device: str, gpus: Sequence[str] = (), files: Mapping[str, str] | None = None
) -> Facts:
    """Return what this process tells the others: see Facts. Runs git, and imports no package that it asks about.

    Raises InputError where the processes cannot have equally many devices.
    """
    state = git_state()
    commit = "" if state is None else state["commit"][:12] + (" with changes" if state["modified"] else "")
    python = {"python": ".".join(versions()["python"].split(".")[:2])}
    return Facts(
        options={about.name: getattr(config, about.name) for about in OPTIONS if about.group != PROCESSES},
        versions=versions() | python | (installed(*GPU_PACKAGES) if gpus else {}),
        commit=commit or "unknown",
        device=device,
        asked=devices_of_each(config.devices, processes),
        gpus=list(gpus),
        files=dict(files or {}),
    )


# ----- what differs ---------------------------------------------------------------------------------------------------


def differences(everybody: Sequence[Facts], hosts: Sequence[str]) -> list[str]:
    """Return what is not the same for all processes, a line each: which ranks on which hosts have what.

    everybody, hosts: by rank. Empty where they can train together.
    """
    tables = [dict(_compared(each)) for each in everybody]
    found = list[str]()
    for name, advice in dict.fromkeys(key for table in tables for key in table):
        values = [table.get((name, advice)) for table in tables]
        if any(value != values[0] for value in values):
            found.append(f"{name}: {_who_has_what(values, hosts)}; {advice}")
    return found + _wrong_with_devices(everybody, hosts)


def _compared(each: Facts) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield what must be the same for all: its name and advice, and the value here, as JSON can hold it."""
    yield from (((name, "install the same everywhere"), value) for name, value in each.versions.items())
    yield ("commit", "take the same source everywhere"), each.commit
    yield ("device", "all devices of a run must be of one kind"), each.device
    for name, value in each.options.items():
        flag = BY_NAME[name].flags[0] if name in BY_NAME else name
        yield (flag, "write the same for all"), value
    for flag, value in each.files.items():
        yield (f"files of {flag}", "give every host the same files"), value[:DIGITS]


def _wrong_with_devices(everybody: Sequence[Facts], hosts: Sequence[str]) -> list[str]:
    """Return why the processes cannot take their devices: too few, unequally many, or one GPU twice."""
    try:
        taken = [own_gpus(everybody, hosts, rank) for rank in range(len(everybody))]
    except InputError as error:
        return [str(error)]
    numbers = [len(own) if own else max(1, each.asked) for own, each in zip(taken, everybody, strict=True)]
    if any(number != numbers[0] for number in numbers):
        who = _who_has_what(numbers, hosts)
        return [f"devices of a process: {who}; give each the same number with --devices, or CUDA_VISIBLE_DEVICES"]
    users: dict[str, list[int]] = {}
    for rank, (own, each) in enumerate(zip(taken, everybody, strict=True)):
        for number in own:
            users.setdefault(each.gpus[number], []).append(rank)
    return [
        f"GPU {uuid}: {ranks_on_hosts(ranks, hosts)} would all take it; give each its own by CUDA_VISIBLE_DEVICES, or "
        "let all see the same"
        for uuid, ranks in users.items()
        if len(ranks) > 1
    ]


def _who_has_what(values: Sequence[Any], hosts: Sequence[str]) -> str:
    """Return each value and the ranks that have it: `ranks 0-6 (host a) have 8, rank 7 (host b) has 4`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault("none" if value is None else show_value(value), []).append(rank)
    # the most common one first, as what is most likely meant
    groups = sorted(ranks_of.items(), key=lambda group: len(group[1]), reverse=True)
    words = [
        f"{ranks_on_hosts(ranks, hosts)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in groups[:MOST]
    ]
    rest = sum(len(ranks) for _, ranks in groups[MOST:])
    return ", ".join(words) + (f", {rest} more {'have others' if rest > 1 else 'has another'}" if rest else "")


def ranks_on_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return `ranks 0-2, 5 (hosts a, b)`."""
    names = list(dict.fromkeys(hosts[rank] for rank in ranks))
    said = f"{'host' if len(names) == 1 else 'hosts'} {_some(names)}"
    return f"{ranks_text(ranks)} ({said})"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`; of very many the first."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_some(numbers)}"


def _some(words: Sequence[str]) -> str:
    more = len(words) - MOST
    return ", ".join(words[:MOST]) + (f" and {more} more" if more > 0 else "")


# ----- GPUs -----------------------------------------------------------------------------------------------------------


def own_gpus(everybody: Sequence[Facts], hosts: Sequence[str], rank: int) -> list[int]:
    """Return which of the GPUs that it sees a process takes, as CUDA counts them; none on a CPU.

    All, where no other process of its host sees the same ones; else an equal share, in the order of the ranks. Raises
    InputError, the same for every process that shares them, where they cannot be shared so.
    """
    own, host = everybody[rank], hosts[rank]
    if not own.gpus:
        return []
    sharing = [
        other for other, each in enumerate(everybody) if hosts[other] == host and sorted(each.gpus) == sorted(own.gpus)
    ]
    there, n = everybody[sharing[0]].gpus, len(sharing)
    share, rest = divmod(len(there), n)
    who = f"{host}: {n} {'process' if n == 1 else 'processes'} for {len(there)} {'GPU' if len(there) == 1 else 'GPUs'}"
    fitting = ", ".join(str(number) for number in range(1, len(there) + 1) if len(there) % number == 0)
    if share == 0:
        raise InputError(f"{who}; start as many processes there as it has GPUs, or one for all of them")
    if own.asked > share:
        raise InputError(f"{who}, but --devices asks for {own.asked} for each; ask for fewer, or take more hosts")
    if rest and not own.asked:
        raise InputError(f"{who}, which cannot be shared evenly; start {fitting} there, or say --devices")
    first = sharing.index(rank) * share
    return [list(own.gpus).index(uuid) for uuid in there[first : first + (own.asked or share)]]

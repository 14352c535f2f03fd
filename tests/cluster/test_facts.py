"""What must be the same for all processes, and which GPUs each takes."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc_jax.base.errors import InputError
from llmc_jax.cluster import start
from llmc_jax.cluster.start import Facts, differences, facts, own_gpus
from llmc_jax.config.train import OPTIONS, PROCESSES, TrainConfig

SAME = Facts({"batch_size": 4, "train_data": "a.bin"}, {"jax": "0.12.0"}, "abc", "cpu (cpu)", files={"-i": "12"})
changed = SAME._replace
EIGHT = tuple("abcdefgh")  # uuids of a host's GPUs


@pytest.mark.parametrize(
    ("everybody", "hosts", "line"),
    [
        (
            [*[SAME] * 7, changed(versions={"jax": "0.11.2"})], ["a"] * 4 + ["b"] * 4,
            "jax: ranks 0-6 (hosts a, b) have 0.12.0, rank 7 (host b) has 0.11.2; install the same everywhere",
        ),
        (
            [SAME, changed(options=SAME.options | {"batch_size": 8})], ["a", "b"],
            "-b: rank 0 (host a) has 4, rank 1 (host b) has 8; write the same for all",
        ),
        (
            [SAME, changed(options=SAME.options | {"of_the_future": ""}), SAME], ["a", "a", "a"],
            "of_the_future: ranks 0, 2 (host a) have none, rank 1 (host a) has ''; write the same for all",
        ),
        (
            [SAME, changed(commit="abc with changes")], ["a", "a"],
            "commit: rank 0 (host a) has abc, rank 1 (host a) has 'abc with changes'; take the same source everywhere",
        ),
        (
            [changed(device="NVIDIA H200 (gpu)"), SAME], ["a", "b"],
            "device: rank 0 (host a) has 'NVIDIA H200 (gpu)', rank 1 (host b) has 'cpu (cpu)'; all devices of a run "
            "must be of one kind",
        ),
        (
            [SAME, changed(files={"-i": "13" * 32})], ["a", "b"],
            "files of -i: rank 0 (host a) has 12, rank 1 (host b) has 131313131313; give every host the same files",
        ),
        (
            [changed(commit=str(rank % 9)) for rank in range(64)], [f"n{rank}" for rank in range(64)],
            "commit: ranks 0, 9, 18 and 5 more (hosts n0, n9, n18 and 5 more) have 0, ranks 1, 10, 19 and 4 more "
            "(hosts n1, n10, n19 and 4 more) have 1, ranks 2, 11, 20 and 4 more (hosts n2, n11, n20 and 4 more) have "
            "2, 42 more have others; take the same source everywhere",
        ),
        (
            [changed(asked=2), changed(asked=2), changed(asked=1)], ["a", "a", "b"],
            "devices of a process: ranks 0-1 (host a) have 2, rank 2 (host b) has 1; give each the same number with "
            "--devices, or CUDA_VISIBLE_DEVICES",
        ),
        (
            [changed(gpus=EIGHT), changed(gpus=EIGHT[:4])], ["a", "b"],
            "devices of a process: rank 0 (host a) has 8, rank 1 (host b) has 4; give each the same number with "
            "--devices, or CUDA_VISIBLE_DEVICES",
        ),
        (
            [changed(gpus=["x", "y"]), changed(gpus=["y", "z"])], ["a", "a"],
            "GPU y: ranks 0-1 (host a) would all take it; give each its own by CUDA_VISIBLE_DEVICES, or let all see "
            "the same",
        ),
        (
            [changed(gpus=["x"]), changed(gpus=["x"])], ["a", "a"],
            "a: 2 processes for 1 GPU; start as many processes there as it has GPUs, or one for all of them",
        ),
    ],
)  # fmt: skip
def test_each_difference_names_who_has_what(everybody: list[Facts], hosts: list[str], line: str) -> None:
    assert differences(everybody, hosts) == [line]


def test_all_differences_are_listed() -> None:
    other = changed(versions={"jax": "0.11.2"}, options={"batch_size": 8}, files={}, commit="d")
    lines = differences([SAME, other], ["a", "b"])
    assert [line.split(":")[0] for line in lines] == ["jax", "commit", "-b", "-i", "files of -i"]


values = st.integers(2, 4) | st.text(max_size=2) | st.booleans()  # to Python 0 is False
some_facts = st.builds(
    Facts,
    options=st.dictionaries(st.sampled_from(["batch_size", "train_data", "new"]), values),
    versions=st.dictionaries(st.sampled_from(["jax", "numpy"]), st.text(max_size=2)),
    commit=st.text(max_size=1),
    device=st.just("cpu"),
    asked=st.integers(0, 2),
    gpus=st.just([]),
    files=st.dictionaries(st.sampled_from(["-i", "-j"]), st.sampled_from(["12", "13"])),
)


@given(st.lists(some_facts, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_no_difference_where_and_only_where_all_are_equal(everybody: list[Facts], random: Any) -> None:
    """In whichever order they stand, and after a journey as JSON."""
    hosts = [f"n{rank}" for rank in range(len(everybody))]
    found = differences(everybody, hosts)
    alike = [json.dumps(each._replace(asked=max(1, each.asked)), sort_keys=True) for each in everybody]
    assert (found == []) == (len(set(alike)) == 1)
    sent = [Facts.from_json(json.loads(json.dumps(each._asdict()))) for each in everybody]
    assert differences(sent, hosts) == found
    random.shuffle(sent)
    assert sorted(line.split(":")[0] for line in differences(sent, hosts)) == sorted(x.split(":")[0] for x in found)


def test_facts_of_another_version() -> None:
    assert Facts.from_json({"commit": "abc", "of_the_future": 1}) == Facts(commit="abc")


def test_facts_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "git_state", lambda: {"commit": "0123456789abcdef", "modified": True})
    config = TrainConfig(num_processes=4, process_rank=2, devices=8, reuse=True, server_ip="node1")
    found = facts(config, 4, "cpu (cpu)", files={"-i": "12"})
    names = {about.name for about in OPTIONS if about.group == PROCESSES}
    assert set(found.options) == set(config.to_json()) - names
    assert found.options["reuse"] is True and found.options["devices"] == 8
    assert (found.commit, found.asked, found.files) == ("0123456789ab with changes", 2, {"-i": "12"})
    assert found.versions["python"].count(".") == 1 and {"jax", "jaxlib", "numpy", "llmc-jax"} < set(found.versions)
    other = facts(config.__class__(**config.to_json() | {"process_rank": 1}), 4, "cpu (cpu)", files={"-i": "12"})
    assert differences([found, other], ["a", "a"]) == []
    assert differences([found, Facts.from_json(json.loads(json.dumps(found._asdict())))], ["a", "b"]) == []
    monkeypatch.setattr(start, "git_state", lambda: None)
    assert facts(config, 4, "cpu (cpu)").commit == "unknown"
    with pytest.raises(InputError, match=r"^--devices 8: 3 processes cannot share them evenly"):
        facts(config, 3, "cpu (cpu)")


def taken(seen: Sequence[Sequence[str]], hosts: str, asked: int = 0) -> list[list[int]]:
    everybody = [Facts(gpus=gpus, asked=asked) for gpus in seen]
    return [own_gpus(everybody, hosts, rank) for rank in range(len(everybody))]


@pytest.mark.parametrize(
    ("seen", "hosts", "asked", "expected"),
    [
        ([EIGHT], "a", 0, [[0, 1, 2, 3, 4, 5, 6, 7]]),  # one for all of them
        ([EIGHT], "a", 3, [[0, 1, 2]]),
        ([EIGHT[:4], EIGHT[4:]], "ab", 0, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        ([EIGHT] * 2, "aa", 0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([EIGHT] * 2, "aa", 1, [[0], [4]]),
        ([EIGHT] * 3, "aaa", 2, [[0, 1], [2, 3], [4, 5]]),
        ([EIGHT] * 8, "aaaaaaaa", 0, [[number] for number in range(8)]),
        (["ab", "cd", "ab", "cd"], "abab", 0, [[0], [0], [1], [1]]),  # ranks that go round the hosts
        (["a", "b"], "aa", 0, [[0], [0]]),  # the launcher gave each its own: CUDA_VISIBLE_DEVICES, or a container
        (["ab", "ab", "cd", "cd"], "aaaa", 0, [[0], [1], [0], [1]]),
        (["ab", "ba"], "aa", 0, [[0], [0]]),  # in another order
        ([(), ()], "aa", 2, [[], []]),  # on CPUs
    ],
)
def test_gpus_of_a_process(seen: list[Sequence[str]], hosts: str, asked: int, expected: list[list[int]]) -> None:
    assert taken(seen, hosts, asked) == expected


@pytest.mark.parametrize(
    ("seen", "asked", "words"),
    [
        (["ab"] * 3, 0, "a: 3 processes for 2 GPUs; start as many processes there as it has GPUs, or one"),
        ([EIGHT] * 3, 0, "a: 3 processes for 8 GPUs, which cannot be shared evenly; start 1, 2, 4, 8 there"),
        ([EIGHT] * 2, 5, "a: 2 processes for 8 GPUs, but --devices asks for 5 for each"),
        (["a"], 2, "a: 1 process for 1 GPU, but --devices asks for 2 for each"),
    ],
)
def test_gpus_that_cannot_be_shared(seen: list[str], asked: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        taken(seen, "a" * len(seen), asked)
    assert str(caught.value).startswith(words)
    assert differences([Facts(gpus=gpus, asked=asked) for gpus in seen], "a" * len(seen)) == [str(caught.value)]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_every_gpu_is_taken_once(share: int, beside: int, num_hosts: int) -> None:
    own = [[f"{host}-{number}" for number in range(share * beside)] for host in range(num_hosts)]
    hosts = [host for _ in range(beside) for host in range(num_hosts)]
    everybody = [Facts(gpus=own[host]) for host in hosts]
    names = [str(host) for host in hosts]
    found = [everybody[rank].gpus[number] for rank in range(len(hosts)) for number in own_gpus(everybody, names, rank)]
    assert sorted(found) == sorted(uuid for each in own for uuid in each)
    assert differences(everybody, names) == []

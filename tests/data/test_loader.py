"""The loader against llm.c's printed orders, against a plain reading of the files, and its prefetching thread."""

import json
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.rng import Mt19937
from llmc_jax.data.loader import Prefetcher, TokenLoader, continued
from llmc_jax.data.tokenfile import write_token_file

# llm.c's loader (f1e2ace) over tiny_shakespeare_train.bin, B=4, T=64, 1192 samples: seeds 42 (rank 0) and 43 (rank 1)
ORDER_42 = [408, 791, 914, 1057, 81, 450, 299, 907, 582, 321, 670, 134]
ORDER_43 = [688, 340, 306, 518, 397, 795, 267, 512, 1089, 741, 552, 1001]


def counting_file(path: Path, count: int, first: int = 0, kind: str = "gpt2-uint16") -> Path:
    """Tokens first, first + 1, …: a token's value says where it lies."""
    write_token_file(path, np.arange(first, first + count), kind)
    return path


def open_loader(source: Any, B: int, T: int, *, shuffle: bool = False, **rest: Any) -> TokenLoader:
    return TokenLoader(source, B, T, **{"vocab_size": 1 << 16, "shuffle": shuffle, "flag": "-i", **rest})


def shuffle(words: Mt19937, items: list[int]) -> None:
    """llm.c's `random_permutation`, of a list as it stands."""
    for i in range(len(items) - 1, 0, -1):
        j = int(words.raw(1)[0]) % (i + 1)
        items[i], items[j] = items[j], items[i]


def expected_starts(tokens: list[int], sample: int, epochs: int, seed: int | None) -> list[tuple[int, int]]:
    """(shard, first token) of every sample over some epochs, by the description of llm.c's DataLoader."""
    words = None if seed is None else Mt19937(seed)
    shards, result = list(range(len(tokens))), []
    for _ in range(epochs):
        if words:
            shuffle(words, shards)
        for shard in shards:
            samples = list(range((tokens[shard] - 1) // sample))
            if words:
                shuffle(words, samples)
            result += [(shard, index * sample) for index in samples]
    return result


def make_shards(folder: Path, tokens: list[int], kind: str = "gpt2-uint16") -> str:
    for i, count in enumerate(tokens):
        counting_file(folder / f"train_{i:06d}.bin", count, 1000 * i, kind)
    return f"{folder}/train_*.bin"


def test_first_orders_are_llmc_s() -> None:
    """A file as long as tiny_shakespeare_train.bin; a sample's first token says which one it is."""
    write_token_file(Path("a.bin"), np.arange(305260) // 256)
    for rank, order in ((0, ORDER_42), (1, ORDER_43)):
        # llm.c's figures are for one process with the seed of a rank
        loader = open_loader(Path("a.bin"), 4, 64, shuffle=True, seed=42 + rank)
        assert (loader.num_tokens, loader.samples_per_shard, loader.batches_per_epoch) == (305260, [1192], 1192)
        assert [int(loader.next_batch()[0][0, 0, 0]) for _ in range(12)] == order


@pytest.mark.parametrize("kind", ["gpt2-uint16", "llama3-uint32", "raw-int32"])
@pytest.mark.parametrize("seed", [None, 42, 1234])
def test_order_over_shards_and_epochs(tmp_path: Path, kind: str, seed: int | None) -> None:
    """Unequal shards, three epochs: each permutes the shards as the last one left them."""
    tokens = [33, 17, 24, 41]  # the last token of each is only a target
    pattern = make_shards(tmp_path, tokens, kind)
    loader = open_loader(pattern, 2, 4, shuffle=seed is not None, **({} if seed is None else {"seed": seed}))
    starts = expected_starts(tokens, 8, 3, seed)
    assert loader.batches_per_epoch == 4 + 2 + 2 + 5 == len(starts) // 3
    for shard, start in starts:
        inputs, targets = loader.next_batch()
        first = 1000 * shard + start
        assert inputs.shape == targets.shape == (1, 2, 4) and inputs.dtype == targets.dtype == np.int32
        assert inputs.ravel().tolist() == list(range(first, first + 8))
        assert targets.ravel().tolist() == list(range(first + 1, first + 9))
    epoch = len(starts) // 3
    assert sorted(starts[:epoch]) == sorted(starts[epoch : 2 * epoch])
    assert seed is None or starts[:epoch] != starts[epoch : 2 * epoch]
    inputs[:] = -1  # a batch is the caller's own
    assert targets.min() >= 0
    loader.next_batch()
    loader.reset()
    assert seed is not None or loader.next_batch()[0][0, 0, 0] == 0


def test_ranks_share_every_sample(tmp_path: Path) -> None:
    """Rank r reads the r-th slice of each sample, in the order of seed 42 + r; all together read everything once."""
    tokens = [49, 49]
    pattern = make_shards(tmp_path, tokens)
    seen: list[int] = []
    for rank in range(3):
        loader = open_loader(pattern, 2, 4, shuffle=True, process_rank=rank, num_processes=3)
        assert loader.samples_per_shard == [2, 2]
        starts = expected_starts(tokens, 24, 2, 42 + rank)
        for number, (shard, start) in enumerate(starts):
            inputs, targets = loader.next_batch()
            first = 1000 * shard + start + 8 * rank
            assert inputs.ravel().tolist() == list(range(first, first + 8))
            assert targets.ravel().tolist() == list(range(first + 1, first + 9))
            if number < len(starts) // 2:
                seen += inputs.ravel().tolist()
    assert sorted(seen) == [*range(48), *range(1000, 1048)]


@given(before=st.integers(0, 40), after=st.integers(1, 40), shuffle=st.booleans(), reset=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_restored_loader_continues(tmp_path: Path, before: int, after: int, shuffle: bool, reset: bool) -> None:
    pattern = make_shards(tmp_path, [33, 17, 26, 40])
    original = open_loader(pattern, 2, 4, shuffle=shuffle)
    for _ in range(before):
        original.next_batch()
    if reset:
        original.reset()
    state = json.loads(json.dumps(original.state()))
    other = open_loader(pattern, 2, 4, shuffle=shuffle, seed=5)
    other.next_batch()
    other.restore(state)
    assert other.state() == original.state()
    for _ in range(after):
        expected, found = original.next_batch(), other.next_batch()
        np.testing.assert_array_equal(expected, found)
    assert other.state() == original.state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "batch_size is 4, here it is 2"),
        ({"num_processes": 2}, "num_processes is 2, here it is 1"),
        ({"shuffle": False}, "shuffle is False, here it is True"),
        ({"shard_tokens": [33, 18, 26]}, re.escape("shard_tokens is [33, 18, 26], here it is [33, 17, 26]")),
        ({"current_shard_idx": 3}, "it is sample 0 of shard 3"),
        ({"current_sample_idx": 5}, "it is sample 5 of shard 0"),
        ({"shard_indices": [0, 1]}, "it covers 2 shards, here there are 3"),
        ({"intra_shard_indices": []}, "it covers 0 samples of 8 tokens, here there are 3"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    pattern = make_shards(tmp_path, [33, 17, 26])
    loader, same = (open_loader(pattern, 2, 4, shuffle=True) for _ in range(2))
    with pytest.raises(InputError, match=message):
        loader.restore({**loader.state(), **change})
    # and the loader goes on as if nothing had been
    np.testing.assert_array_equal(loader.next_batch(12), same.next_batch(12))


def without(state: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in names}


NOT_IN_LLMC = ("batch_size", "sequence_length", "shard_tokens")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_place_without_what_llm_c_does_not_store(tmp_path: Path, shuffle: bool) -> None:
    """The next batches follow; what would begin otherwise is refused by the numbers of shards and samples."""
    pattern = make_shards(tmp_path, [33, 17, 26])
    loader, other = (open_loader(pattern, 2, 4, shuffle=shuffle) for _ in range(2))
    loader.next_batch(6)
    place = without(loader.state(), *NOT_IN_LLMC)
    other.restore(place)
    for _ in range(3):
        np.testing.assert_array_equal(loader.next_batch(5), other.next_batch(5))
    with pytest.raises(InputError, match="does not fit"):
        other.restore({**place, "current_shard_idx": 3})
    for name in NOT_IN_LLMC:  # all three or none
        with pytest.raises(InputError, match="does not fit"):
            other.restore(without(loader.state(), name))
    with pytest.raises(InputError, match=rf"shuffle is {shuffle}, here it is"):
        open_loader(pattern, 2, 4, shuffle=not shuffle).restore(place)


def test_the_places_of_all_processes(tmp_path: Path) -> None:
    pattern = make_shards(tmp_path, [33, 17, 34])
    ranks = [open_loader(pattern, 2, 4, shuffle=True, process_rank=r, num_processes=2) for r in range(2)]
    for rank in ranks:
        rank.next_batch(3)
    places = {"ranks": [rank.state() for rank in ranks]}
    other = open_loader(pattern, 2, 4, shuffle=True, process_rank=1, num_processes=2)
    other.restore(places)
    np.testing.assert_array_equal(other.next_batch(4), ranks[1].next_batch(4))
    with pytest.raises(InputError, match="it has the places of 2 processes, here there are 1"):
        open_loader(pattern, 2, 4, shuffle=True).restore(places)
    with pytest.raises(InputError, match="does not fit"):
        other.restore({"ranks": [{}, {}]})


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_loaders_of_several_processes_in_one(tmp_path: Path, shuffle: bool) -> None:
    """Micro-batch a is rank a % n's; places saved, also by the prefetcher, go on alike, over the end of an epoch."""
    pattern = make_shards(tmp_path, [50, 33, 70])
    ranks = [open_loader(pattern, 2, 4, shuffle=shuffle, process_rank=r, num_processes=2) for r in range(2)]
    for rank in ranks:
        rank.next_batch(3)
    from_llmc = {"ranks": [without(rank.state(), *NOT_IN_LLMC) for rank in ranks]}
    joint = continued(open_loader(pattern, 2, 4, shuffle=shuffle), from_llmc, 4)
    assert joint.num_processes == 2
    with closing(Prefetcher(joint, 4)) as prefetcher:
        for _ in range(7):
            inputs, targets = next(prefetcher)
            for a in range(4):
                expected = ranks[a % 2].next_batch()
                np.testing.assert_array_equal(inputs[a : a + 1], expected[0])
                np.testing.assert_array_equal(targets[a : a + 1], expected[1])
        state = json.loads(json.dumps(prefetcher.state()))
    assert state == {"ranks": [rank.state() for rank in ranks]}
    again = continued(open_loader(pattern, 2, 4, shuffle=shuffle), state, 2)
    np.testing.assert_array_equal(again.next_batch(2)[0][1:], ranks[1].next_batch()[0])


def test_processes_that_cannot_go_on_in_one(tmp_path: Path) -> None:
    pattern = make_shards(tmp_path, [50, 33, 17])
    ranks = [open_loader(pattern, 2, 4, shuffle=True, process_rank=r, num_processes=2) for r in range(2)]
    places = {"ranks": [rank.state() for rank in ranks]}
    alone = open_loader(pattern, 2, 4, shuffle=True)
    with pytest.raises(InputError, match=r"3 micro-batches, not a multiple of 2: .* -d a multiple of 16 tokens"):
        continued(alone, places, 3)
    with pytest.raises(InputError, match="batch_size is 2, here it is 1"):
        continued(open_loader(pattern, 1, 4, shuffle=True), places, 2)
    with pytest.raises(InputError, match="one batch takes 25"):
        continued(alone, {"ranks": [{}] * 3}, 3)
    before = alone.state()
    assert continued(alone, before, 3) is alone and alone.state() == before
    assert continued(alone, {"ranks": [before]}, 3) is alone


PROCESSES, A, B, T = 64, 128, 1, 4
SHARDS = [401, 77, 801, 5, 333]  # 100, 19, 200, 1 and 83 samples: nothing that 128 divides
TOO_SMALL = "train_000003.bin"  # for a sample of four processes


def own(process: int) -> list[int]:
    """The micro-batches that a process takes of an update: every 64th."""
    return [process, process + PROCESSES]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_shards(tmp_path_factory.mktemp("shards"), SHARDS)


@given(
    process=st.integers(0, PROCESSES - 1), before=st.integers(0, 12), n=st.sampled_from([1, 4, 64]),
    turns=st.booleans(), shuffle=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_at_64_processes_any_step_can_be_gone_on_from(
    shards: str, process: int, before: int, n: int, turns: bool, shuffle: bool
) -> None:
    """On n processes, from the place that one of 64 had, ahead of which it was read; also in llm.c's order of 4."""
    pattern = [path for path in sorted(Path(shards).parent.iterdir()) if path.name != TOO_SMALL]
    how: dict[str, Any] = {"shuffle": shuffle} | ({"process_rank": None, "num_processes": 4} if turns else {})
    whole = open_loader(pattern, B, T, **how)
    with closing(Prefetcher(open_loader(pattern, B, T, **how), A, wanted=own(process))) as prefetcher:
        for _ in range(before):
            np.testing.assert_array_equal(next(prefetcher), np.array(whole.next_batch(A))[:, own(process)])
        place = json.loads(json.dumps(prefetcher.state()))
    assert place == whole.state()
    share = A // n
    others = [continued(open_loader(pattern, B, T, shuffle=shuffle), place, A) for _ in range(min(n, 4))]
    for _ in range(3):
        expected = np.array(whole.next_batch(A))
        for number, loader in enumerate(others):
            wanted = np.arange(number * share, (number + 1) * share)
            np.testing.assert_array_equal(loader.next_batch(A, wanted), expected[:, wanted])


def test_a_shard_that_is_read_elsewhere_is_not_opened(tmp_path: Path) -> None:
    """It may be gone, and the shards round it are read as they are; wanted, it is an error."""
    pattern = make_shards(tmp_path, [17, 17, 17])
    loader = open_loader(pattern, 2, 4)  # two samples of each
    Path("train_000001.bin").unlink()
    for _ in range(3):
        inputs, _ = loader.next_batch(6, [4, 1])
        assert inputs[:, 0, 0].tolist() == [2000, 8]
    with pytest.raises(InputError, match=r"train_000001\.bin: cannot be read"):
        loader.next_batch(6, [0, 3])


def test_files_that_make_no_loader() -> None:
    small = counting_file(Path("b.bin"), 32)
    counting_file(Path("a.bin"), 100)
    assert open_loader("a.bin", 4, 8).samples_per_shard == [3]
    with pytest.raises(InputError, match=r"holds 32 tokens; one batch takes 33 \(B=4 \* T=8 \+ 1 for") as error:
        open_loader("*.bin", 4, 8)
    assert str(error.value).startswith(f"-i {small}: ")
    with pytest.raises(InputError, match=r"takes 129 \(B=4 \* T=8 \* 4 processes \+ 1"):
        open_loader("a.bin", 4, 8, num_processes=4)
    counting_file(small, 100, kind="llama3-uint32")
    sources: list[tuple[Any, str]] = [
        ("*.bin", r"a\.bin is gpt2-uint16 and .*b\.bin is llama3-uint32; all shards must agree"),
        ("*.txt", r"-j .*no such file; .*llmc-jax data"),
        ([Path("c.bin")], "cannot be read"),
    ]
    for source, message in sources:
        with pytest.raises(InputError, match=message):
            open_loader(source, 4, 8, flag="-j")


@pytest.mark.parametrize(
    ("kind", "bad", "start"), [("gpt2-uint16", 300, 1024), ("llama3-uint32", 2**32 - 1, 1024), ("raw-int32", 257, 0)]
)
@pytest.mark.parametrize("at", [8, 15, 16])
def test_ids_of_another_tokenizer(kind: str, bad: int, start: int, at: int) -> None:
    """As the first input, as an input and a target, and as nothing but the last target of the second batch."""
    tokens = np.arange(25)
    tokens[at] = bad
    write_token_file(Path("a.bin"), tokens, kind)
    loader = open_loader(Path("a.bin"), 2, 4, vocab_size=257)
    if at != 8:  # token 8 is also the first batch's last target
        loader.next_batch()
    size = 2 if kind == "gpt2-uint16" else 4
    message = rf"a\.bin: token {at} \(byte {start + size * at}\) is id {bad}; with V=257 ids end at 256"
    with pytest.raises(FormatError, match=message):
        loader.next_batch()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_that_is_deleted_or_replaced_is_read_on(shuffle: bool) -> None:
    """Over epochs, where it is the only one."""
    path = counting_file(Path("a.bin"), 100)
    plain = open_loader(counting_file(Path("same.bin"), 100), 2, 4, shuffle=shuffle)
    loader = open_loader(path, 2, 4, shuffle=shuffle)
    for number in range(40):
        if number == 3:
            path.unlink()
        if number == 9:
            counting_file(path, 100, first=500)
        np.testing.assert_array_equal(loader.next_batch(), plain.next_batch())


def test_a_shard_that_is_opened_later_must_be_there(tmp_path: Path) -> None:
    """Changed, but as long as it was, it is read as it is; gone, it is an error."""
    pattern = make_shards(tmp_path, [17, 17])
    loader = open_loader(pattern, 2, 4)
    loader.next_batch()
    changed = counting_file(Path("train_000001.bin"), 17, first=3000)
    os.utime(changed, ns=(1, 1))
    firsts = [int(loader.next_batch()[0][0, 0, 0]) for _ in range(8)]
    assert firsts == [8, 3000, 3008, 0, 8, 3000, 3008, 0]
    changed.unlink()
    assert loader.next_batch()[0][0, 0, 0] == 8
    position = loader.position
    for _ in range(2):
        with pytest.raises(InputError, match=r"train_000001\.bin: cannot be read \(No such file"):
            loader.next_batch()
    assert loader.state(position)["current_sample_idx"] == 2
    counting_file(changed, 18)  # of another length
    with pytest.raises(FormatError, match=r"train_000001\.bin: changed during the run"):
        loader.next_batch()


def test_errors_come_out_of_next_behind_the_good_batches() -> None:
    tokens = np.arange(33)
    tokens[20] = 300
    write_token_file(Path("a.bin"), tokens)
    loader = open_loader(Path("a.bin"), 2, 4, vocab_size=257)
    with closing(Prefetcher(loader, depth=8)) as prefetcher:
        assert next(prefetcher)[0][0, 0, 0] == 0
        assert next(prefetcher)[0][0, 0, 0] == 8
        state = prefetcher.state()
        for _ in range(2):  # and again
            with pytest.raises(FormatError, match=r"token 20 .* is id 300"):
                next(prefetcher)
        assert prefetcher.state() == state
    assert state["current_sample_idx"] == 2

"""The loader: batches of B x T tokens and their targets, in llm.c's order, read from token files.

Leaves out tokenizers, and how many batches make a step (the trainer's).

    B batch, T sequence length, V vocabulary. A sample is num_processes * B * T consecutive tokens of one shard; the
    process of rank r reads its tokens r*B*T to (r+1)*B*T, and one more for the last target.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.rng import Mt19937
from llmc_jax.data.tokenfile import TokenFile, expand_pattern, open_token_file

Batch = tuple[np.ndarray, np.ndarray]
# Of a loader's state: what must be as it was, and what of that llm.c does not store
FIT = ("batch_size", "sequence_length", "process_rank", "num_processes", "shuffle", "shard_tokens")
NOT_IN_LLMC = ("batch_size", "sequence_length", "shard_tokens")


class Position(NamedTuple):
    """Where a rank stands; never changed in place, so that keeping one is keeping a reference.

    shard: place in this epoch's order of shards; sample: samples already read of it; shard_order, (shards,) int32, and
    sample_order, (samples of the current shard,) int32: the orders; rng: the state of the random stream after they
    were drawn, None without shuffling.
    """

    shard: int
    sample: int
    shard_order: np.ndarray
    sample_order: np.ndarray
    rng: dict[str, Any] | None

    def plain(self) -> dict[str, Any]:
        """Return it under the names of llm.c's training state; without shuffling the orders are empty."""
        shuffled = self.rng is not None
        return {
            "current_shard_idx": self.shard,
            "current_sample_idx": self.sample,
            "shard_indices": self.shard_order.tolist() if shuffled else [],
            "intra_shard_indices": self.sample_order.tolist() if shuffled else [],
            "shuffle_rng": self.rng,
        }


class Rank:
    """The order in which one process reads the samples: all shards, and all samples of each, once per epoch."""

    def __init__(self, number: int, samples_per_shard: Sequence[int], seed: int | None) -> None:
        """Begin an epoch. seed: of the order, to which the rank's number is added, as llm.c adds it to 42; None: first
        to last.
        """
        self.number, self.samples_per_shard = number, samples_per_shard
        self.rng = None if seed is None else Mt19937(seed + number)
        identity = np.arange(len(samples_per_shard), dtype=np.int32)
        self.position = Position(0, 0, identity, identity[:0], None)
        self.reset()

    def reset(self) -> None:
        """Begin a new epoch at its first sample. Shuffled, the list of shards is permuted anew from its last order."""
        shard_order = self.position.shard_order.copy()
        if self.rng is not None:
            self.rng.permute(shard_order)
        self._begin_shard(0, shard_order)

    def _begin_shard(self, shard: int, shard_order: np.ndarray) -> None:
        samples = self.samples_per_shard[int(shard_order[shard])]
        if self.rng is None:
            self.position = Position(shard, 0, shard_order, np.arange(samples, dtype=np.int32), None)
        else:
            self.position = Position(shard, 0, shard_order, self.rng.permutation(samples), self.rng.state())

    def begin_next_shard(self) -> None:
        """Begin the next shard of the order, after the last one the next epoch."""
        if self.position.shard + 1 < len(self.position.shard_order):
            self._begin_shard(self.position.shard + 1, self.position.shard_order)
        else:
            self.reset()

    def next_sample(self) -> tuple[int, int]:
        """Return which shard and which of its samples come next; `count_sample` is called once it was read."""
        if self.position.sample == len(self.position.sample_order):
            self.begin_next_shard()
        shard, sample, shard_order, sample_order, _ = self.position
        return int(shard_order[shard]), int(sample_order[sample])

    def count_sample(self) -> None:
        """Go past the sample that `next_sample` returned: it was read, here or by another process."""
        self.position = self.position._replace(sample=self.position.sample + 1)


class TokenLoader:
    """Batches from the shards that a glob pattern (or a list of paths) names. llm.c's DataLoader (llmc/dataloader.h).

    batch_size: B, sequence_length: T, of this process; vocab_size: V, which every id read must stay below; shuffle:
    both the shards and the samples of a shard in a random order per epoch, each sample once (llm.c: training), else
    first to last (validation); flag: the option that named the files, for messages; process_rank: the rank of
    num_processes that is read for; None: all of them in turns, for a run of llm.c on n GPUs that goes on in one
    process; seed: of the order.

    Attributes: paths; shard_tokens and samples_per_shard, in the order of paths; num_tokens (of all shards);
    batches_per_epoch of a rank; position: where each rank stands, cheap to keep, unlike `state`, which turns it into
    plain data.
    One sample is one batch. What is left of a shard after its last whole sample is never read. Every rank goes through
    shards and samples in an order of its own; together they read each sample once per epoch if the shards are equal.

    One shard per rank is open at a time, and read on whatever happens to its name.

    Raises InputError for shards too small for one batch or of different formats, FormatError for broken files.
    """

    def __init__(
        self,
        pattern_or_paths: str | Path | Sequence[str | Path],
        batch_size: int,
        sequence_length: int,
        *,
        vocab_size: int,
        shuffle: bool,
        flag: str,
        process_rank: int | None = 0,
        num_processes: int = 1,
        seed: int = 42,
    ) -> None:
        assert batch_size >= 1 and sequence_length >= 1 and vocab_size >= 1
        assert process_rank is None or 0 <= process_rank < num_processes
        self.batch_size, self.sequence_length, self.vocab_size = batch_size, sequence_length, vocab_size
        self.num_processes = num_processes
        self.flag, self.shuffle = flag, shuffle
        if isinstance(pattern_or_paths, str | Path):
            self.paths = expand_pattern(pattern_or_paths, flag)
        else:
            self.paths = [Path(path) for path in pattern_or_paths]
        self._shards = self._inspect_shards()  # as each was when it was last opened
        self.shard_tokens = [file.num_tokens for file in self._shards]
        self.num_tokens = sum(self.shard_tokens)
        # the last token of a shard can only be a target
        self.samples_per_shard = [(tokens - 1) // self._sample_tokens for tokens in self.shard_tokens]
        self.batches_per_epoch = sum(self.samples_per_shard)
        numbers = range(num_processes) if process_rank is None else [process_rank]
        self._ranks = [Rank(number, self.samples_per_shard, seed if shuffle else None) for number in numbers]
        self._files: dict[int, TokenFile] = {}  # open, by rank

    @property
    def _sample_tokens(self) -> int:
        return self.num_processes * self.batch_size * self.sequence_length

    def _fits(self, rank: Rank) -> dict[str, Any]:
        """Return what a rank's state says of the loader that it fits."""
        return {name: rank.number if name == "process_rank" else getattr(self, name) for name in FIT}

    def _inspect_shards(self) -> list[TokenFile]:
        """Open each shard once, so that a bad one ends the run before it begins; none stays open."""
        needed = self._sample_tokens + 1
        shards: list[TokenFile] = []
        for path in self.paths:
            with open_token_file(path) as file:
                shards.append(file)
            if file.kind != shards[0].kind:
                raise InputError(
                    f"{self.flag}: {shards[0].path} is {shards[0].kind} and {path} is {file.kind}; all shards must "
                    "agree: narrow the pattern"
                )
            if file.num_tokens < needed:
                processes = f" * {self.num_processes} processes" if self.num_processes > 1 else ""
                raise InputError(
                    f"{self.flag} {path}: holds {file.num_tokens} tokens; one batch takes {needed} (B={self.batch_size}"
                    f" * T={self.sequence_length}{processes} + 1 for the last target): lower -b or -t, or give a "
                    "larger file"
                )
        return shards

    @property
    def position(self) -> tuple[Position, ...]:
        """Return where each rank stands."""
        return tuple(rank.position for rank in self._ranks)

    def reset(self) -> None:
        """Begin a new epoch."""
        for rank in self._ranks:
            rank.reset()

    def next_batch(self, micro_batches: int = 1, wanted: Sequence[int] | np.ndarray | None = None) -> Batch:
        """Return the next micro_batches batches of llm.c: (inputs, targets), both new, (micro_batches, B, T) int32.

        wanted: the numbers of those among them that are read and returned, in that order, (len(wanted), B, T), where
        other processes read the rest; None: all. The loader moves on by all of them either way, so that it stands at
        the same place in every process. A shard that nothing is wanted of is not opened.
        targets[a, b, t] is the token after inputs[a, b, t]. After the last sample the next epoch begins. Of n ranks in
        turns, micro-batch a is that of rank a % n: what n processes of llm.c read in each of their micro-steps. An
        update sums over the same batches, so it is the same update but for rounding.
        Raises FormatError for a token that is no id below V and for a file that was shortened, InputError for one that
        is not there when it is opened.
        """
        assert micro_batches % len(self._ranks) == 0
        B, T = self.batch_size, self.sequence_length
        numbers = range(micro_batches) if wanted is None else [int(number) for number in wanted]
        place = {number: i for i, number in enumerate(numbers)}
        assert len(place) == len(numbers) and all(0 <= number < micro_batches for number in numbers), numbers
        inputs = np.empty((len(numbers), B, T), np.int32)
        targets = np.empty((len(numbers), B, T), np.int32)
        for a in range(micro_batches):
            rank = self._ranks[a % len(self._ranks)]
            shard, sample = rank.next_sample()
            if a in place:
                tokens = self._read(rank, shard, sample)  # (B*T + 1,)
                inputs[place[a]] = tokens[:-1].reshape(B, T)
                targets[place[a]] = tokens[1:].reshape(B, T)
            rank.count_sample()
        return inputs, targets

    def _read(self, rank: Rank, shard: int, sample: int) -> np.ndarray:
        file = self._open_shard(rank, shard)
        local = self.batch_size * self.sequence_length
        start = sample * self._sample_tokens + rank.number * local
        tokens = file.read(start, local + 1)  # (B*T + 1,)
        if foreign := file.foreign_id(start, tokens, self.vocab_size):
            raise FormatError(
                f"{self.flag} {file.path}: {foreign}; the file was probably made with a different tokenizer: give the "
                "model a larger V, or make the file with the tokenizer that fits"
            )
        return tokens

    def _open_shard(self, rank: Rank, index: int) -> TokenFile:
        before = self._files.get(rank.number)
        if before is not None and before.path == self.paths[index]:
            return before
        file, known = open_token_file(self.paths[index]), self._shards[index]
        if (file.num_tokens, file.kind) != (known.num_tokens, known.kind):
            raise FormatError(
                f"{self.flag} {file.path}: changed during the run: {file.num_tokens} tokens, {file.kind}; it held "
                f"{known.num_tokens}, {known.kind}; leave the files alone while they are read"
            )
        if before is not None:
            before.close()
        self._files[rank.number] = self._shards[index] = file
        return file

    def state(self, position: tuple[Position, ...] | None = None) -> dict[str, Any]:
        """Return what `restore` needs to continue from here (or from an earlier `position`): JSON-able.

        The names are those of llm.c's training state: current_shard_idx, current_sample_idx, shard_indices and
        intra_shard_indices (empty lists without shuffling), shuffle_rng (None without); the rest says what it fits.
        Of several ranks it is {"ranks": [that of each]}.
        """
        places = zip(self._ranks, position or self.position, strict=True)
        states = [{**self._fits(rank), **place.plain()} for rank, place in places]
        return states[0] if len(states) == 1 else {"ranks": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`: the next batches are those that followed it.

        One that comes from llm.c has no batch_size, sequence_length and shard_tokens, which llm.c does not store; then
        the numbers of shards and of samples in the current one must be those of here, which is llm.c's own check. Of
        {"ranks": [...]}, the states of all processes, those of the ranks that are read here are taken.

        Raises InputError if it was taken with other files, another B, T, rank, number of processes or way of shuffling;
        a loader of one rank then stands where it stood. That it is a state the checkpoint's digests say.
        """
        states = [state] * len(self._ranks)
        if "ranks" in state:
            saved = state["ranks"]
            if len(saved) != self.num_processes:
                raise self._misfit(f"it has the places of {len(saved)} processes, here there are {self.num_processes}")
            states = [saved[rank.number] for rank in self._ranks]
        for rank, each in zip(self._ranks, states, strict=True):
            self._restore(rank, each)

    def _restore(self, rank: Rank, state: Mapping[str, Any]) -> None:
        from_llmc = not any(name in state for name in NOT_IN_LLMC)
        for name, ours in self._fits(rank).items():
            if from_llmc and name in NOT_IN_LLMC:
                continue
            if name not in state or state[name] != ours:
                raise self._misfit(f"{name} is {str(state.get(name))[:60]}, here it is {str(ours)[:60]}")
        shard, sample = state["current_shard_idx"], state["current_sample_idx"]
        shard_order = self._order(state["shard_indices"], len(self.paths), "shards")
        samples = self.samples_per_shard[int(shard_order[shard])] if shard < len(self.paths) else -1
        if sample > samples:
            raise self._misfit(f"it is sample {sample} of shard {shard}, which these files do not have")
        sample_order = self._order(state["intra_shard_indices"], samples, f"samples of {self._sample_tokens} tokens")
        if rank.rng is not None:
            rank.rng.restore(state["shuffle_rng"])
        rank.position = Position(shard, sample, shard_order, sample_order, state["shuffle_rng"])

    def _order(self, values: list[int], n: int, what: str) -> np.ndarray:
        """Return the order of 0 … n-1 that a state holds, (n,) int32; without shuffling it holds an empty list."""
        if self.shuffle and len(values) != n:
            raise self._misfit(f"it covers {len(values)} {what}, here there are {n}")
        return np.array(values if self.shuffle else range(n), np.int32)

    def _misfit(self, what: str) -> InputError:
        return InputError(
            f"{self.flag}: the saved loader position does not fit: {what}; continue with the files and settings it was "
            "saved with"
        )


def continued(loader: TokenLoader, state: Mapping[str, Any], micro_batches: int) -> TokenLoader:
    """Return a loader set to a saved place: one of as many processes as that is the place of.

    loader: of one process, or of several in turns. micro_batches: of an update. Raises InputError if the place does not
    fit, or n processes cannot share those.
    """
    n = len(state.get("ranks", [state]))
    if micro_batches % n:
        unit = loader.batch_size * loader.sequence_length * n
        raise InputError(
            f"the checkpoint comes from {n} processes, whose batches are read here in turns, but one update has "
            f"{micro_batches} micro-batches, not a multiple of {n}: give -b and -t as they had them, and -d a multiple "
            f"of {unit} tokens"
        )
    loader = of_processes(loader, n)
    loader.restore(state)
    return loader


def of_processes(loader: TokenLoader, n: int) -> TokenLoader:
    """Return a loader as n processes in turns read the same files: itself, or one at the beginning."""
    if n == loader.num_processes:
        return loader
    return TokenLoader(
        loader.paths, loader.batch_size, loader.sequence_length, vocab_size=loader.vocab_size,
        shuffle=loader.shuffle, flag=loader.flag, process_rank=0 if n == 1 else None, num_processes=n,
    )  # fmt: skip


class Prefetcher(Iterator[Batch]):
    """Reads a loader's batches ahead in a thread while the step runs: `depth` of them are ready or being read.

    An iterator of what `loader.next_batch(micro_batches, wanted)` would give, in the same order, each batch both
    (micro_batches, B, T) int32, or as many as are wanted; an error of the thread is raised there, behind the batches
    read before it. Nobody else may use the loader until `close()`, which ends the iterator and leaves the loader ahead
    of the batches given out: continue from `state()`.
    """

    def __init__(
        self,
        loader: TokenLoader,
        micro_batches: int = 1,
        depth: int = 2,
        wanted: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        self._loader = loader
        self._micro_batches, self._wanted = micro_batches, wanted
        self._consumed = loader.position
        self._thread = ThreadPoolExecutor(1, "llmc_jax loader")
        self._ready = deque(self._thread.submit(self._read) for _ in range(depth))

    def _read(self) -> tuple[Batch, tuple[Position, ...]]:
        return self._loader.next_batch(self._micro_batches, self._wanted), self._loader.position

    def __next__(self) -> Batch:
        if not self._ready:
            raise StopIteration
        batch, self._consumed = self._ready[0].result()  # an error stays where it is
        self._ready.popleft()
        self._ready.append(self._thread.submit(self._read))
        return batch

    def state(self) -> dict[str, Any]:
        """Return the loader's state after the batches that were given out, for `TokenLoader.restore`."""
        return self._loader.state(self._consumed)

    def close(self) -> None:
        """Stop reading, drop what is ready and join the thread. May be called again."""
        self._ready.clear()
        self._thread.shutdown(cancel_futures=True)

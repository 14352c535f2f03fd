"""The loader: batches of B x T tokens and their targets, in llm.c's order, read from token files.

Leaves out tokenizers, and how many batches make a step (the trainer's).

    B batch, T sequence length, V vocabulary. A sample is num_processes * B * T consecutive tokens of one shard; the
    process of rank r reads its tokens r*B*T to (r+1)*B*T, and one more for the last target.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from llmc_jax.data.tokenfile import TokenFile, expand_pattern, open_token_file
from llmc_jax.errors import FormatError, InputError
from llmc_jax.rng import Mt19937, is_int_below

Batch = tuple[np.ndarray, np.ndarray]
# Of a loader's state: what must be as it was, and what of that llm.c does not store
FIT = ("batch_size", "sequence_length", "process_rank", "num_processes", "shuffle", "shard_tokens")
NOT_IN_LLMC = ("batch_size", "sequence_length", "shard_tokens")


class Position(NamedTuple):
    """Where a loader stands; never changed in place, so that keeping one is keeping a reference.

    shard: place in this epoch's order of shards; sample: samples already read of it; shard_order, (shards,) int32, and
    sample_order, (samples of the current shard,) int32: the orders, empty without shuffling; rng: the state of the
    random stream after they were drawn, None without shuffling.
    """

    shard: int
    sample: int
    shard_order: np.ndarray
    sample_order: np.ndarray
    rng: dict[str, Any] | None


class Notice(NamedTuple):
    """Something that happened to a file and does not end the run. flag: the option that named it."""

    flag: str
    path: Path
    what: Literal["gone", "replaced", "changed"]

    @property
    def words(self) -> str:
        """For the screen, in a line."""
        return f"{self.flag} {self.path}: {NOTICES[self.what]}"


OPENED_AGAIN = "what opens it again (-y 1, or another epoch over several files)"
NOTICES = {
    "gone": f"was deleted or renamed; reading continues while it is open, but {OPENED_AGAIN} will not find it: put it "
    "back",
    "replaced": "was replaced by another file; reading of the first one continues while it is open, but "
    f"{OPENED_AGAIN} will find the other: put the first one back",
    "changed": "was changed or replaced since the run began; it has as many tokens as before, and is read as it is now",
}


class TokenLoader:
    """Batches from the shards that a glob pattern (or a list of paths) names. llm.c's DataLoader (llmc/dataloader.h).

    batch_size: B, sequence_length: T, of this process; vocab_size: V, which every id read must stay below; shuffle:
    both the shards and the samples of a shard in a random order per epoch, each sample once (llm.c: training), else
    first to last (validation); flag: the option that named the files, for messages; seed: of the order, to which the
    rank is added, as llm.c adds it to 42.

    Attributes: paths; shard_tokens and samples_per_shard, in the order of paths; num_tokens (of all shards);
    batches_per_epoch; position: where it stands, cheap to keep, unlike `state`, which turns it into plain data.
    One sample is one batch. What is left of a shard after its last whole sample is never read. Every rank goes through
    shards and samples in an order of its own; together they read each sample once per epoch if the shards are equal.

    One shard is open at a time, and read on whatever happens to its name; `notices` tells of that.

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
        process_rank: int = 0,
        num_processes: int = 1,
        seed: int = 42,
    ) -> None:
        assert batch_size >= 1 and sequence_length >= 1 and vocab_size >= 1
        assert 0 <= process_rank < num_processes
        self.batch_size, self.sequence_length, self.vocab_size = batch_size, sequence_length, vocab_size
        self.process_rank, self.num_processes = process_rank, num_processes
        self.flag = flag
        self.shuffle = shuffle
        if isinstance(pattern_or_paths, str | Path):
            self.paths = expand_pattern(pattern_or_paths, flag)
        else:
            self.paths = [Path(path) for path in pattern_or_paths]
        self._modified: dict[Path, int] = {}  # nanoseconds; when each was last changed, as far as this loader knows
        self._notices: deque[Notice] = deque()  # a thread that reads ahead adds to them
        self._noticed: set[Notice] = set()
        self.shard_tokens, self._kind = self._inspect_shards()
        self.num_tokens = sum(self.shard_tokens)
        # the last token of a shard can only be a target
        self.samples_per_shard = [(tokens - 1) // self._sample_tokens for tokens in self.shard_tokens]
        self.batches_per_epoch = sum(self.samples_per_shard)
        self._rng = Mt19937(seed + process_rank) if shuffle else None
        self._file: TokenFile | None = None
        identity = np.arange(len(self.paths) if shuffle else 0, dtype=np.int32)
        self.position = Position(0, 0, identity, identity[:0], None)
        self.reset()

    @property
    def _sample_tokens(self) -> int:
        return self.num_processes * self.batch_size * self.sequence_length

    def _inspect_shards(self) -> tuple[list[int], str]:
        """Open each shard once, so that a bad one ends the run before it begins; none stays open."""
        needed = self._sample_tokens + 1
        counts: list[int] = []
        first: TokenFile | None = None
        for path in self.paths:
            with open_token_file(path) as file:
                first = first or file
                self._modified[path] = file.modified
            if file.kind != first.kind:
                raise InputError(
                    f"{self.flag}: {first.path} is {first.kind} and {path} is {file.kind}; all shards must agree: "
                    "narrow the pattern"
                )
            if file.num_tokens < needed:
                processes = f" * {self.num_processes} processes" if self.num_processes > 1 else ""
                raise InputError(
                    f"{self.flag} {path}: holds {file.num_tokens} tokens; one batch takes {needed} (B={self.batch_size}"
                    f" * T={self.sequence_length}{processes} + 1 for the last target): lower -b or -t, or give a "
                    "larger file"
                )
            counts.append(file.num_tokens)
        assert first is not None
        return counts, first.kind

    def reset(self) -> None:
        """Begin a new epoch at its first sample. Shuffled, the list of shards is permuted anew from its last order."""
        shard_order = self.position.shard_order.copy()
        if self._rng is not None:
            self._rng.permute(shard_order)
        self._begin_shard(0, shard_order)

    def _begin_shard(self, shard: int, shard_order: np.ndarray) -> None:
        sample_order, rng = shard_order[:0], None
        if self._rng is not None:
            sample_order = self._rng.permutation(self.samples_per_shard[int(shard_order[shard])])
            rng = self._rng.state()
        self.position = Position(shard, 0, shard_order, sample_order, rng)

    def _path_index(self) -> int:
        return int(self.position.shard_order[self.position.shard]) if self.shuffle else self.position.shard

    def next_batch(self, micro_batches: int = 1) -> Batch:
        """Return the next micro_batches batches of llm.c: (inputs, targets), both new, (micro_batches, B, T) int32.

        targets[a, b, t] is the token after inputs[a, b, t]. After the last sample the next epoch begins.
        Raises FormatError for a token that is no id below V and for a file that was shortened, InputError for one that
        is not there when it is opened.
        """
        B, T = self.batch_size, self.sequence_length
        inputs = np.empty((micro_batches, B, T), np.int32)
        targets = np.empty((micro_batches, B, T), np.int32)
        for a in range(micro_batches):
            tokens = self._next_tokens()  # (B*T + 1,)
            inputs[a] = tokens[:-1].reshape(B, T)
            targets[a] = tokens[1:].reshape(B, T)
        self.look()
        return inputs, targets

    def look(self) -> None:
        """Notice what happened to the file that is open. Only the thread that reads batches may call it."""
        if self._file is not None and (where := self._file.where()) != "here":
            self._notice(self._file.path, where)

    def _notice(self, path: Path, what: Literal["gone", "replaced", "changed"]) -> None:
        notice = Notice(self.flag, path, what)
        if notice not in self._noticed:
            self._noticed.add(notice)
            self._notices.append(notice)

    def notices(self) -> list[Notice]:
        """Return what happened to the files since the last call; each thing is told once. Any thread may call it."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def _next_tokens(self) -> np.ndarray:
        if self.position.sample >= self.samples_per_shard[self._path_index()]:
            if self.position.shard + 1 < len(self.paths):
                self._begin_shard(self.position.shard + 1, self.position.shard_order)
            else:
                self.reset()
        file = self._open_shard(self._path_index())
        sample = self.position.sample
        if self.shuffle:
            sample = int(self.position.sample_order[sample])
        local = self.batch_size * self.sequence_length
        start = sample * self._sample_tokens + self.process_rank * local
        tokens = file.read(start, local + 1)  # (B*T + 1,)
        self._check_ids(file, start, tokens)
        self.position = self.position._replace(sample=self.position.sample + 1)
        return tokens

    def _open_shard(self, index: int) -> TokenFile:
        if self._file is None or self._file.path != self.paths[index]:
            file = open_token_file(self.paths[index])
            if (file.num_tokens, file.kind) != (self.shard_tokens[index], self._kind):
                raise FormatError(
                    f"{self.flag} {file.path}: changed during the run: {file.num_tokens} tokens, {file.kind}; it held "
                    f"{self.shard_tokens[index]}, {self._kind}; leave the files alone while they are read"
                )
            if file.modified != self._modified[file.path]:
                self._modified[file.path] = file.modified
                self._notice(file.path, "changed")
            if self._file is not None:
                self._file.close()
            self._file = file
        return self._file

    def _check_ids(self, file: TokenFile, start: int, tokens: np.ndarray) -> None:
        # as unsigned, a negative id of an int32 file is above any V
        unsigned = tokens.view(f"<u{tokens.dtype.itemsize}")
        if int(unsigned.max()) < self.vocab_size:
            return
        at = int(np.flatnonzero(unsigned >= self.vocab_size)[0])
        place = start + at
        byte = file.header_bytes + place * tokens.dtype.itemsize
        raise FormatError(
            f"{self.flag} {file.path}: token {place} (byte {byte}) is id {tokens[at]}, but the model knows 0 to "
            f"{self.vocab_size - 1} (V={self.vocab_size}); the file was probably made with another tokenizer: give the "
            "model a larger V, or make the file with the tokenizer that fits"
        )

    def state(self, position: Position | None = None) -> dict[str, Any]:
        """Return what `restore` needs to continue from here (or from an earlier `position`): JSON-able.

        The names are those of llm.c's training state: current_shard_idx, current_sample_idx, shard_indices and
        intra_shard_indices (empty lists without shuffling), shuffle_rng (None without); the rest says what it fits.
        """
        place = self.position if position is None else position
        return {
            **{name: getattr(self, name) for name in FIT},
            "current_shard_idx": place.shard,
            "current_sample_idx": place.sample,
            "shard_indices": place.shard_order.tolist(),
            "intra_shard_indices": place.sample_order.tolist(),
            "shuffle_rng": place.rng,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`: the next batches are those that followed it.

        One that comes from llm.c has no batch_size, sequence_length and shard_tokens, which llm.c does not store; then
        the numbers of shards and of samples in the current one must be those of here, which is llm.c's own check. Of
        {"ranks": [...]}, the states of all processes, this process's is taken.

        Raises InputError if it is not one, or was taken with other files, another B, T, rank, number of processes or
        way of shuffling; the loader then stands where it stood.
        """
        if not isinstance(state, Mapping):
            raise self._broken("no table of names and values")
        if "ranks" in state:
            ranks = state["ranks"]
            if not isinstance(ranks, list) or not all(isinstance(rank, Mapping) for rank in ranks):
                raise self._broken("ranks")
            if len(ranks) != self.num_processes:
                raise self._misfit(f"it has the places of {len(ranks)} processes, here there are {self.num_processes}")
            state = ranks[self.process_rank]
        from_llmc = not any(name in state for name in NOT_IN_LLMC)
        for name in FIT:
            ours = getattr(self, name)
            if from_llmc and name in NOT_IN_LLMC:
                continue
            if name not in state or state[name] != ours:
                raise self._misfit(f"{name} is {_short(state.get(name))}, here it is {_short(ours)}")
        shard, sample, rng = state.get("current_shard_idx"), state.get("current_sample_idx"), None
        shards = state.get("shard_indices")
        if from_llmc and self.shuffle and isinstance(shards, list) and len(shards) != len(self.paths):
            raise self._misfit(f"it covers {len(shards)} shards, but there are {len(self.paths)} here")
        shard_order = _permutation(shards, len(self.paths) if self.shuffle else 0)
        if shard_order is None or not is_int_below(shard, len(self.paths)):
            raise self._broken("current_shard_idx or shard_indices")
        samples = self.samples_per_shard[int(shard_order[shard]) if self.shuffle else shard]
        order = state.get("intra_shard_indices")
        if from_llmc and self.shuffle and isinstance(order, list) and len(order) != samples:
            raise self._misfit(
                f"its shard has {len(order)} samples, here it has {samples} of B={self.batch_size} * "
                f"T={self.sequence_length} * {self.num_processes} tokens"
            )
        sample_order = _permutation(order, samples if self.shuffle else 0)
        if sample_order is None or not is_int_below(sample, samples + 1):
            raise self._broken("current_sample_idx or intra_shard_indices")
        if self._rng is not None:
            saved = state.get("shuffle_rng")
            if not isinstance(saved, Mapping):
                raise self._broken("shuffle_rng")
            self._rng.restore(saved)
            rng = self._rng.state()
        self.position = Position(shard, sample, shard_order, sample_order, rng)

    def _misfit(self, what: str) -> InputError:
        return InputError(
            f"{self.flag}: the saved loader position does not fit: {what}; continue with the files and settings it was "
            "saved with"
        )

    def _broken(self, what: str) -> InputError:
        return InputError(f"{self.flag}: the saved loader position is damaged ({what}); continue from another one")


def _permutation(values: Any, n: int) -> np.ndarray | None:
    """`values` as (n,) int32 if it is a list of 0 … n-1 in any order, else None."""
    if not isinstance(values, list) or len(values) != n or not all(is_int_below(value, n) for value in values):
        return None
    order = np.array(values, np.int32)
    return order if np.array_equal(np.sort(order), np.arange(n)) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class JointLoader:
    """The loaders of several processes in one, for a run of llm.c on n GPUs that goes on in one process.

    Micro-batch a of an update is that of rank a % n: what the n processes of llm.c read in each of their micro-steps,
    one after the other. An update sums over the same batches, so it is the same update but for rounding.
    """

    def __init__(self, alone: TokenLoader, num_processes: int) -> None:
        """As a loader of one process, `alone`, but for n. Raises InputError if a shard is too short for that."""
        self.ranks = [
            TokenLoader(
                alone.paths, alone.batch_size, alone.sequence_length, vocab_size=alone.vocab_size,
                shuffle=alone.shuffle, flag=alone.flag, process_rank=rank, num_processes=num_processes,
            )
            for rank in range(num_processes)
        ]  # fmt: skip
        self.paths, self.num_tokens = alone.paths, alone.num_tokens
        self._noticed: set[Notice] = set()

    def next_batch(self, micro_batches: int) -> Batch:
        """Return the next micro_batches batches, a multiple of n: inputs and targets, (micro_batches, B, T) int32."""
        assert micro_batches % len(self.ranks) == 0
        own = [rank.next_batch(micro_batches // len(self.ranks)) for rank in self.ranks]
        inputs, targets = (np.stack(parts, 1) for parts in zip(*own, strict=True))  # (micro-steps, n, B, T)
        return inputs.reshape(-1, *inputs.shape[2:]), targets.reshape(-1, *targets.shape[2:])

    def reset(self) -> None:
        """Begin a new epoch."""
        for rank in self.ranks:
            rank.reset()

    def look(self) -> None:
        """Notice what happened to the open files. Only the thread that reads batches may call it."""
        for rank in self.ranks:
            rank.look()

    def notices(self) -> list[Notice]:
        """Return what happened to the files since the last call; what several ranks see is told once."""
        new = dict.fromkeys(notice for rank in self.ranks for notice in rank.notices())
        found = [notice for notice in new if notice not in self._noticed]
        self._noticed.update(found)
        return found

    @property
    def position(self) -> tuple[Position, ...]:
        """Return where each rank stands."""
        return tuple(rank.position for rank in self.ranks)

    def state(self, position: tuple[Position, ...] | None = None) -> dict[str, Any]:
        """{"ranks": [the state of each]}, for `restore` and for llm.c."""
        places = self.position if position is None else position
        return {"ranks": [rank.state(place) for rank, place in zip(self.ranks, places, strict=True)]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, or from llm.c's. Raises InputError as TokenLoader's does."""
        for rank in self.ranks:
            rank.restore(state)


Loader = TokenLoader | JointLoader


def continued(alone: Loader, state: Mapping[str, Any], micro_batches: int) -> Loader:
    """Return a loader of one process, set to a saved place; or where that is the place of several, theirs in one.

    micro_batches: of an update. Raises InputError if the place does not fit, or n processes cannot share those.
    """
    assert isinstance(alone, TokenLoader)
    ranks = state.get("ranks") if isinstance(state, Mapping) else None
    if not isinstance(ranks, list) or len(ranks) < 2:
        alone.restore(state)
        return alone
    if micro_batches % len(ranks):
        unit = alone.batch_size * alone.sequence_length * len(ranks)
        raise InputError(
            f"the checkpoint comes from {len(ranks)} processes, whose batches are read here in turns, but one update "
            f"has {micro_batches} micro-batches, not a multiple of {len(ranks)}: give -b and -t as they had them, and "
            f"-d a multiple of {unit} tokens"
        )
    joint = JointLoader(alone, len(ranks))
    joint.restore(state)
    return joint


class Prefetcher(Iterator[Batch]):
    """Reads a loader's batches ahead in a thread while the step runs: `depth` of them are ready or being read.

    An iterator of what `loader.next_batch(micro_batches)` would give, in the same order, each batch both
    (micro_batches, B, T) int32; an error of the thread is raised there, behind the batches read before it. Nobody else
    may use the loader until `close()`, which ends the iterator and leaves the loader ahead of the batches given out:
    continue from `state()`.
    """

    def __init__(self, loader: Loader, micro_batches: int = 1, depth: int = 2) -> None:
        self._loader: Any = loader  # and its own kind of position
        self._micro_batches = micro_batches
        self._consumed: Any = loader.position
        self._thread = ThreadPoolExecutor(1, "llmc_jax loader")
        self._ready = deque(self._thread.submit(self._read) for _ in range(depth))

    def _read(self) -> tuple[Batch, Any]:
        return self._loader.next_batch(self._micro_batches), self._loader.position

    def __next__(self) -> Batch:
        if not self._ready:
            raise StopIteration
        batch, self._consumed = self._ready[0].result()  # an error stays where it is
        self._ready.popleft()
        self._ready.append(self._thread.submit(self._read))
        return batch

    def state(self) -> dict[str, Any]:
        """Return the loader's state after the batches that were given out, for `TokenLoader.restore`."""
        state: dict[str, Any] = self._loader.state(self._consumed)
        return state

    def close(self) -> None:
        """Stop reading, drop what is ready and join the thread. May be called again."""
        self._ready.clear()
        self._thread.shutdown(cancel_futures=True)

"""Made-up questions with four answers, for runs that evaluate HellaSwag."""

from pathlib import Path

import numpy as np

from llmc_jax.data.evalfile import Item, write_eval_file


def questions(count: int, vocab_size: int, positions: int) -> list[Item]:
    """Questions of all lengths; the first one just fits so many positions."""
    rng = np.random.default_rng(3)
    half = positions // 2

    def ids(length: int) -> tuple[int, ...]:
        return tuple(int(each) for each in rng.integers(0, vocab_size, length))

    def answers() -> tuple[tuple[int, ...], ...]:
        return tuple(ids(int(rng.integers(1, half + 1))) for _ in range(4))

    longest = Item("0", ids(half), (ids(positions + 1 - half), *answers()[1:]), 1)
    rest = [Item(str(k), ids(int(rng.integers(1, half + 1))), answers(), int(rng.integers(4))) for k in range(1, count)]
    return [longest, *rest]


def write_questions(path: Path, count: int = 12, vocab_size: int = 257, positions: int = 16) -> list[Item]:
    """A file of such questions, as llm.c has it."""
    made = questions(count, vocab_size, positions)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_eval_file(path, made)
    return made

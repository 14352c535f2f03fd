"""What a question of HellaSwag costs: rows by length as evaluation computes them, rows of T as llm.c's, and a peer.

    python benchmarks/evaluate.py --data hellaswag_val.jsonl --torch-python PATH [--write]

All in turns, in one run, on random weights: our evaluation, the same with every row padded to T (llm.c's evaluation in
training), and Hugging Face's model with one question at a time (llm.c's hellaswag.py). Without --torch-python the last
is left out. Whether all find the same sums is checked. --write keeps the table in results/evaluate.md.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.heading import machine_line
from benchmarks.turns import Peer, Spread, blocks_in_turns, ratios, spread
from llmc_jax.checkpoint.convert import main as convert
from llmc_jax.data.items import Item
from llmc_jax.data.tasks import read_items
from llmc_jax.data.tokenizers import load_tokenizer
from llmc_jax.evaluate.choices import answers, rows_of_items
from llmc_jax.generate import scorer as scoring
from llmc_jax.generate.model import open_model
from llmc_jax.generate.scorer import Scorer, batches, score, scorer_of

PAGE = Path(__file__).parent / "results/evaluate.md"
HEADING = "## Questions a second"
NO_PADDING, BY_LENGTH = 1 << 30, scoring.SHORTEST


def answered(scorer: Scorer, items: Sequence[Item], shortest: int = BY_LENGTH) -> np.ndarray:
    """Return the summed losses of each item's completions, rows padded to `shortest` positions at least, or to T."""
    scoring.SHORTEST = shortest
    try:
        found = answers(items, score(scorer, rows_of_items(items)))
    finally:
        scoring.SHORTEST = BY_LENGTH
    return np.array([answer.losses for answer in found])


def positions(scorer: Scorer, items: Sequence[Item]) -> float:
    """Return the positions that are computed for an item, padding included."""
    found = batches(rows_of_items(items), scorer.tokens_per_batch, scorer.config.max_seq_len)
    return sum(batch.inputs.size for batch in found) / len(items)


def questions(items: Sequence[Item]) -> list[Any]:
    """Return items as the peer takes them."""
    return [(item.context, item.completions) for item in items]


def rate(count: int, work: Any) -> Any:
    """A function that does some work and returns how many questions a second that is."""

    def measured() -> float:
        start = time.perf_counter()
        work()
        return count / (time.perf_counter() - start)

    return measured


def started_peer(args: argparse.Namespace, folder: str) -> Peer:
    """The peer, with the same weights."""
    out = Path(folder) / "hf"
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert(["convert", args.model, str(out), "--to", "hf", "--dtype", "fp32"]) == 0
    return Peer([args.torch_python, str(Path(__file__).with_name("evaluate_peer.py")), str(out)]).wait_ready()


def measure(args: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The rows of the table, and versions."""
    model = open_model(args.model, dtype="fp32", tokenizer="none")
    items = read_items("hellaswag", args.data, load_tokenizer(args.tokenizer).tokenizer, args.items)
    scorer, few = scorer_of(model, 1, args.batch_tokens), items[: args.padded]
    of_t = scorer._replace(tokens_per_batch=4 * model.config.max_seq_len)  # a question at a time, as llm.c with -b 4
    blocks: dict[str, Any] = {
        "ours": rate(len(items), lambda: answered(scorer, items)),
        "padded": rate(len(few), lambda: answered(of_t, few, NO_PADDING)),
    }
    ours = answered(scorer, items)  # compiles, as the next line
    check(answered(of_t, few, NO_PADDING), ours[: len(few)])
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = None
        if args.torch_python:
            peer = started_peer(args, folder)
            about = peer.about
            asked = questions(items)
            check(np.array(peer.ask(asked[:8])["losses"]), ours[:8])
            blocks["peer"] = lambda: len(items) / peer.ask(asked)["seconds"]
        found = blocks_in_turns(blocks, args.rounds)
        if peer is not None:
            peer.close()
    return rows_of(found, items, scorer), about


def check(found: np.ndarray, ours: np.ndarray) -> None:
    """Ends the program where two ways find other sums."""
    np.testing.assert_allclose(found, ours, rtol=2e-5)


def rows_of(found: dict[str, list[float]], items: Sequence[Item], scorer: Scorer) -> list[str]:
    """The lines of the table."""
    tokens = sum(len(row.ids) - 1 for row in rows_of_items(items)) / len(items)
    per_item = 4 * scorer.config.max_seq_len

    def text(values: Spread) -> str:
        return values.text(2)

    rows = [
        ("ours: questions a second", text(spread(found["ours"]))),
        (f"positions computed for a question (it has {tokens:.0f})", f"{positions(scorer, items):.0f}"),
        ("rows padded to T: questions a second", text(spread(found["padded"]))),
        ("positions computed for a question", f"{per_item}"),
        ("ours, times as many", text(ratios(found["ours"], found["padded"]))),
    ]
    if "peer" in found:
        longest = sum(len(item.completions) * (item.longest - 1) for item in items) / len(items)
        rows += [
            ("Hugging Face's, one question at a time: questions a second", text(spread(found["peer"]))),
            ("positions computed for a question", f"{longest:.0f}"),
            ("ours, times as many", text(ratios(found["ours"], found["peer"]))),
        ]
    return [f"| {name} | {value} |" for name, value in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter with PyTorch and transformers")
    parser.add_argument("--data", type=Path, default=Path("dev/data/hellaswag/hellaswag_val.parquet"), metavar="FILE")
    parser.add_argument("--tokenizer", default="gpt2", metavar="SPEC")
    parser.add_argument("--model", default="d12", help="a checkpoint or a model's shape (default d12)")
    parser.add_argument("--items", type=int, default=128, help="questions of a round (default 128)")
    parser.add_argument("--padded", type=int, default=1, help="questions of a round with rows of T (default 1)")
    parser.add_argument("--batch-tokens", type=int, metavar="N", help="computed at a time (default: the command's)")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--write", action="store_true", help="keep the table in results/evaluate.md")
    args = parser.parse_args()
    rows, about = measure(args)
    at_once = f" --batch-tokens {args.batch_tokens}" if args.batch_tokens else ""
    command = f"python benchmarks/evaluate.py --model {args.model} --items {args.items}{at_once} --rounds {args.rounds}"
    peer = f" --torch-python PATH`; PyTorch {about['torch']}, transformers {about['transformers']}" if about else "`"
    section = "\n".join([f"{machine_line()}. `{command}{peer}.", "", "| what | median (range) |", "|---|---|", *rows])
    print(section)
    if args.write:
        keep(section)


def keep(section: str) -> None:
    """Put the table behind what the page says above it, in the place of an earlier one."""
    before, heading, rest = PAGE.read_text().partition(HEADING)
    said, mark, after = rest.partition("<!-- table -->\n")
    assert heading and mark, f"{PAGE} has no place for the table"
    _, end, following = after.partition("<!-- end -->")
    PAGE.write_text(f"{before}{heading}{said}{mark}\n{section}\n\n{end or '<!-- end -->'}{following}")


if __name__ == "__main__":
    main()

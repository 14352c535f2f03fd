"""Logs of every writer read back, and fuzzed."""

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.logs import follow
from llmc_jax.logs.reading import BATCHES, ESTIMATE, HELLASWAG, SPEED, read_log
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.folder import RunLog
from tests.printed_logs import OUTPUTS, TABLE, c_main_log, mutated, pairs, step_line, written


def test_our_accuracy(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.val(2, loss=4.0, batches=3)
        log.accuracy(2, items=8, correct=4, correct_norm=3)
    found = {pairs(read_log(place).of(HELLASWAG))[0] for place in (tmp_path, tmp_path / "main.log")}
    assert found == {(2, 0.375)}


def test_main_log(tmp_path: Path) -> None:
    log = read_log(
        written(tmp_path / "main.log", c_main_log({0: 5.5, 1: 5.25}, {0: 5.125, 2: 4.0}) + "s:2 eval:0.2500\n")
    )
    assert pairs(log.train) == [(0, 5.5), (1, 5.25)]
    assert pairs(log.val) == [(0, 5.125), (2, 4.0)]
    assert pairs(log.of(HELLASWAG)) == [(2, 0.25)]
    assert (log.kind, log.decimals, log.notes) == ("main.log", 4, ())
    assert not len(log.of("ms").steps)
    log = read_log(written(tmp_path / "main.log", "s:0 tel:5.000000\ns:0 trl:4.500000\ns:1 trl:4.250000\n"))
    assert (pairs(log.train), pairs(log.val), log.decimals) == ([(0, 4.5), (1, 4.25)], [(0, 5.0)], 6)  # PyTorch's


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_trainers_print(kind: str, tmp_path: Path) -> None:
    """Steps that count from 1 there count from 0 here; a validation belongs to the step that follows it."""
    log = read_log(written(tmp_path / "out.txt", "".join(OUTPUTS[kind])))
    assert log.kind == "output of a trainer"
    assert pairs(log.train) == [(0, 5.25), (1, 5.0)]
    assert pairs(log.val) == [(0, 5.5), (2, 4.75)]
    assert pairs(log.of("ms")) == [(0, 80.25), (1, 40.5)]
    assert pairs(log.of(SPEED)) == [(0, 51000), (1, 52000)]
    assert log.decimals == 6
    assert pairs(log.of(HELLASWAG)) == ([(2, 0.24995)] if kind.endswith("train_gpt2cu") else [])


def test_figures_of_steps_that_trainers_print(tmp_path: Path) -> None:
    """Norm, learning rate and utilization; a negative one stands for an unknown card."""
    log = read_log(written(tmp_path / "out.txt", "".join(OUTPUTS["output of llm.c's train_gpt2cu"])))
    assert (pairs(log.of("norm")), pairs(log.of("lr"))) == ([(0, 9.5), (1, 8.5)], [(0, 1e-4), (1, 1e-4)])
    assert pairs(log.of("mfu")) == [(0, 31.5)]
    log = read_log(written(tmp_path / "main.log", "s:0 trl:4.0 lr:0.000300 norm:1.50\ns:1 trl:3.5\n"))
    assert (pairs(log.of("norm")), pairs(log.of("lr")), len(log.of("mfu").steps)) == ([(0, 1.5)], [(0, 3e-4)], 0)


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        (f"| total batch size      | {524288:<25} |", 524288),
        ("total desired batch size: 4096", 4096),
        ("tokens per iteration will be: 491,520", 491520),
        ("tokens per iteration will be: ,,,", None),
    ],
)
def test_tokens_of_a_step(line: str, tokens: int | None, tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "out.txt", f"{TABLE}{line}\n" + step_line(1, 4.0)))
    assert log.tokens_per_step == tokens


NANOGPT_LINES = """\
tokens per iteration will be: 16,384
found vocab_size = 65 (inside data/shakespeare_char/meta.pkl)
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2664, time 2000.00ms, mfu -100.00%
iter 10: loss 3.2353, time 20.00ms, mfu 18.50%
step 250: train loss 1.9663, val loss 2.0596
saving checkpoint to out-shakespeare-char
iter 250: loss 2.0317, time 4000.00ms, mfu 16.25%
"""


def test_what_nanogpt_prints(tmp_path: Path) -> None:
    """Its evaluations name their step, and have a loss of training data too."""
    log = read_log(written(tmp_path / "out.txt", NANOGPT_LINES))
    assert pairs(log.train) == [(0, 4.2664), (10, 3.2353), (250, 2.0317)]
    assert pairs(log.val) == [(0, 4.2823), (250, 2.0596)]
    assert pairs(log.of(ESTIMATE)) == [(0, 4.2874), (250, 1.9663)]
    assert pairs(log.of("ms")) == [(0, 2000), (10, 20), (250, 4000)]
    assert pairs(log.of("mfu")) == [(10, 18.5), (250, 16.25)]
    assert (log.tokens_per_step, log.decimals, log.notes) == (16384, 4, ())
    assert pairs(log.of(SPEED))[1] == (10, 16384 / 0.02)
    resumed = NANOGPT_LINES + "step 250: train loss 1.8, val loss 1.9\niter 250: loss 1.7, time 30.00ms, mfu nan%\n"
    log = read_log(written(tmp_path / "out.txt", resumed))
    assert (pairs(log.train)[-1], pairs(log.val)[-1], pairs(log.of("ms"))[-1]) == ((250, 1.7), (250, 1.9), (250, 30))


def test_what_the_cpu_trainer_prints(tmp_path: Path) -> None:
    """Its steps count from 0, and its last validation comes before its last step."""
    text = "[GPT-2]\nmax_seq_len: 64\nval loss 5.500000\nstep 0: train loss 5.250000 (took 80.250000 ms)\n"
    text += "val loss 4.750000\ngenerating:\n---\n12 13 \n---\nstep 1: train loss 5.000000 (took 40.500000 ms)\n"
    log = read_log(written(tmp_path / "out.txt", text))
    assert (pairs(log.train), pairs(log.val)) == ([(0, 5.25), (1, 5.0)], [(0, 5.5), (1, 4.75)])
    assert pairs(log.of("ms")) == [(0, 80.25), (1, 40.5)]
    assert not len(log.of(SPEED).steps)


def test_validations_between_steps_that_were_not_printed(tmp_path: Path) -> None:
    """--print-every 20: the start-up table says where they stand; without it, right behind the last line."""
    text = "val loss 5.000000\n" + step_line(1, 4.5) + step_line(20, 4.0) + step_line(40, 3.5) + "val loss 3.250000\n"
    log = read_log(written(tmp_path / "out.txt", text + step_line(60, 3.0)))
    assert pairs(log.val) == [(0, 5.0), (40, 3.25)]
    assert len(log.notes) == 1 and "steps are missing" in log.notes[0]
    table = f"{TABLE}| val_loss_every        | {9:<50} |\n"
    text = table + "val loss 5.0\n" + step_line(1, 4.5) + "val loss 4.9\nval loss 4.8\nHellaSwag: 1/2 = 0.500000\n"
    text += step_line(20, 4.0) + "val loss 4.7\n" + step_line(30, 3.0) + "val loss 4.6\n" + step_line(99, 3.0)
    text += "val loss 4.5\n"
    log = read_log(written(tmp_path / "out.txt", text))
    assert pairs(log.val) == [(0, 5.0), (9, 4.9), (18, 4.8), (27, 4.7), (36, 4.6), (99, 4.5)]
    assert (pairs(log.of(HELLASWAG)), log.notes) == ([(18, 0.5)], ())
    resumed = table + "val loss 4.0\n" + step_line(46, 3.0) + "val loss 3.9\n" + step_line(60, 2.0)
    log = read_log(written(tmp_path / "out.txt", text + resumed))
    assert pairs(log.val)[-3:] == [(45, 4.0), (54, 3.9), (99, 4.5)]


def test_a_run_that_was_resumed_overwrites(tmp_path: Path) -> None:
    text = TABLE + "val loss 5.0\n" + step_line(1, 4.0) + step_line(2, 3.9) + step_line(3, 3.8)
    text += TABLE + "val loss 4.5\n" + step_line(2, 3.5) + step_line(3, 3.4) + "val loss 4.25\n"
    log = read_log(written(tmp_path / "out.txt", text))
    assert pairs(log.train) == [(0, 4.0), (1, 3.5), (2, 3.4)]
    assert pairs(log.val) == [(0, 5.0), (1, 4.5), (3, 4.25)]
    log = read_log(written(tmp_path / "main.log", "s:0 trl:4.0\ns:1 trl:3.0\ns:9 tel:2.0\ns:1 trl:2.5\ns:0 trl:4.5\n"))
    assert pairs(log.train) == [(0, 4.5), (1, 2.5)]


def test_terminal_colours_and_carriage_returns(tmp_path: Path) -> None:
    text = "\x1b[2K━━━ 1/99\r\x1b[0m" + step_line(1, 4.0).replace("\n", "\r\n") + "\x1b[35mval loss 3.5\x1b[0m\n"
    log = read_log(written(tmp_path / "typescript", text))
    assert (pairs(log.train), pairs(log.val)) == ([(0, 4.0)], [(1, 3.5)])


@pytest.mark.parametrize("word", ["nan", "-nan", "inf", "-inf", "NaN", "-nan(ind)", "Infinity"])
def test_losses_that_are_not_finite(word: str, tmp_path: Path) -> None:
    expected = math.nan if "nan" in word.lower() else float(word)
    for text in (f"s:0 trl:{word} lr:0.1 norm:{word}\n", f"step 0: train loss {word} (took 1.5 ms)\n"):
        log = read_log(written(tmp_path / "log", text))
        np.testing.assert_array_equal(log.train.values, [expected])
        assert log.decimals is None


def our_run(folder: Path) -> Path:
    folder.mkdir()
    with RunLog(folder) as log:
        log.event("start", step=0, steps=2, parameters=1)
        log.val(0, loss=5.5, batches=2)
        for step, loss in enumerate([1 / 3, math.nan]):
            log.train(StepFigures(step, loss, norm=1.0, lr=0.1, ms=[80.25, 40.5][step], tokens_per_second=1e3))
        log.sample(2, "s:7 trl:1.0000\nstep    9/9 | loss 2.000000 | 1.00 ms\n", 4)
    return folder


def test_our_run_folder_has_every_digit(tmp_path: Path) -> None:
    folder = our_run(tmp_path / "run")
    for path, kind in ((folder, "run folder of ours"), (folder / "metrics.jsonl", "metrics.jsonl of ours")):
        log = read_log(path)
        assert log.kind == kind and log.path == str(path) and log.decimals is None
        np.testing.assert_array_equal(log.train.values, [1 / 3, math.nan])
        assert (pairs(log.val), pairs(log.of("ms"))) == ([(0, 5.5)], [(0, 80.25), (1, 40.5)])
    (folder / "metrics.jsonl").unlink()
    log = read_log(folder)
    assert log.kind == "main.log" and log.train.values[0] == 0.3333
    (folder / "main.log").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"no metrics.jsonl and no main.log in this folder"):
        read_log(folder)
    with pytest.raises(InputError, match="cannot read it: No such file"):
        read_log(tmp_path / "none")


@pytest.mark.parametrize("name", ["main.log", "metrics.jsonl"])
def test_a_line_that_is_being_written_is_left_out(name: str, tmp_path: Path) -> None:
    """Cut anywhere, what is read are the whole lines: 's:12 trl:3.1' is no loss of 3.1234."""
    data = (our_run(tmp_path / "run") / name).read_bytes()
    whole = read_log(tmp_path / "run" / name)
    for length in range(len(data)):
        path = written(tmp_path / name, data[:length])
        lines = data[:length].count(b"\n")
        try:
            log = read_log(path)
        except FormatError:
            assert lines < 2  # nothing but the start
            continue
        assert pairs(log.val) == pairs(whole.val)[: len(log.val.steps)]
        assert log.train.values.tolist()[:1] == whole.train.values.tolist()[: len(log.train.steps)][:1]
        assert bool(log.notes) == (data[:length][-1:] != b"\n")


BAD = {
    "empty": (b"", "no losses found"),
    "blank": (b"\n\n", "no losses found"),
    "text": (b"once upon a time\n" * 9, "no losses found; expected metrics.jsonl, main.log or"),
    "binary": (b"\x7fELF\x02\0\0\0" * 99, "binary data"),
    "utf-16": (("s:0 trl:1.0\n" * 9).encode("utf-16"), "binary data"),
    "no train": (b'{"event": "start"}\n', "no losses found; expected events"),
    "broken json": (b'{"event": "val", "step": 0, "loss": 1}\n{"event": \n', "line 2 is not an event"),
    "no loss": (b'{"event": "val", "step": 0}\n', "no losses found"),
    "loss a word": (b'{"event": "val", "step": 0, "loss": "big"}\n', "no losses found"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    with pytest.raises(FormatError, match=words) as error:
        read_log(written(tmp_path / "log", data))
    assert str(error.value).startswith(f"{tmp_path}/log") and "\n" not in str(error.value)


def test_lines_without_end_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "AT_ONCE", 1 << 18)
    rubbish = b"x" * (1 << 23)
    text = written(tmp_path / "log", b"s:0 trl:4.0\n" + rubbish + b"\ns:1 trl:3.0\n" + rubbish)
    tracemalloc.start()
    log = read_log(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert pairs(log.train) == [(0, 4.0), (1, 3.0)]
    with pytest.raises(FormatError, match="line 2 is not an event"):
        read_log(written(tmp_path / "log", b'{"event": "start"}\n{' + rubbish + b"}\n"))


def test_the_number_of_batches_in_what_trainers_print(tmp_path: Path) -> None:
    """In a file of several starts each has its own. llm.c's are those of each of its processes."""
    rows = [f"{TABLE}| val_num_batches       | {count:<50} |\n" for count in (20, 5)]
    rows[1] += f"| num_processes         | {8:<50} |\n"
    text = rows[0] + "val loss 5.0\n" + step_line(1, 4.0) + step_line(2, 3.9)
    text += rows[1] + "val loss 4.5\n" + step_line(2, 3.5) + TABLE + "val loss 4.25\n" + step_line(3, 3.4)
    log = read_log(written(tmp_path / "out.txt", text))
    assert pairs(log.val) == [(0, 5.0), (1, 4.5), (2, 4.25)]
    assert pairs(log.of(BATCHES)) == [(0, 20), (1, 40)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated())
def test_any_file_is_read_or_refused(tmp_path: Path, data: bytes) -> None:
    try:
        log = read_log(written(tmp_path / "log", data))
    except FormatError as error:
        assert str(error).startswith(str(tmp_path)) and "\n" not in str(error)
        return
    assert len(log.train.steps) or len(log.val.steps)
    for curve in log.curves.values():
        assert (np.diff(curve.steps) > 0).all() and (curve.steps >= 0).all()

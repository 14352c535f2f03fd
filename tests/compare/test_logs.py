"""Logs of every writer read back, compared by hand-made numbers, and fuzzed.

The lines are made with the format strings that the programs print with, as described in docs/compare.md.
"""

import json
import math
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmc_jax.cli.compare import DIFFERS, main
from llmc_jax.compare import logs
from llmc_jax.errors import FormatError, InputError
from llmc_jax.files import plain
from llmc_jax.logs import reading
from llmc_jax.logs.curves import Curve
from llmc_jax.logs.reading import Log, read_log
from llmc_jax.run.figures import StepFigures
from llmc_jax.run.folder import RunLog

TABLE = "+-----------------------+\n| Parameter             | Value                     |\n+-----------------------+\n"


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def pairs(c: Curve) -> list[tuple[int, float]]:
    return list(zip(c.steps.tolist(), c.values.tolist(), strict=True))


# ----- reading ------------------------------------------------------------------------------------------------------


def c_main_log(train: dict[int, float], val: dict[int, float]) -> str:
    """llm.c's main.log."""
    lines = []
    for step in sorted(set(train) | set(val)):
        lines += [f"s:{step} tel:{val[step]:.4f}\n"] if step in val else []
        lines += [f"s:{step} trl:{train[step]:.4f} lr:{1e-3:.6f} norm:{1.5:.2f}\n"] if step in train else []
    return "".join(lines)


def test_our_accuracy(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.val(2, loss=4.0, batches=3)
        log.accuracy(2, items=8, correct=4, correct_norm=3)
    found = {pairs(read_log(place).hellaswag)[0] for place in (tmp_path, tmp_path / "main.log")}
    assert found == {(2, 0.375)}


def test_main_log(tmp_path: Path) -> None:
    log = read_log(
        written(tmp_path / "main.log", c_main_log({0: 5.5, 1: 5.25}, {0: 5.125, 2: 4.0}) + "s:2 eval:0.2500\n")
    )
    assert pairs(log.train) == [(0, 5.5), (1, 5.25)]
    assert pairs(log.val) == [(0, 5.125), (2, 4.0)]
    assert pairs(log.hellaswag) == [(2, 0.25)]
    assert (log.kind, log.decimals, log.notes) == ("main.log", 4, ())
    assert not len(log.ms.steps)
    log = read_log(written(tmp_path / "main.log", "s:0 tel:5.000000\ns:0 trl:4.500000\ns:1 trl:4.250000\n"))
    assert (pairs(log.train), pairs(log.val), log.decimals) == ([(0, 4.5), (1, 4.25)], [(0, 5.0)], 6)  # PyTorch's


CU_LINES = (
    "step    1/2 | loss 5.250000 (+nanz)| norm 9.5000 (+nanz)| lr 1.00e-04 | 80.25 ms | 31.5% bf16 MFU | 51000 tok/s\n",
    "step    2/2 | loss 5.000000 (-1.50z)| norm 8.5000 (+.50z)| lr 1.00e-04 | 40.50 ms | -9% bf16 MFU | 52000 tok/s\n",
)
OUTPUTS = {
    "output of llm.c's train_gpt2cu": [
        TABLE, "val loss 5.500000\n", CU_LINES[0],
        "                  compute 99.0% | memory: 50.0% | fan:  0% |  100 MHz /  200 MHz\n", CU_LINES[1],
        "evaluating HellaSwag: 0/314\revaluating HellaSwag: 10/314\rHellaSwag: 2510/10042 = 0.249950\n",
        "val loss 4.750000\n", "generating:\n---\nstep into the val loss of time\n---\n",
        "total average iteration time: 40.500000 ms\n",
    ],
    "output of llm.c's train_gpt2fp32cu": [
        TABLE, "val loss 5.500000\n", "step    1/2: train loss 5.250000 (80.250000 ms, 51000 tok/s)\n",
        "step    2/2: train loss 5.000000 (40.500000 ms, 52000 tok/s)\n", "val loss 4.750000\n",
    ],
    "output of llm.c's train_gpt2.py": [
        "Running pytorch 2.4.0\n", "val loss 5.5\n",
        "step    1/2 | train loss 5.250000 | norm 1.0000 | lr 1.00e-04 | (80.25 ms | 51000 tok/s)\n",
        "step    2/2 | train loss 5.000000 | norm 1.0000 | lr 1.00e-04 | (40.50 ms | 52000 tok/s)\n",
        "val loss 4.75\n", "---------------\nonce\n---------------\n", "final 1 iters avg: 40.500ms\n",
    ],
    "output of train.py": [
        TABLE, "val loss 5.500000\n",
        "step    1/2 | loss 5.250000 | norm 9.5000 | lr 1.00e-04 | 80.25 ms | 12.3 GFLOP/s | 51000 tok/s\n",
        "step    2/2 | loss 5.000000 | norm 9.5000 | lr 1.00e-04 | 40.50 ms | 38.0% bf16 MFU | 52000 tok/s | skipped\n",
        "val loss 4.750000\n",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", OUTPUTS)
def test_what_trainers_print(kind: str, tmp_path: Path) -> None:
    """Steps that count from 1 there count from 0 here; a validation belongs to the step that follows it."""
    log = read_log(written(tmp_path / "out.txt", "".join(OUTPUTS[kind])))
    assert log.kind == kind
    assert pairs(log.train) == [(0, 5.25), (1, 5.0)]
    assert pairs(log.val) == [(0, 5.5), (2, 4.75)]
    assert pairs(log.ms) == [(0, 80.25), (1, 40.5)]
    assert pairs(log.speed) == [(0, 51000), (1, 52000)]
    assert log.decimals == 6
    assert pairs(log.hellaswag) == ([(2, 0.24995)] if kind.endswith("train_gpt2cu") else [])
    ours = TABLE + f"| grad_clip             | {1:<50} |\n" + "".join(CU_LINES)  # our z-scores
    assert read_log(written(tmp_path / "ours.txt", ours)).kind == "output of train.py"


def test_what_the_cpu_trainer_prints(tmp_path: Path) -> None:
    """Its steps count from 0, and its last validation comes before its last step."""
    text = "[GPT-2]\nmax_seq_len: 64\nval loss 5.500000\nstep 0: train loss 5.250000 (took 80.250000 ms)\n"
    text += "val loss 4.750000\ngenerating:\n---\n12 13 \n---\nstep 1: train loss 5.000000 (took 40.500000 ms)\n"
    log = read_log(written(tmp_path / "out.txt", text))
    assert log.kind == "output of llm.c's train_gpt2"
    assert (pairs(log.train), pairs(log.val)) == ([(0, 5.25), (1, 5.0)], [(0, 5.5), (1, 4.75)])
    assert pairs(log.ms) == [(0, 80.25), (1, 40.5)]
    assert not len(log.speed.steps)


def step_line(step: int, loss: float) -> str:
    return f"step {step:4d}/99 | loss {loss:7.6f} | norm 1.0000 | lr 1.00e-04 | 40.00 ms | 1.0 GFLOP/s | 100 tok/s\n"


def test_validations_between_steps_that_were_not_printed(tmp_path: Path) -> None:
    """--print-every 20: the start-up table says where they stand; without it, right behind the last line."""
    text = "val loss 5.000000\n" + step_line(1, 4.5) + step_line(20, 4.0) + step_line(40, 3.5) + "val loss 3.250000\n"
    log = read_log(written(tmp_path / "out.txt", text + step_line(60, 3.0)))
    assert pairs(log.val) == [(0, 5.0), (40, 3.25)]
    assert len(log.notes) == 1 and "not every step has a line" in log.notes[0]
    table = f"{TABLE}| val_loss_every        | {9:<50} |\n"
    text = table + "val loss 5.0\n" + step_line(1, 4.5) + "val loss 4.9\nval loss 4.8\nHellaSwag: 1/2 = 0.500000\n"
    text += step_line(20, 4.0) + "val loss 4.7\n" + step_line(30, 3.0) + "val loss 4.6\n" + step_line(99, 3.0)
    text += "val loss 4.5\n"
    log = read_log(written(tmp_path / "out.txt", text))
    assert pairs(log.val) == [(0, 5.0), (9, 4.9), (18, 4.8), (27, 4.7), (36, 4.6), (99, 4.5)]
    assert (pairs(log.hellaswag), log.notes) == ([(18, 0.5)], ())
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
        assert (pairs(log.val), pairs(log.ms)) == ([(0, 5.5)], [(0, 80.25), (1, 40.5)])
    (folder / "metrics.jsonl").unlink()
    log = read_log(folder)
    assert log.kind == "main.log" and log.train.values[0] == 0.3333
    (folder / "main.log").unlink()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"a folder without metrics.jsonl and main.log"):
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
    "empty": (b"", "the file is empty"),
    "blank": (b"\n\n", "no losses in it"),
    "text": (b"once upon a time\n" * 9, "no losses in it; expected metrics.jsonl, main.log or"),
    "a model": ((20240326).to_bytes(4, "little") + bytes(1020), "a GPT-2 checkpoint of llm.c; expected a log"),
    "tokens": ((20240520).to_bytes(4, "little") + bytes(1020), "a file of GPT-2 tokens; expected a log"),
    "binary": (b"\x7fELF\x02\0\0\0" * 99, "binary data"),
    "utf-16": (("s:0 trl:1.0\n" * 9).encode("utf-16"), "binary data"),
    "no train": (b'{"event": "start"}\n', "no losses in it; expected events"),
    "broken json": (b'{"event": "val", "step": 0, "loss": 1}\n{"event": \n', "line 2 is not a JSON object"),
    "deep": (b'{"a":' * 100_000 + b"\n", "line 1 is not a JSON object"),
    "no step": (b'{"event": "train", "loss": 1}\n', "line 1: the step of this 'train' is missing"),
    "step -1": (b'{"event": "train", "loss": 1, "step": -1}\n', "is -1; expected a whole number"),
    "step 1.0": (b'{"event": "train", "loss": 1, "step": 1.0}\n', "is 1.0; expected a whole number"),
    "step 1e400": (b'{"event": "train", "loss": 1, "step": 1%s}\n' % (b"0" * 400), r"is 10+\.\.\.; expected a whole"),
    "no loss": (b'{"event": "val", "step": 0}\n', "loss is missing; expected a number"),
    "loss a word": (b'{"event": "val", "step": 0, "loss": "big"}\n', "loss is 'big'; expected a number"),
    "loss huge": (b'{"event": "val", "step": 0, "loss": 1%s}\n' % (b"0" * 400), "expected a number"),
    "ms a word": (b'{"event": "train", "step": 0, "loss": 1, "ms": "x"}\n', "ms is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log(name: str, tmp_path: Path) -> None:
    data, words = BAD[name]
    with pytest.raises(FormatError, match=words) as error:
        read_log(written(tmp_path / "log", data))
    assert str(error.value).startswith(f"{tmp_path}/log") and "\n" not in str(error.value)


def test_lines_without_end_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 12)
    rubbish = b"x" * (1 << 23)
    text = written(tmp_path / "log", b"s:0 trl:4.0\n" + rubbish + b"\ns:1 trl:3.0\n" + rubbish)
    tracemalloc.start()
    log = read_log(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert pairs(log.train) == [(0, 4.0), (1, 3.0)]
    with pytest.raises(FormatError, match="line 2 has over 4,096 bytes"):
        read_log(written(tmp_path / "log", b'{"event": "start"}\n{' + rubbish + b"}\n"))


def test_a_large_file_of_something_else_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NOTHING_FOUND", 1 << 12)
    data = b"once upon a time\n" * 1000
    with pytest.raises(FormatError, match="no losses in it"):
        read_log(written(tmp_path / "log", data + b"s:0 trl:1.0\n"))
    assert len(read_log(written(tmp_path / "log", b"s:0 trl:1.0\n" + data + b"s:1 trl:1.0\n")).train.steps) == 2


SEEDS = ["".join(lines).encode() for lines in OUTPUTS.values()] + [
    b"s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:1 trl:10.9598 lr:0.000002 norm:15.24\ns:1 eval:0.25\n",
    b"step 0: train loss 4.677779 (took 1987.546000 ms)\nval loss 4.1\n",
    b'{"event": "val", "step": 0, "loss": 5.5}\n{"event": "train", "step": 0, "loss": "nan", "ms": 4.5}\n',
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A log with bytes changed, pieces cut out, doubled and moved, or nothing but rubbish."""
    data = bytearray(draw(st.sampled_from(SEEDS) | st.binary(max_size=200)))
    for _ in range(draw(st.integers(0, 6))):
        if not data:
            break
        start, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 40))
        piece = bytes(data[start : start + length])
        match draw(st.sampled_from(["set", "cut", "double", "insert"])):
            case "set":
                data[start] = draw(st.integers(0, 255))
            case "cut":
                del data[start : start + length]
            case "double":
                data[start:start] = piece * draw(st.integers(1, 3))
            case _:
                words = [b"\n", b"\0", b"9" * 5000, b"-", b"nan", b"1e999", b"{", b'"', b"\xff\xfe", b"/", b"s:1 tel:"]
                data[start:start] = draw(st.sampled_from(words))
    return bytes(data)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated(), mutated())
def test_any_file_is_read_or_refused_and_what_is_read_can_be_compared(tmp_path: Path, a: bytes, b: bytes) -> None:
    found = []
    for name, data in (("a", a), ("b", b)):
        try:
            found.append(read_log(written(tmp_path / name, data)))
        except FormatError as error:
            assert str(error).startswith(str(tmp_path)) and "\n" not in str(error)
    for log in found:
        assert len(log.train.steps) or len(log.val.steps)
        for curve in (log.train, log.val, log.ms, log.speed):
            assert (np.diff(curve.steps) > 0).all() and (curve.steps >= 0).all()
    if len(found) == 2:
        differences = logs.differences(found)
        assert logs.as_text(found, differences, 5)
        json.dumps(plain(logs.as_json(found, differences, 5)), allow_nan=False)


# ----- comparing ----------------------------------------------------------------------------------------------------


def curve(values: Any, steps: Any = None) -> Curve:
    values = np.asarray(values, np.float64)
    return Curve(np.arange(len(values)) if steps is None else np.asarray(steps, np.int64), values)


def log_of(train: Any = (), val: Curve | None = None, decimals: int | None = None, ms: Any = ()) -> Log:
    none = curve([])
    return Log("log", "made up", curve(train), val or none, curve(ms), none, none, decimals)


def one_difference(a: Any, b: Any, tolerance: float = 0.01, window: int = 1, **more: Any) -> logs.Difference:
    return logs.differences([log_of(a, **more), log_of(b, **more)], tolerance, window)[0]


def test_differences_by_hand() -> None:
    a, b = Curve(np.array([0, 1, 3, 5]), np.array([4.0, 3.0, 2.0, 1.0])), curve([9.0, 3.5, 8.0, 1.0])
    found = logs.difference(a, b)
    assert pairs(found) == [(0, 5.0), (1, 0.5), (3, -1.0)]
    each = one_difference([4, 3, 2, 1], [4, 3.5, 2, 0.25])
    assert each.largest == (0.75, 3)
    assert each.mean == (0.5 + 0.75) / 4
    assert (each.first_beyond, each.parts) == (1, 1)


def test_values_that_are_not_finite_differ_only_from_others() -> None:
    a = [math.nan, math.inf, -math.inf, 1.0, math.inf, math.nan]
    b = [math.nan, math.inf, math.inf, math.nan, 1.0, math.inf]
    assert logs.difference(curve(a), curve(b)).values.tolist() == [0, 0, math.inf, math.inf, math.inf, math.inf]
    each = one_difference(a, b)
    assert each.largest == (math.inf, 2) and each.mean == 0 and each.parts == 2
    each = one_difference([1.0] * 9, [1.0] * 4 + [math.nan] + [1.0] * 4, window=3)
    assert each.averaged.tolist() == [0, 0, 0, 0, math.inf, 0, 0, 0, 0]
    assert each.parts is None and "they do not part" in logs.verdict(each)


def brute_parts(each: logs.Difference) -> int | None:
    """Where they part, word by word from the definition."""
    count = len(each.steps)
    for index in range(count):
        rest = [abs(value) > each.tolerance for value in each.averaged[index:]]
        if rest[0] and 2 * sum(rest) > len(rest) and 10 * len(rest) >= count:
            return int(each.steps[index])
    return None


def brute_average(values: list[float], window: int) -> list[float]:
    half, out = window // 2, []
    for index, value in enumerate(values):
        near = [v for v in values[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if math.isfinite(value) else math.inf)
    return out


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.005, 0.02, -0.02, 0.5, math.nan]), min_size=1, max_size=40), st.integers(1, 9)
)  # fmt: skip
def test_averages_and_partings_by_the_definition(values: list[float], window: int) -> None:
    each = one_difference([0.0] * len(values), values, window=window)
    np.testing.assert_allclose(each.averaged, brute_average(values, window), atol=1e-15)
    assert each.parts == brute_parts(each)
    beyond = [step for step, value in enumerate(each.averaged) if abs(value) > each.tolerance]
    assert each.first_beyond == (beyond[0] if beyond else None)


def test_where_noisy_logs_part() -> None:
    """Noise alone does not part them; a shift does, where it begins, give or take half a window."""
    noise = np.random.default_rng(0).normal(0, 0.05, (2, 5000))
    falling = 3 + np.exp(-np.arange(5000) / 500)
    each = one_difference(falling + noise[0], falling + noise[1], tolerance=0.05, window=100)
    assert each.parts is None and each.largest[0] > 0.1
    assert logs.verdict(each).startswith(
        "B beside A, training: together: the difference, averaged over 101 steps, is within"
    )
    shifted = falling + noise[1] - 0.2 * (np.arange(5000) >= 3000)
    each = one_difference(falling + noise[0], shifted, tolerance=0.05, window=100)
    assert each.parts is not None and abs(each.parts - 3000) <= 50
    assert f"they part at step {each.parts}: from there to step 4999" in logs.verdict(each)


@pytest.mark.parametrize(
    ("a", "b", "decimals", "facts"),
    [
        ([], [], None, ["no step in common"]),
        ([1, 2], [1, 2], None, ["equal", "all 2 common steps"]),
        ([1], [1], None, ["equal", "step 0"]),
        ([1.00004, 2], [1.0, 2], 4, ["equal", "to the digits"]),
        ([1.0002, 2], [1.0, 2], 4, ["together", "within 0.01", "0.0002, at step 0"]),
        ([1, 2], [1, 3], None, ["part at step 1", "larger than 0.01 at 1 of 1 steps", "1, at step 1"]),
    ],
)
def test_verdicts(a: list[float], b: list[float], decimals: int | None, facts: list[str]) -> None:
    words = logs.verdict(one_difference(a, b, decimals=decimals))
    assert words.startswith("B beside A, training: ") and all(fact in words for fact in facts)


def test_validations_over_another_number_of_batches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where both logs say how many; one that does not say it is compared as ever."""
    for name, batches, loss in (("a", 5, 4.0), ("b", 20, 4.5)):
        (tmp_path / name).mkdir()
        with RunLog(tmp_path / name) as log:
            for step in (0, 2):
                log.val(step, loss=loss, batches=batches)
            log.val(3, loss=loss, batches=7)
            for step in range(3):
                log.train(StepFigures(step, loss=3.0, norm=1.0, lr=0.1, ms=1.0, tokens_per_second=1e3))
    assert main(["logs", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == DIFFERS  # by step 3
    _, val = json.loads(capsys.readouterr().out)["differences"]
    assert (val["steps"], val["parts"]) == ([3], 3)
    assert val["not_compared"] == [{"step": step, "first": 5, "other": 20} for step in (0, 2)]
    a, b = (read_log(tmp_path / name) for name in "ab")
    (row, _, _) = logs.steps_table([a, b], [0, 2, 3]).splitlines()[2:]
    assert row.split() == ["0", "3.000000", "3.000000", "0", "4.000000", "4.500000"]
    silent = read_log(tmp_path / "b" / "main.log")
    assert not len(silent.batches.steps) and logs.differences([a, silent])[1].steps.tolist() == [0, 2, 3]
    a, b = (log._replace(val=Curve(log.val.steps[:2], log.val.values[:2])) for log in (a, b))
    found = logs.differences([a, b])
    assert not any(each.parts for each in found) and not len(found[1].steps)
    assert logs.verdict(found[1], "v").startswith("v: 2 common steps are not compared")


def test_the_number_of_batches_in_what_trainers_print(tmp_path: Path) -> None:
    """In a file of several starts each has its own."""
    rows = [f"{TABLE}| val_num_batches       | {count:<50} |\n" for count in (20, 5)]
    text = rows[0] + "val loss 5.0\n" + step_line(1, 4.0) + step_line(2, 3.9)
    text += rows[1] + "val loss 4.5\n" + step_line(2, 3.5) + TABLE + "val loss 4.25\n" + step_line(3, 3.4)
    log = read_log(written(tmp_path / "out.txt", text))
    assert pairs(log.val) == [(0, 5.0), (1, 4.5), (2, 4.25)]
    assert pairs(log.batches) == [(0, 20), (1, 5)]


def test_speed_leaves_the_first_step_out() -> None:
    log = log_of([1, 1, 1, 1], ms=[9000, 10, 30, math.nan])
    assert (logs.median(log.ms), logs.steps_per_second(log)) == (20, 50)
    assert logs.median(log_of([1]).ms) is None
    assert logs.median(log_of([1], ms=[5]).ms) == 5


def test_rows_are_steps_with_validations_of_all() -> None:
    a = log_of([1] * 100, curve([1] * 6, [0, 20, 40, 60, 80, 100]))
    b = log_of([1] * 100, curve([1] * 4, [0, 40, 80, 100]))
    assert logs.chosen_steps([a, b], 12) == [0, 40, 80, 100]
    assert logs.chosen_steps([a, b], 2) == [0, 100]
    assert logs.chosen_steps([a, log_of([1] * 5)], 9) == [0, 20, 40, 60, 80, 100]
    assert logs.chosen_steps([log_of([1] * 5), log_of([1] * 3)], 2) == [0, 2]


# ----- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """A run of 200 steps and another that leaves it at step 100."""
    train = {step: 3 + 1 / (1 + step) for step in range(200)}
    left = {step: loss + 0.001 * max(0, step - 99) for step, loss in train.items()}
    a = written(tmp_path / "a.log", c_main_log(train, {0: 4.5, 100: 3.25, 200: 3.125}))
    b = written(tmp_path / "b.log", c_main_log(left, {0: 4.5, 100: 3.25, 200: 3.375}))
    return [str(a), str(b)]


def test_the_command_prints_and_draws(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, result = tmp_path / "p.png", tmp_path / "r.json"
    words = ["logs", *two, "--window", "1", "--picture", str(picture), "--json", str(result)]
    assert main(words) == DIFFERS
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120 + len(two[0])
    row = next(line for line in text.splitlines() if line.startswith(" 100"))
    assert row.split() == ["100", "3.0099", "3.0109", "+0.001", "3.2500", "3.2500", "0"]
    assert "B beside A, training: they part at step 110: from there to step 199" in text
    assert "B beside A, validation: they part at step 200" in text
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found = json.loads(result.read_text())
    assert found["comparison"] == "logs" and [each["path"] for each in found["logs"]] == two
    train, val = found["differences"]
    assert (train["parts"], train["largest_at"], val["parts"]) == (110, 199, 200)
    np.testing.assert_allclose(train["values"][110], 0.011, atol=1e-4)
    assert found["table"][1] == {"step": 100, "train": [3.0099, 3.0109], "val": [3.25, 3.25]}
    assert main(["logs", two[0], two[0], "--json"]) == 0  # alone, on the screen
    assert json.loads(capsys.readouterr().out)["differences"][0]["curve"] == "training"


REFUSED = {
    "one log": (["A"], "1 log given; two to 26"),
    "window": (["A", "B", "--window", "-1"], "--window -1: must be"),
    "rows": (["A", "B", "--rows", "0"], "--rows 0: must be at least 1"),
    "picture": (["A", "B", "--picture", "a.jpg"], r"must end in \.png"),
    "json": (["--json", "A", "B", "B"], r"must end in \.json"),
    "folder": (["A", "B", "--json", "nowhere/a.json"], "there is no folder nowhere"),
    "missing": (["A", "nothing.log"], "nothing.log: cannot read it: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_command_refuses(name: str, two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = REFUSED[name]
    before = Path(two[0]).read_bytes()
    assert main(["logs", *({"A": two[0], "B": two[1]}.get(word, word) for word in words)]) == 2
    output = capsys.readouterr()
    assert not output.out
    line = output.err
    assert line.startswith("python -m llmc_jax.compare logs: ") and line.count("\n") == 1
    assert re.search(expected, line), line
    assert Path(two[0]).read_bytes() == before


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "x"])
def test_bad_tolerances(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["logs", "a", "b", f"--tolerance={value}"])
    assert caught.value.code == 2 and "must be a number, at least 0" in capsys.readouterr().err


def test_pictures_of_anything(tmp_path: Path) -> None:
    """Nothing finite, nothing in common, one point, odd names."""
    from llmc_jax.compare.picture import draw_logs

    cases = [
        [log_of([math.nan]), log_of([math.inf])],
        [log_of([1.0]), log_of([], curve([2.0], [7]))],
        [log_of([0.0, -1.0]), log_of([5.0, 1e30])],
        [log_of(np.ones(3000)), log_of(np.full(3000, 1 + 1e-7)), log_of([math.nan] * 9)],
    ]
    for number, case in enumerate(cases):
        named = [log._replace(path="$x^{$_" * 20) for log in case]
        draw_logs(named, logs.differences(named), tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 1000


def test_no_two_of_26_logs_look_alike() -> None:
    from llmc_jax.compare.picture import look_of

    looks = [look_of(index) for index in range(1, 26)]  # the first is wide and light
    assert len({(look.color, str(look.style)) for look in looks}) == 25
    assert len({(look.color, look.mark) for look in looks}) == 25


def test_the_picture_says_how_many_differences_it_does_not_show() -> None:
    from llmc_jax.compare.picture import outside_words

    each = one_difference([3.0] * 40, [3.0] * 36 + [4.0, 9.0, 3.0, math.nan])
    assert outside_words(each, -10, 10) == "B, training: of 40 single differences 1 infinite"
    assert outside_words(each, -0.5, 0.5) == "B, training: of 40 single differences 2 beyond the edge, 1 infinite"
    finite = one_difference([3.0] * 40, [3.0] * 36 + [4.0, 9.0, 3.0, 3.0])
    assert outside_words(finite, -0.5, 2) == (
        "B, training: of 40 single differences 1 beyond the edge (largest 6 at step 37)"
    )
    assert outside_words(finite, -10, 10) == ""


def test_names_without_what_they_share() -> None:
    from llmc_jax.compare.picture import short_names

    assert short_names(["/a/b/x.log", "/a/b/y.log"]) == ["x.log", "y.log"]
    assert short_names(["a/run1/main.log", "a/run2/main.log"]) == ["run1/main.log", "run2/main.log"]
    assert short_names(["/a/x", "y"]) == ["/a/x", "y"]
    assert short_names(["x", "$y\n"]) == ["x", "?y?"]


def test_logs_of_real_runs(shared: Path) -> None:
    small, large = (read_log(shared / "data" / name) for name in ("llmc_124M_8xH100_main.log", "llmc_350M_main.log"))
    assert (len(small.train.steps), len(small.val.steps), len(large.val.steps)) == (19560, 80, 241)
    assert logs.at_step(small.val, 19560) == 3.2722 and logs.at_step(large.val, 60000) == 2.9282
    found = logs.differences([small, large])
    assert not len(found[0].steps) and len(found[1].steps) == 79
    assert found[1].largest == (pytest.approx(5.5887 - 5.3743, abs=1e-9), 500)

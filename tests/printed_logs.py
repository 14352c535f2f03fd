"""Logs as their writers print them, for the tests that read and compare them.

The lines are made with the format strings that the programs print with, as described in docs/compare.md.
"""

from pathlib import Path

from hypothesis import strategies as st

from llmc_jax.logs.curves import Curve

TABLE = "+-----------------------+\n| Parameter             | Value                     |\n+-----------------------+\n"


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def pairs(c: Curve) -> list[tuple[int, float]]:
    return list(zip(c.steps.tolist(), c.values.tolist(), strict=True))


def c_main_log(train: dict[int, float], val: dict[int, float]) -> str:
    """llm.c's main.log."""
    lines = []
    for step in sorted(set(train) | set(val)):
        lines += [f"s:{step} tel:{val[step]:.4f}\n"] if step in val else []
        lines += [f"s:{step} trl:{train[step]:.4f} lr:{1e-3:.6f} norm:{1.5:.2f}\n"] if step in train else []
    return "".join(lines)


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


def step_line(step: int, loss: float) -> str:
    return f"step {step:4d}/99 | loss {loss:7.6f} | norm 1.0000 | lr 1.00e-04 | 40.00 ms | 1.0 GFLOP/s | 100 tok/s\n"


SEEDS = ["".join(lines).encode() for lines in OUTPUTS.values()] + [
    b"s:0 tel:11.0092\ns:0 trl:11.0091 lr:0.000001 norm:15.37\ns:1 trl:10.9598 lr:0.000002 norm:15.24\ns:1 eval:0.25\n",
    b"step 0: train loss 4.677779 (took 1987.546000 ms)\nval loss 4.1\n",
    b"tokens per iteration will be: 4096\nstep 0: train loss 4.2, val loss 4.3\niter 0: loss 4.1, time 9.5ms, mfu 1%\n",
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

"""Makes tests/profile/data: the trace of a few steps of a tiny model on a CPU, and its program's text.

    python tests/profile/make_trace.py

Of the trace only what llmc_jax.profile reads is kept: the threads of XLA and the steps' marks. The figures in
test_trace.py that name instructions belong to the committed files.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).resolve().parent / "data"
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from llmc_jax.profile.trace import newest_trace  # noqa: E402
from llmc_jax.run.record import recorded_step, start_recording  # noqa: E402


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product and a function of each element, in the model's scopes."""
    with jax.named_scope("fc"):
        x = jax.lax.optimization_barrier(x @ w)
    with jax.named_scope("gelu"):
        return jax.lax.optimization_barrier(jax.nn.gelu(x))


@jax.jit
def tiny(x: jax.Array, w: jax.Array) -> jax.Array:
    """Two layers and a sum of squares, which stands for the norm."""
    with jax.named_scope("forward"):
        for index in range(2):
            with jax.named_scope(f"layer_{index:02d}"):
                x = layer(x, w)
    with jax.named_scope("update"), jax.named_scope("norm"):
        return jnp.sum(x * x)


def main() -> None:
    x, w = jnp.ones((512, 512)), jnp.full((512, 512), 1e-3)
    compiled = tiny.lower(x, w).compile()
    compiled(x, w).block_until_ready()
    with tempfile.TemporaryDirectory() as folder:
        start_recording(Path(folder))
        for number in range(2):
            with recorded_step(number):
                compiled(x, w).block_until_ready()
        jax.profiler.stop_trace()
        content = newest_trace(Path(folder)).read_bytes()
    content = content.replace(str(ROOT).encode(), b"." * len(str(ROOT)))  # of the same length, which the format counts
    DATA.mkdir(exist_ok=True)
    (DATA / "tiny.xplane.pb").write_bytes(content)
    head, _, rest = compiled.as_text().partition("\n")
    text = head + "\n\n" + re.sub(r" ?stack_frame_id=\d+", "", rest[rest.index("%region") :])  # without files and lines
    (DATA / "tiny.hlo.txt").write_text(text)
    print(f"{len(content)} bytes of trace, {len(text)} of program")


if __name__ == "__main__":
    main()

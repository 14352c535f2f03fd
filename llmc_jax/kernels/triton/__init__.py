"""Some operations once more as Triton kernels, called through jax-triton: the extra `[triton]`.

Layernorm, causal softmax and the classifier, with the names and signatures of pallas_kernels. Importing this package
imports neither triton nor jax-triton; its modules (layernorm, softmax, classifier) import triton, and a call without
`interpret` imports jax-triton. Leaves out attention and the rest, and AMD's GPUs.
"""

import re

from llmc_jax.machine.device import installed

# The versions of the extra in pyproject.toml, from and below. jax-triton before 0.4.1 needs a GPU to lower, and 0.4.1 a
# class that Triton 3.6 lacks. Its rule for dead code takes two arguments, where jax 0.12 gives three.
NEEDED = {"jax-triton": ((0, 4, 1), (0, 5)), "triton": ((3, 7), (3, 10)), "jax": ((0, 11, 2), (0, 12))}
INSTALL = 'python -m pip install -e ".[cuda13,triton]" (or cuda12) in the repository'


def availability() -> str | None:
    """Return why these kernels cannot be used here, in one line with what to do; None if the packages fit together.

    Reads the versions that are installed and imports none of them. Whether there is an NVIDIA GPU it does not ask.
    """
    found = installed(*NEEDED)
    numbers = {name: tuple(map(int, re.findall(r"\d+", text)[:3])) for name, text in found.items()}
    wrong = [
        f"{name} {found.get(name, 'not installed')}"
        for name, (least, below) in NEEDED.items()
        if not least <= numbers.get(name, ()) < below
    ]
    return f"{', '.join(wrong)}: run {INSTALL}" if wrong else None

"""The example in docs/profiling.md, measured again.

    python benchmarks/profile_page.py [flags of the profiler; without any: -e d12 -b 4 -t 64]

Writes in docs/profiling.md what stands between the two marks. Let nothing else run meanwhile.
"""

import json
import platform
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/profiling.md"
BEGIN, END = "<!-- made by benchmarks/profile_page.py -->\n", "<!-- until here -->\n"
FLAGS = ["-e", "d12", "-b", "4", "-t", "64"]


def with_block(page: str, block: str) -> str:
    """Return the page with another text between the marks. Raises ValueError if they are not there once each."""
    (before, _), (_, after) = page.split(BEGIN), page.split(END)
    return f"{before}{BEGIN}{block}{END}{after}"


def block_of(table: str, facts: dict[str, Any], flags: list[str]) -> str:
    """Return the text between the marks: command, machine and versions, and the profiler's table."""
    device, step = facts["device"], facts["seconds"]
    words = (
        f"`llmc-jax profile {shlex.join(flags)}` on {device['kind']} with {device['cpu_cores']} cores, "
        f"Python {platform.python_version()}, JAX {facts['jax']}. The step without a trace took "
        f"{1e3 * step['median']:.0f} ms (quartiles {1e3 * step['low']:.0f} and {1e3 * step['high']:.0f})."
    )
    indented = "\n".join(f"    {line}".rstrip() for line in table.splitlines())
    return f"\n{textwrap.fill(words, 118, break_on_hyphens=False)}\n\n{indented}\n\n"


def main() -> None:
    flags = sys.argv[1:] or FLAGS
    if "--help" in flags:
        print(__doc__)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "llmc_jax", "profile", *flags, "--json", str(out)]
        said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        facts = json.loads(out.read_text())
    lines = said.splitlines()
    first = max(index for index, line in enumerate(lines) if line.startswith("+-")) + 1  # behind the box
    PAGE.write_text(with_block(PAGE.read_text(), block_of("\n".join(lines[first:]), facts, flags)))
    print(said)


if __name__ == "__main__":
    main()

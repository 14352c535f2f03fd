"""The examples in docs/plan.md: what the plan's command prints, made again.

    python benchmarks/plan_page.py

In the page stands behind each `<!-- printed by: WORDS -->` what `llmc-jax plan WORDS` prints, up to the next
`<!-- until here -->`. Most are computed, and the same everywhere; what is
compiled needs `make plan-tools`. tests/plan/test_page.py compares what is computed.
"""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/plan.md"
BLOCK = re.compile(r"(<!-- printed by: (.*?) -->\n)(.*?)(<!-- until here -->\n)", re.DOTALL)


def indented(printed: str) -> str:
    """Return what was printed as an indented block."""
    return f"\n{textwrap.indent(printed.rstrip(), '    ')}\n\n"


def blocks(page: str) -> dict[str, str]:
    """Return the blocks of a page by the words that print them."""
    return {match[2]: match[3] for match in BLOCK.finditer(page)}


def printed(words: str) -> str:
    """Return what the command prints."""
    command = [sys.executable, "-m", "llmc_jax.plan", *shlex.split(words)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + indented(printed(match[2])) + match[4], page))


if __name__ == "__main__":
    main()

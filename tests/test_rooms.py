"""The package's folders, its rooms, stand in an order, and imports point to earlier rooms alone.

docs/architecture.md says what each room is for, in this order.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import house

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "llmc_jax"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ORDER = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", ARCHITECTURE, re.MULTILINE)
WITHOUT_JAX = ("base", "config", "logs", "trackers", "cluster", "data", "checkpoint", "report", "watch")
AND = (
    "compare/command.py", "compare/logs.py", "evaluate/command.py",
    "generate/command.py", "generate/flags.py", "machine/device.py", "machine/jax_setup.py", "models/command.py",
    "plan/command.py", "profile/command.py", "run/command.py", "run/beside.py",
    "run/console.py", "run/folder.py", "run/trackers.py", "trials/command.py",
)  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    """The package's files but the entrances, which only call the command line."""
    entrances = {PACKAGE / "__init__.py", *PACKAGE.rglob("__main__.py")}
    return sorted(set(PACKAGE.rglob("*.py")) - entrances)


def imported(path: Path) -> Iterator[str]:
    """The rooms that a file imports from, in functions too."""
    names = (name.split(".") for name in house.imported(ROOT, path))
    yield from (parts[1] for parts in names if parts[0] == PACKAGE.name and len(parts) > 1)


def test_imports_point_to_earlier_rooms() -> None:
    against = {
        (path.relative_to(PACKAGE).as_posix(), room)
        for path in files()
        for room in imported(path)
        if ORDER.index(room) > ORDER.index(room_of(path))
    }
    assert against == set()


def test_the_architecture_names_every_room_once() -> None:
    assert sorted({room_of(path) for path in files()}) == sorted(ORDER)


def test_what_needs_no_jax_does_not_bring_it_in() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in files() if room_of(path) in WITHOUT_JAX}
    modules = [f"llmc_jax.{name.removesuffix('.py').replace('/', '.')}" for name in names | {*AND}]
    late = ("jax", "matplotlib", "tiktoken", "tensorboardX", "wandb", "mlflow", "tornado")
    code = f"import sys, {', '.join(modules)}; sys.exit(any(name in sys.modules for name in {late}))"
    subprocess.run([sys.executable, "-c", code.replace(".__init__", "")], cwd=ROOT, check=True)

"""Counts what a reader has to carry: lines, rooms, arrows between them. `--commit C` counts another commit's files.

A room is a folder or a file at the top of the package or of the checkout, tests apart, that holds Python. An arrow is a
pair of rooms of which the first imports from the second, in functions too. It points upward where the second stands
behind the first in the table of docs/architecture.md; rooms outside that table have no height.
"""

import argparse
import ast
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("llmc_jax", "pallas_kernels", "train.py", "convert_checkpoint.py")
PREPARE = "llmc_jax/run/prepare.py"


def python_files(root: Path, *tops: str) -> list[Path]:
    """Return the Python files of some of a checkout's folders and files."""
    return [file for top in tops for file in ([root / top] if ".py" in top else sorted((root / top).rglob("*.py")))]


def room_of(root: Path, file: Path) -> str:
    """Return the room that a file belongs to."""
    first, *rest = file.relative_to(root).parts
    return (rest[0] if first == "llmc_jax" else first).removesuffix(".py")


def imported(root: Path, file: Path) -> Iterator[str]:
    """Yield the modules of the checkout that a file imports, or imports a name from."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            while parts and not (place := root.joinpath(*parts)).with_suffix(".py").exists() and not place.is_dir():
                parts.pop()
            if parts and parts[0] not in ("tests", "benchmarks"):
                yield ".".join(parts)


def arrows_of(root: Path, rooms: dict[Path, str]) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports from the second."""
    found = set()
    for file, room in rooms.items():
        for name in imported(root, file):
            first, *rest = name.split(".")
            other = (rest[0] if rest else "__init__") if first == "llmc_jax" else first
            found |= {(room, other)} if other != room else set()
    return found


def counted(root: Path) -> list[tuple[str, int]]:
    """Return what is counted of a checkout, in words, and how many there are."""
    rooms = {file: room_of(root, file) for file in python_files(root, *PROGRAMS, "benchmarks")}
    arrows = arrows_of(root, rooms)
    table = (root / "docs/architecture.md").read_text(encoding="utf-8")
    height = {name: place for place, name in enumerate(re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE))}
    upward = [(a, b) for a, b in arrows if a in height and b in height and height[a] < height[b]]
    modules = {name for name in imported(root, root / PREPARE) if name.startswith("llmc_jax.")}
    return [
        ("lines of the package", lines(python_files(root, *PROGRAMS))),
        ("lines of the tests", lines(python_files(root, "tests"))),
        ("rooms", len(set(rooms.values()))),
        ("arrows between rooms", len(arrows)),
        ("of them upward", len(upward)),
        (f"modules that {PREPARE} imports from", len(modules)),
        ("rooms that it imports from", len({name.split(".")[1] for name in modules})),
    ]


def lines(files: list[Path]) -> int:
    """Return how many lines some files have together."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    """Print what is counted, a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", help="count its files, not those of the working tree")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as folder:
        if commit:
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for what, number in counted(Path(folder) if commit else ROOT):
            print(f"{what:52}{number:8,}")


if __name__ == "__main__":
    main()

"""Counts what a reader has to carry: lines, rooms, arrows between them. `--commit C` counts another commit's files.

`--save` prints instead how deep the package's own functions call each other while a checkpoint is saved: on the main
thread or on the saver's, and of those that read and write in parallel each by itself.

A room is a folder or a file at the top of the package or of the checkout, tests apart, that holds Python. An arrow is a
pair of rooms of which the first imports from the second, in functions too. It points upward where the second stands
behind the first in the table of docs/architecture.md; rooms outside that table have no height.
"""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

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


def save_deeply() -> list[str]:
    """Save a small training state; return the deepest of the calls, from the outermost in."""
    sys.path.insert(0, str(ROOT))
    import jax.numpy as jnp

    from llmc_jax.checkpoint.contents import Identity, Metadata
    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.models.gpt2.tensors import flat_size
    from llmc_jax.run.saver import Saver
    from llmc_jax.training.state import initial_state

    deepest: list[str] = []

    def look(frame: FrameType | None, *_: Any) -> None:
        calls = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(str(ROOT / "llmc_jax")):
                calls.append(frame.f_code.co_qualname)
            frame = frame.f_back
        if len(calls) > len(deepest):
            deepest[:] = calls[::-1]

    model = parse_descriptor("L6-NH4-C128-V257-T64")  # whose buffers are worth several threads
    state = initial_state(jnp.zeros(flat_size(model)), jnp.float32, master_weights=True)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), model, 0, 0)
        threading.setprofile(look)
        sys.setprofile(look)
        saver.save(state, Metadata(1, Identity(model, "fp32", True)), 1 << 30, None, last=True)
        (saved,) = saver.wait()
        sys.setprofile(None)
        threading.setprofile(None)
    assert saved.problem is None, saved
    return deepest


def main() -> None:
    """Print what is counted, a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", help="count its files, not those of the working tree")
    parser.add_argument("--save", action="store_true", help="the deepest calls of a save")
    commit, save = (options := parser.parse_args()).commit, options.save
    if save:
        deepest = save_deeply()
        print(f"{len(deepest)} frames: {' > '.join(deepest)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        if commit:
            archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for what, number in counted(Path(folder) if commit else ROOT):
            print(f"{what:52}{number:8,}")


if __name__ == "__main__":
    main()

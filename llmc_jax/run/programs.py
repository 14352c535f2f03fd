"""The programs that a run compiles: kept in its own folder, so that it resumes with the same, and for runs alike.

On a GPU, XLA times several ways of a product and takes the fastest: compiled again it may choose another, and the bits
of a result would change. So a run keeps what it compiled, its products' algorithms and the lowered step among that, and
seals it with each checkpoint. A new run that is alike in all that its programs depend on begins with a copy, and
compiles nothing. Leaves out what a program is compiled from (training/step.py) and with (machine/compiling.py).
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import export

from llmc_jax.base.files import digest_of_files, sync, write_bytes
from llmc_jax.base.plain import to_json
from llmc_jax.config.model import ModelShape
from llmc_jax.kernels import record
from llmc_jax.machine.device import environment as variables
from llmc_jax.machine.driver import driver_version
from llmc_jax.models.family import shape_to_json
from llmc_jax.plan.plan import Plan
from llmc_jax.training.step import Metrics, StepOptions, train_step
from llmc_jax.trials.known import run_programs

SEAL = "PROGRAMS.json"  # the digest of every file
FOLDER = "xla_cache"  # in a run's folder
STEP = ".step"  # what the name of a lowered step ends with, after its combination
MOST = 32  # combinations that are kept for new runs: the latest used
PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("llmc_jax", "pallas_kernels")]


class Programs(NamedTuple):
    """Where a run keeps its programs."""

    own: Path | None = None  # in the run's folder; None: nowhere
    shared: Path | None = None  # for runs alike; None: the user has named a folder for all programs
    complete: bool = True  # all that an earlier start of the run sealed are there
    seals: bool = True  # this process does: of several the first one

    @property
    def step(self) -> Path | None:
        """Return the file of the lowered step; None where it is not kept."""
        return self.own / f"{self.shared.name}{STEP}" if self.own and self.shared else None

    def seal(self) -> None:
        """Bring the programs and their digests to the disk, and a copy to where new runs look. Raises OSError."""
        if self.own is None or self.shared is None or not self.seals:
            return
        digests = _digests(self.own)
        for name in digests:
            sync(self.own / name)
        write_bytes(self.own / SEAL, json.dumps(digests, indent=1).encode())
        # A run that resumed with another driver, say, has older programs beside those of its new combination.
        if {name for name in digests if name.endswith(STEP)} == {f"{self.shared.name}{STEP}"}:
            with suppress(OSError):  # runs alike compile again
                _share(self.own, self.shared, digests)


def are_kept(platform: str) -> bool:
    """Return whether a run keeps its programs. A CPU's have the same bits whenever they are compiled."""
    return platform != "cpu"


def keep(own: Path, shared: Path) -> Programs:
    """Keep what is compiled from now on in a run's own folder, and find there what was; in a new one, by runs alike.

    A folder that the user has named in the environment stays. Files that are not as `seal` left them are deleted: JAX
    would trip over a torn one at every start, and never write it anew.
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Programs()
    was_there = own.exists()
    own.mkdir(exist_ok=True)
    if not was_there:
        with suppress(OSError):  # there are none: they are compiled
            _copy(shared, own, _undamaged(shared, _digests(shared)))
            os.utime(shared)
    found = _digests(own)
    undamaged = _undamaged(own, found)
    for name in found.keys() - undamaged:
        (own / name).unlink()
    take(own)
    return Programs(own, shared, was_there and _sealed(own).keys() <= undamaged)


def take(own: Path) -> None:
    """Keep what is compiled from now on in a folder, unless the user has named another in the environment."""
    from jax.experimental.compilation_cache import compilation_cache

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", str(own))


def _sealed(folder: Path) -> dict[str, str]:
    """Return the digests that a folder was sealed with; none for a list that is damaged."""
    try:
        known = json.loads((folder / SEAL).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _digests(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SEAL]
    paths = [path for path in paths if not path.name.endswith("-atime")]  # when one was last used
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _undamaged(folder: Path, digests: Mapping[str, str]) -> set[str]:
    """Return the files of a folder that are as it was sealed with. digests: of those that are there."""
    known = _sealed(folder)
    return {name for name, digest in digests.items() if known.get(name) == digest}


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files of a folder and then its seal into another, with the modes of new files."""
    for name in [*sorted(names), SEAL]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _share(own: Path, shared: Path, digests: dict[str, str]) -> None:
    """Put a copy where new runs look, unless all is there undamaged; delete those unused longest, beyond MOST."""
    there = _digests(shared)
    if there == _sealed(shared) and digests.keys() <= there.keys():
        return
    shared.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=shared.parent) as place:
        copy, old = Path(place, "new"), Path(place, "old")
        _copy(own, copy, digests)
        with suppress(FileNotFoundError):
            shared.rename(old)
        copy.rename(shared)
    # what a process that was killed left unfinished too
    for other in sorted(shared.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-MOST]:
        shutil.rmtree(other, ignore_errors=True)


# ----- what programs depend on ----------------------------------------------------------------------------------------


def shared_of(plan: Plan, arrays: Any, environment: Mapping[str, Any]) -> Path:
    """Return where new runs look for the programs of a plan.

    arrays: that the step takes, as the compiler sees them. environment: the packages, the device and XLA's flags.
    """
    step = to_json({**plan.step_options._asdict(), "optimizer": plan.optimizer.key})
    kernels = to_json(plan.resolved)
    step["execution"].pop("op")  # functions follow from what was chosen, and from the package
    kernels.pop("asked")
    for choice in kernels["choices"]:
        for name in record.FOR_PEOPLE:
            choice.pop(name)
    settings = {name: value for name, value in jax.config.values.items() if name != "jax_compilation_cache_dir"}
    facts = {
        "package": digest_of_files(path for folder in PACKAGES for path in folder.rglob("*.py")),
        "environment": {name: value for name, value in environment.items() if name != "source"},
        "variables": variables(), "flags": plan.xla_flags, "driver": driver_version(), "jax": settings,
        "model": shape_to_json(plan.model), "kernels": kernels, "step": step,
        "arrays": [f"{each.shape} {each.dtype} {each.sharding}" for each in jax.tree.leaves(arrays)],
        "tree": str(jax.tree.structure(arrays)),
    }  # fmt: skip
    text = json.dumps(facts, sort_keys=True, default=str)
    return run_programs() / hashlib.sha256(text.encode()).hexdigest()[:24]


# ----- the lowered step -----------------------------------------------------------------------------------------------


class LoweredStep(NamedTuple):
    """The lowered step, and how what is compiled of it is called."""

    lowered: Any  # jax.stages.Lowered
    result: Any = None  # of an exported step, which takes and returns flat lists of arrays: the tree that it returns

    def call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled step as a function of (state, inputs, targets, numbers)."""
        if self.result is None:
            return compiled
        return lambda *arrays: jax.tree.unflatten(self.result, compiled(*jax.tree.leaves(arrays)))


def lower_step(
    arrays: tuple[Any, ...], model: ModelShape, options: StepOptions, path: Path | None, platforms: Any = None
) -> LoweredStep:
    """Lower the step for its arrays (state, inputs, targets, numbers), or take it as it was lowered before.

    path: where it is kept by `jax.export`; None: nowhere. Lowering a GPU's kernels takes seconds, reading them none.
    platforms: to lower for, as JAX names them, where the device is not there.
    """
    found = path and (_read(path, arrays) or _exported(path, arrays, model, options, platforms))
    if not found:
        return LoweredStep(train_step.trace(*arrays, model, options).lower(lowering_platforms=platforms))

    def step_fn(*leaves: jax.Array) -> Any:
        return found.call(*leaves)

    traced = _flat(step_fn, arrays).trace(*jax.tree.leaves(arrays))
    result = jax.tree.structure((arrays[0], Metrics._make(Metrics._fields)))  # the state, and its metrics
    return LoweredStep(traced.lower(lowering_platforms=platforms), result)


def _flat(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """Return a function of the step's arrays in a flat list, jitted: it overwrites those of the state."""
    return jax.jit(function, donate_argnums=tuple(range(len(jax.tree.leaves(arrays[0])))))


def _read(path: Path, arrays: tuple[Any, ...]) -> Any:
    """Return the exported step in a file; None where there is none for these arrays."""
    try:
        found = export.deserialize(bytearray(path.read_bytes()))
        expected = [(each.shape, each.dtype) for each in jax.tree.leaves(arrays)]
        if [(each.shape, each.dtype) for each in found.in_avals] != expected:
            return None
        if "cuda" in found.platforms:  # importing it names the library that XLA links our kernels with
            importlib.import_module("pallas_kernels.mosaic")
        return found
    except Exception:  # a damaged file, or one of another version, is made anew: it may raise anything
        return None


def _exported(path: Path, arrays: tuple[Any, ...], model: ModelShape, options: StepOptions, platforms: Any) -> Any:
    """Return the step exported into a file; None where it cannot be."""
    tree = jax.tree.structure(arrays)

    def step_fn(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(train_step(*jax.tree.unflatten(tree, leaves), model, options))

    # Every kernel of ours and of a library is a custom call. What it depends on is in the file's name.
    checks = [export.DisabledSafetyCheck.custom_call("ALL")]
    try:
        exporting = export.export(_flat(step_fn, arrays), platforms=platforms, disabled_checks=checks)
        found = exporting(*jax.tree.leaves(arrays))
        content = bytes(found.serialize())
    except (ImportError, ValueError, NotImplementedError):
        return None
    with suppress(OSError):  # then the next start lowers it again
        write_bytes(path, content)
    return found

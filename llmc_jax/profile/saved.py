"""What must be kept beside a trace to make the table of it later: the program's text and the step's shape."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from llmc_jax.base.errors import FormatError, InputError
from llmc_jax.base.files import write_atomic
from llmc_jax.config.model import ModelConfig
from llmc_jax.models.gpt2.work import Shape
from llmc_jax.plan.efficiency import Roof
from llmc_jax.plan.program import Program

PROGRAM, STEP = "program.hlo.txt", "step.json"


class Saved(NamedTuple):
    """A traced step."""

    program: Program
    model: ModelConfig
    shape: Shape
    roof: Roof | None  # the machine's rates; None: not measured, or kept by a version that measured others


def keep(folder: Path, text: str, model: ModelConfig, shape: Shape, roof: Roof) -> None:
    """Write what `kept` reads into a trace folder. text: `compiled.as_text()` of the step that was traced."""
    facts = {"model": asdict(model), "shape": shape._asdict(), "roof": roof._asdict()}
    write_atomic(folder / PROGRAM, text.encode())
    write_atomic(folder / STEP, (json.dumps(facts, indent=1) + "\n").encode())


def kept(folder: Path) -> Saved:
    """Return what `keep` wrote. Raises InputError if it is not there, FormatError if it is something else."""
    try:
        text = (folder / PROGRAM).read_text()
        facts: dict[str, Any] = json.loads((folder / STEP).read_text())
        roof = Roof(**facts["roof"]) if facts.get("roof") else None
        return Saved(Program(text), ModelConfig(**facts["model"]), Shape(**facts["shape"]), roof)
    except OSError as error:
        raise InputError(
            f"--read {folder}: has no {Path(error.filename).name}; give a folder that --trace wrote"
        ) from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"--read {folder}: {STEP} is damaged ({error}); record the trace again") from error

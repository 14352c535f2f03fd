"""Whole programs, started as a user would: train.py to its first step, the profiler, and llm.c's own trainers."""

import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.gpu import groups
from llmc_jax.trials.children import Figures, NotMeasured

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 50257
STEP_LINE = re.compile(r"\s*step\s+(\d+)/")
TOO_LONG = 300  # seconds for one process


def measure(what: str, words: str = "", program: str = "", B: int = 0) -> Figures:
    """what: 'start', 'profile' or 'check', with the flags for the model; or 'llmc', a program of its and B."""
    if what == "llmc":
        return llmc(program, B)
    if what == "check":
        return check(words)
    require_packages()
    return start(words) if what == "start" else profile(words)


def require_packages() -> None:
    """Raise NotMeasured where a package of train.py is missing."""
    missing = [name for name in ("rich", "matplotlib", "tiktoken") if find_spec(name) is None]
    if missing:
        raise NotMeasured(f"train.py's packages {', '.join(missing)} are not installed")


def write_tokens(path: Path, count: int, vocab_size: int) -> Path:
    """A file of random tokens as llm.c has them."""
    from llmc_jax.data.tokenfile import write_token_file

    write_token_file(path, np.random.default_rng(0).integers(0, vocab_size, count).astype(np.uint16))
    return path


# ----- ours ---------------------------------------------------------------------------------------------------------


def start(words: str) -> Figures:
    """Seconds from the command to the line of the first step, with an empty compile cache and then with that filled."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [*words_with_data(words, folder, 8), "-x", "2", "-v", "0", "-s", "0", "--no-save"]
        seconds = [train(flags, folder, run, folder / "cache") for run in ("cold", "warm", "warm again")]
    return {"cold s": seconds[0], "warm s": min(seconds[1:]), "flags": words}


def words_with_data(words: str, folder: Path, batches: int) -> list[str]:
    """Return train.py's flags with those for random tokens, of so many batches. The kernels are not checked.

    That takes time, and may choose otherwise in each of several runs.
    """
    from llmc_jax.config.model import parse_descriptor

    given = shlex.split(words)
    flags = dict(zip(given[::2], given[1::2], strict=True))
    count = batches * int(flags["-b"]) * int(flags["-t"]) + 1
    tokens = str(write_tokens(folder / "tokens.bin", count, parse_descriptor(flags["-e"]).vocab_size))
    return [*given, "-i", tokens, "-j", tokens, "--no-kernel-check"]


def train(flags: Sequence[str], folder: Path, name: str, cache: Path, kill_after: int = 0) -> float:
    """Run train.py to its end; or kill it at the first step after the checkpoint of step kill_after.

    Returns the seconds from the command to the line of its first step. cache: for the programs of runs alike, and for
    what is known of the kernels.
    """
    command = [sys.executable, "-u", str(ROOT / "train.py"), *flags, "-o", str(folder / name)]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment["LLMC_JAX_CACHE"] = str(cache)
    begin, first = time.perf_counter(), 0.0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if STEP_LINE.match(line):
            first = first or time.perf_counter() - begin
            if kill_after and (folder / name / f"DONE_{kill_after:08d}").exists():
                process.kill()
        if time.perf_counter() - begin > TOO_LONG:
            process.kill()
    status = process.wait()
    if status != (-signal.SIGKILL if kill_after else 0) or not first:
        raise RuntimeError(f"{shlex.join(command)} ended with status {status}: {''.join(output)[-300:]}")
    return first


def check(words: str) -> Figures:
    """Seconds of what train.py does before a first run, with nothing known yet; what it says is kept as a file."""
    command = [sys.executable, "-m", "llmc_jax.kernels", "--measure", *shlex.split(words)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment["LLMC_JAX_CACHE"] = folder
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        seconds = time.perf_counter() - begin
    said = (done.stdout + done.stderr).strip()
    if "there is no NVIDIA GPU" in said:
        raise NotMeasured(said)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: {said[-300:]}")
    text_file = Path(os.environ["GPU_CHECK_OUTPUT"]) / f"{os.environ['GPU_CHECK_NAME']}_check.txt"
    text_file.write_text(f"$ llmc-jax kernels --measure {words}\n\n{said}\n")
    last = [line.strip() for line in done.stdout.splitlines() if line.strip()][-2:]
    return {"s": seconds, "says": " / ".join(last)[-300:], "table": text_file.name, "flags": words}


def profile(words: str) -> Figures:
    """Runs the profiler; its table and its JSON go into the results' folder, the trace beside the scratch files."""
    results, scratch = Path(os.environ["GPU_CHECK_OUTPUT"]), Path(os.environ["GPU_CHECK_SCRATCH"])
    name = os.environ["GPU_CHECK_NAME"]
    json_file, text_file = results / f"{name}_profile.json", results / f"{name}_profile.txt"
    command = [sys.executable, "-m", "llmc_jax", "profile", *shlex.split(words), "--json", str(json_file)]
    command.append("--no-kernel-check")
    shutil.rmtree(scratch / "trace", ignore_errors=True)
    command += ["--trace", str(scratch / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr[-300:]}")
    text_file.write_text(f"$ llmc-jax profile {words}\n\n{done.stdout}")
    found: Figures = {"table": text_file.name, "JSON": json_file.name, "trace": str(scratch / "trace"), "flags": words}
    profiled = json.loads(json_file.read_text())
    if not profiled["operations"]:
        return found | {"groups": "none: the trace has no instructions"}
    groups.write(scratch / "trace", _step_flags(words), profiled, results / f"{name}_groups.json")
    return found


def _step_flags(words: str) -> str:
    """The profiler's flags without those that are its own."""
    return words.replace(" --steps 1", "")


# ----- llm.c --------------------------------------------------------------------------------------------------------

# step    5/20 | loss 10.98 (+nanz)| norm 15.3 (+nanz)| lr 3.00e-04 | 118.37 ms | 40.9% bf16 MFU | 553656 tok/s
CUDA_LINE = re.compile(r"^step +\d+/\d+ \|.*\| +([\d.]+) ms \|", re.MULTILINE)
# step    5/74: train loss 4.36 (acc 4.36) (80.639 ms, 50800 tok/s)
FP32_LINE = re.compile(r"^step +\d+/\d+: train loss .*\(([\d.]+) ms,", re.MULTILINE)
STEPS = 20


def llmc(program: str, B: int) -> Figures:
    """Milliseconds of llm.c's step. program: 'cuda' for train_gpt2cu (bf16), 'fp32' for train_gpt2fp32cu."""
    if "LLMC" not in os.environ:
        raise NotMeasured("$LLMC does not name a folder with llm.c's train_gpt2cu and train_gpt2fp32cu")
    binary = Path(os.environ["LLMC"]) / f"train_gpt2{program if program == 'fp32' else ''}cu"
    if not binary.exists():
        raise NotMeasured(f"{binary} does not exist")
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder) / "tokens.bin", STEPS * B * 1024 + 1, VOCAB)
        command = [str(binary), "-i", str(tokens), "-j", str(tokens), "-b", str(B), "-t", "1024", "-v", "1000"]
        if program == "fp32":  # reads its model from the folder it is started in
            write_random_model(Path(folder) / "gpt2_124M.bin")
            command += ["-s", "1000", "-m", "1"]
        else:
            command += ["-e", "d12", "-d", str(B * 1024), "-x", str(STEPS), "-s", "0", "-m", "1", "-h", "0"]
            command += ["-r", os.environ.get("LLMC_RECOMPUTE", "0")]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    times = step_times(done.stdout)
    if done.returncode or len(times) < 8:
        raise RuntimeError(f"{binary.name} ended with status {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    ms = statistics.median(times[5:])
    return {"ms": ms, "tok/s": 1e3 * B * 1024 / ms, "runs": shlex.join([binary.name, *command[5:]])}


def step_times(output: str) -> list[float]:
    """Milliseconds of the steps that one of llm.c's programs printed."""
    return [float(text) for text in (CUDA_LINE.findall(output) or FP32_LINE.findall(output))]


def write_random_model(path: Path) -> None:
    """GPT-2 124M with random weights, as a file of llm.c's."""
    from llmc_jax.checkpoint.llmc import write_model
    from llmc_jax.config.model import parse_descriptor
    from llmc_jax.models.gpt2.init import random_parameters

    config = parse_descriptor("d12")
    write_model(path, config, random_parameters(config), version=3)

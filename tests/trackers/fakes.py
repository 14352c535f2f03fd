"""Stand-ins for the trackers' packages that misbehave, written as modules into a folder of the test's."""

import json
from pathlib import Path
from typing import Any

# Writes down what it is told, a line of JSON at a time; what it does instead, where HOW says so.
WANDB = """
import json, os, sys, threading, time

HOW = {how!r}

def note(*what):
    with open({log!r}, "a") as file:
        file.write(json.dumps(what) + "\\n")

def hang():
    note("hangs")
    while True:
        time.sleep(3600)

class Config:
    def update(self, values, allow_val_change):
        note("config", values)

class Run:
    config, url, dir = Config(), None, "/elsewhere/run/files"
    def define_metric(self, name, step_metric): pass
    def log(self, values):
        if HOW == "raises":
            raise RuntimeError("https://me:hunter2@tracker.example said no to " + os.environ["WANDB_API_KEY"])
        if HOW == "hangs in log":
            hang()
        if HOW == "dies":
            os._exit(5)
        if HOW == "slow":
            time.sleep(0.3)
        if HOW == "exits":
            sys.exit(3)
        note("log", values)
    def finish(self, exit_code):
        if HOW == "hangs in finish":
            hang()
        note("finish", exit_code)

def Settings(**options):
    return options

def Html(text, inject):
    return text

def init(**options):
    note("init", options)
    if HOW == "hangs in init":
        hang()
    if HOW == "floods":
        def flood():
            line = b"x" * (1 << 20)
            while True:
                os.write(1, line)
                os.write(2, line)
        threading.Thread(target=flood, daemon=True).start()
    return Run()
"""


def fake_wandb(folder: Path, how: str = "") -> Path:
    """Write a `wandb` that misbehaves in one way, or in none; return the file of what it is told."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "told.jsonl"
    (folder / "wandb.py").write_text(WANDB.format(how=how, log=str(log)))
    return log


def told(log: Path) -> list[list[Any]]:
    """Return what the stand-in was told: a name and a value each."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

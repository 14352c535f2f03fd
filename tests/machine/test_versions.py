"""What is said of the source, and of the environment."""

import subprocess
from pathlib import Path

import pytest

from llmc_jax.machine.versions import VARIABLES, environment, git_state


def test_git_state_tells_the_commit_and_changes(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None

    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "file").write_text("2")
    state = git_state(tmp_path)
    assert state is not None and state["modified"]


def test_of_the_environment_only_named_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other is: some hold credentials, and so may an address."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("JAX_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=s3://me:secret@secret@host/x --a=b")
    found = environment()
    assert found.keys() == {"XLA_FLAGS"} and "secret" not in str(found) and found["XLA_FLAGS"].endswith("@host/x --a=b")
    assert not any(word in name for name in VARIABLES for word in ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"))

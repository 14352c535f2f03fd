"""What is said of the source."""

import subprocess
from pathlib import Path

from llmc_jax.machine.versions import git_state


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

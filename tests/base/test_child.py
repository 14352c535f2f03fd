"""Child: which modules it runs, and what is heard of it."""

import os
from pathlib import Path

import pytest

from llmc_jax.base.child import Child, Failed, answer_of


@pytest.mark.parametrize("there", [True, False], ids=["its folder", "the folder of the run"])
def test_the_modules_of_its_own_folder_alone_come_first(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in.py").write_text("print(1); print('{\"here\": 1}')")
    monkeypatch.chdir(tmp_path)
    child = Child("stand_in", environment=os.environ, folder=tmp_path if there else None)
    assert (child.status(60.0), child.said()) == ((0, {"here": 1}) if there else (1, {}))
    assert there or "stand_in" in child.last_words()
    child.close()


def test_an_answer_and_what_becomes_of_none(tmp_path: Path) -> None:
    """It hears a Ctrl-C as its parent does: it is of the same session."""
    (tmp_path / "answers.py").write_text(
        "import json, os, sys, time\n"
        "asked = sys.stdin.read()\n"
        "print('chatter')\n"
        "time.sleep(600 * (asked == 'hangs'))\n"
        "assert asked != 'fails', 'the reason'\n"
        "print(json.dumps({'asked': asked, 'session': os.getsid(0)}))\n"
    )

    def answer(asked: str, limit: float = 60.0) -> object:
        return answer_of("answers", asked=asked, limit=limit, environment={**os.environ, "PYTHONPATH": str(tmp_path)})

    assert answer("ä") == {"asked": "ä", "session": os.getsid(0)}
    with pytest.raises(Failed, match=r"status 1: .*the reason"):
        answer("fails")
    with pytest.raises(Failed, match=r"not done after 0\.5 s"):
        answer("hangs", 0.5)

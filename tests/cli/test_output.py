"""Where results cannot be written, that is said before anything is measured, and nothing is left there."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from cotenant.cli.output import check_outputs, write_json
from cotenant.core.errors import InvalidInputError
from forked import run_command

NOBODY = ("bench", "serve", "--url", "http://127.0.0.1:1", "--request-rate", "1")  # nobody listens there
COMMANDS = [
    (("bench", "finetune", "tiny", "--seq-len", "1024"), "json"),
    (("bench", "engine", "tiny", "--batch-sizes", "1"), "json"),
    (("bench", "colocate", "tiny", "--seq-len", "1024"), "json"),
    (("bench", "colocate", "tiny", "--seq-len", "1024"), "html"),
    (("bench", "colocate", "tiny", "--seq-len", "1024"), "trace-file"),
    (("serve", "tiny"), "trace-file"),
    (NOBODY, "json"),
    (("bench", "colocate-report", "/no/such/file"), "json"),
    (("bench", "colocate-report", "/no/such/file"), "html"),
    (("demo",), "output"),
]


@pytest.mark.parametrize(("command", "flag"), COMMANDS)
def test_a_file_in_the_way_is_named_before_anything_else_is_done(
    tmp_path: Path, command: tuple[str, ...], flag: str
) -> None:
    (tmp_path / "file").touch()
    result = run_command(*command, f"--{flag}", str(tmp_path / "file" / "made" / "result"))
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line == f"error: --{flag}: {tmp_path / 'file'} is not a folder; name another path"


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "target.json")
    before = sorted(os.walk(tmp_path))
    for path in ("old.json", "new.json", "link", "a/b/new.json"):
        check_outputs(json=tmp_path / path, html=None)
    check_outputs(json=Path("/dev/null"), html=Path("new.json"))
    assert sorted(os.walk(tmp_path)) == before
    assert (tmp_path / "old.json").read_text() == "kept"
    write_json(tmp_path / "a" / "b" / "new.json", [1])
    assert json.loads((tmp_path / "a" / "b" / "new.json").read_text()) == [1]


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("folder", "--html: {0}/folder is a folder; name a file in it"),
        ("file/x", "--html: {0}/file is not a folder"),
        ("nowhere/x", "--html: {0}/nowhere is not a folder"),
        ("to-file", "--html: {0}/file is not a folder"),
        ("/proc/x/y", "--html: nothing can be written in /proc: "),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_what_is_wrong_with_a_path_is_said(tmp_path: Path, path: str, complaint: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "to-file").symlink_to(tmp_path / "file" / "x")
    before = sorted(os.walk(tmp_path))
    with pytest.raises(InvalidInputError) as caught:
        check_outputs(html=tmp_path / path)
    assert complaint.format(tmp_path) in caught.value.message
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize("is_compact", [True, False])
def test_what_is_no_number_is_null(tmp_path: Path, is_compact: bool) -> None:
    content = {"cells": ({"p50": math.nan, "p99": [math.inf, -math.inf, 1.5]}, "NaN"), "count": 3, "is": True}
    write_json(tmp_path / "result.json", content, is_compact)
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "cells": [{"p50": None, "p99": [None, None, 1.5]}, "NaN"],
        "count": 3,
        "is": True,
    }

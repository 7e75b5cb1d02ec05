"""bench/compare_servers.py where a server does not start: there is no GPU for the others."""

from __future__ import annotations

import json
from pathlib import Path

from forked import run_script

SCRIPT = Path(__file__).parents[2] / "bench" / "compare_servers.py"


def test_what_an_earlier_run_left_is_not_shown_for_a_server_that_fails(tmp_path: Path) -> None:
    old = tmp_path / "cotenant" / "result.json"
    old.parent.mkdir()
    old.write_text('{"label": "cotenant", "completed": 20}\n')
    path = tmp_path / "servers.json"
    path.write_text("[]\n")
    run = run_script(SCRIPT, "--json", str(path), "--only", "cotenant", "--cotenant-args", "--max-model-len 3")
    assert run.returncode == 1
    assert json.loads(path.read_text()) == []
    assert not old.exists()
    failed, lacks = run.stderr.strip().splitlines()
    assert failed.startswith("cotenant: failed: the server at http://127.0.0.1:8100 ended with exit code 2")
    assert lacks == f"{path} lacks cotenant"
    assert "--max-model-len: must be at least 16" in (tmp_path / "cotenant" / "server.log").read_text()

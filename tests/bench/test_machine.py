"""How a measurement was started, as it stands beside its figures."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cotenant.bench.machine import command_line
from forked import run_script


def test_a_command_tells_no_folders_and_no_secrets() -> None:
    words = ["cotenant", "bench", "serve", "--trace", "/home/me/conv.csv", "--json=/home/me/a b.json", "--api-key=k"]
    words += ["--config=here/c.yaml", "/home/me/models/llama", "--sweep", "1,2", "--api-key", "/k"]
    shown = command_line(words, ["--api-key"])
    assert shown == (
        "cotenant bench serve --trace conv.csv '--json=a b.json' '--api-key=***' --config=here/c.yaml llama "
        "--sweep 1,2 --api-key '***'"
    )


def test_a_path_of_the_server_is_no_folder_of_this_machine() -> None:
    for words in (["--endpoint", "/v1/completions"], ["--endpoint=/v1/completions"]):
        assert command_line(words) == " ".join(words)


def test_a_report_names_its_command_wherever_that_lies(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "cotenant"
    script.parent.mkdir()
    script.write_text("from cotenant.cli.main import main\nmain()\n")
    path = tmp_path / "engine.json"
    flags = ["--batch-sizes", "1", "--context", "16", "--prompt-lengths", "8", "--num-steps", "8", "--repeats", "1"]
    result = run_script(
        Path(os.path.relpath(script)), "bench", "engine", "tiny", *flags, "--device", "cpu", f"--json={path}"
    )
    assert result.returncode == 0, result.stderr
    command = json.loads(path.read_text())["command"]
    assert command == f"cotenant bench engine tiny {' '.join(flags)} --device cpu --json=engine.json"

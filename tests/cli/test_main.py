"""The command line as a user meets it: exit codes, one line for an error, and no torch where none is needed."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from cotenant import __version__
from forked import run_command
from small_model import small_model

MODELS = ("tiny", "llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b")
LONG = "a" * 300  # than which no file's name is longer


def cotenant(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cotenant", *arguments], capture_output=True, text=True, timeout=200)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)


def test_version() -> None:
    for arguments in ("version", "--version"):
        assert cotenant(arguments).stdout.strip() == __version__


def test_the_built_in_models_folder_is_printed() -> None:
    result = cotenant("model", "path", "tiny")
    assert result.returncode == 0, result.stderr
    assert (Path(result.stdout.strip()) / "config.json").is_file()


def test_models_are_listed() -> None:
    shown = cotenant("model", "list").stdout
    assert all(name in shown for name in (*MODELS, "131,072"))


@pytest.mark.parametrize(("columns", "has_kind"), [("24", False), ("40", True)])
def test_their_names_are_whole_on_a_narrow_terminal(columns: str, has_kind: bool) -> None:
    shown = on_a_terminal("model", "list", exit_code=0, COLUMNS=columns)
    assert all(name in shown for name in MODELS)
    assert ("random weights" in shown) == has_kind
    assert "131,072" not in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve"], "MODEL is missing"),
        (["serve", "tiny", "--policy", "fair"], "--policy: must be one of adaptive"),
        (["serve", "tiny", "--max-model-len", "3"], "--max-model-len: must be at least 16"),
        (["serve", "/nonexistent/model"], "/nonexistent/model"),
        (["serve", "tiny", "--config", "/nonexistent.yaml"], "/nonexistent.yaml cannot be read"),
        (["serve", "tiny", "--host", "a..b"], "--host: 'a..b' cannot be a host's name"),
        (["serve", "tiny", "--data-dir", "~nobody-here/x"], "--data-dir: '~nobody-here/x' cannot be looked up"),
        (["serve", "tiny", "--data-dir", f"/tmp/{LONG}"], f"--data-dir: '/tmp/{LONG}' cannot be looked up"),
        (["serve", "tiny", "--data-dir", "/tmp/\udcff"], r"--data-dir: '/tmp/\udcff' is not UTF-8"),
        (["profile", "tiny", "--contexts", "64", "--data-dir", "/tmp/\udcff"], r"\udcff' is not UTF-8"),
        (["serve", "tiny", "--trace-file", "/tmp/\udcff"], r"--trace-file: '/tmp/\udcff' is not UTF-8"),
        (["serve", "/tmp/\udcff"], r"MODEL: '/tmp/\udcff' is not UTF-8"),
        (["serve", "tiny", "--served-model-name", "a", "--served-model-name", "\udcff"], "--served-model-name: '"),
        (["serve", "tiny", "--lora-modules", "\udcff=/tmp"], "--lora-modules: '"),
        (["serve", "tiny", "--chat-template", "\udcff"], "--chat-template: '"),
        (["serve", "tiny", "--trace-file", "~nobody-here/x"], "--trace-file: '~nobody-here/x' cannot be looked up"),
        (["serve", LONG], f"MODEL: '{LONG}' cannot be looked up: File name too long; name another path"),
        (["serve", "~nobody-here/x"], "MODEL: '~nobody-here/x' cannot be looked up"),
        (["serve", "tiny", "--lora-modules", f"a={LONG}"], f"--lora-modules: '{LONG}' cannot be looked up"),
        (["serve", "tiny", "--api-key", "a\nb"], "--api-key: a key (or COTENANT_API_KEY) is printable text without"),
        (
            ["profile", "tiny", "--contexts", "64", "--data-dir", "~nobody-here/x"],
            "--data-dir: '~nobody-here/x' cannot",
        ),
        (["model", "path", "huge"], "huge"),
        (["demo", "--output", "/etc"], "/etc is not a folder of an earlier demo"),
        (["demo", "--policy", "inference-only"], "--policy inference-only never trains"),
        (["demo", "--beside", "fair"], "--beside must be one of adaptive"),
        (["demo", "--beside", "inference-only"], "--beside inference-only never trains"),
        (["jobs", "list", "--url", "http://127.0.0.1:1"], "cannot reach a server at http://127.0.0.1:1"),
        (["jobs", "list", "--url", "http://[::1"], "--url: http://[::1 is not a URL like http://127.0.0.1:8000"),
        (["jobs", "list", "--url", "http://a..b"], "--url: http://a..b/v1/fine_tuning/jobs is not a URL"),
        (["jobs", "list", "--api-key", "\udcff"], "--api-key: a key (or COTENANT_API_KEY) is printable text without"),
        (["jobs", "show", "r\udcff"], "'\\udcff' in what was given is no text that can be sent: give UTF-8"),
        (["jobs", "create", "/nonexistent.jsonl", "--model", "tiny"], "/nonexistent.jsonl cannot be read"),
        (["jobs", "create", "x", "--model", "tiny", "-H", "r"], "expected NAME=VALUE, got 'r'"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr(arguments: list[str], complaint: str) -> None:
    result = run_command(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert complaint in line


def test_ctrl_c_while_the_command_line_is_imported_is_no_traceback() -> None:
    result = python(
        """
import builtins, cotenant.__main__
original = builtins.__import__
def interrupted(name, *rest):
    if name == "typer":
        raise KeyboardInterrupt
    return original(name, *rest)
builtins.__import__ = interrupted
cotenant.__main__.main()
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_an_unknown_flag_is_refused_by_name() -> None:
    result = run_command("serve", "tiny", "--enable-speculation")
    assert result.returncode == 2
    assert "--enable-speculation" in result.stderr


def on_a_terminal(*arguments: str, exit_code: int, **environment: str) -> str:
    """What `cotenant` says where stdout and stderr are one: little, for nobody reads it meanwhile."""
    ours, theirs = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment = {**inherited, "TERM": "xterm", **environment}
    command = [sys.executable, "-m", "cotenant", *arguments]
    result = subprocess.run(command, stdout=theirs, stderr=theirs, env=environment, timeout=60, check=False)
    assert result.returncode == exit_code
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:
        return terminal.read(4000).decode()


@pytest.mark.parametrize(("environment", "is_red"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "0"}, False)])
def test_errors_are_red_on_a_terminal_unless_no_color_is_set(environment: dict[str, str], is_red: bool) -> None:
    said = on_a_terminal("model", "path", "huge", exit_code=2, **environment)
    assert said.startswith("\x1b[31merror: " if is_red else "error: ")
    assert ("\x1b" in said) == is_red


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is full")
@pytest.mark.parametrize("command", ["version", "--version", "serve --help", "model list"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_be_written_is_one_line(command: str, unbuffered: str) -> None:
    words = [sys.executable, "-m", "cotenant", *command.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment, check=False
        )
    said = "error: stdout, or another file, cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, said)


@pytest.mark.parametrize("command", ["version", "serve --help", "model list"])
def test_a_reader_that_is_gone_hears_nothing(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "cotenant", *command.split()]
    result = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_neither_the_command_line_nor_the_server_imports_what_computes() -> None:
    code = """
import sys
import cotenant.cli.main, cotenant.api.server, cotenant.models.registry
from cotenant.config import ModelConfig
cotenant.models.registry.resolve_model(ModelConfig("tiny"))
print({"httpx", "numpy", "torch"} & set(sys.modules))
"""
    result = python(code)
    assert result.stdout.strip() == "set()", result.stderr


def test_no_server_waits_for_algebra_before_it_is_ready(tmp_path: Path) -> None:
    """Torch has it for shapes that are symbols, and imports it in a third of a second. Nor does the first job."""
    config = f"ServerConfig(ModelConfig({small_model(tmp_path)[0]!r}, load_format='dummy', device='cpu'))"
    code = f"""
import sys
from cotenant.config import ModelConfig, ServerConfig
from cotenant.runtime.colocate_bench import ColocateBench
from cotenant.runtime.finetune_workload import Workload
with ColocateBench({config}, Workload(16, 16, 16, 4, False)) as bench:
    bench.alone(0.1)
print({{"sympy", "torch._dynamo"}} & set(sys.modules))
"""
    result = python(code)
    assert result.stdout.strip() == "set()", result.stderr


def test_small_commands_do_not_wait_for_what_others_need() -> None:
    heavy = {"fastapi", "httpx", "numpy", "sqlalchemy", "zmq"}
    result = python(f"import sys, cotenant.cli.main; print({heavy} & set(sys.modules))")
    assert result.stdout.strip() == "set()", result.stderr


@pytest.mark.parametrize("module", ["json.tool", "not.there"])
def test_the_collector_rests_while_a_process_imports_and_no_longer(module: str) -> None:
    code = f"""
import contextlib, gc, importlib
from cotenant.processes import importing
with contextlib.suppress(ImportError), importing():
    print(gc.isenabled())
    importlib.import_module("{module}")
print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""
    result = python(code)
    assert result.stdout.split() == ["False", "True", "True"], result.stderr


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/etc/passwd", ""])
def test_a_python_that_cannot_be_run_again_for_the_worker_is_one_line(executable: str) -> None:
    code = f"""
import sys
from cotenant.cli.main import main
sys.executable, sys.argv = {executable!r}, ["cotenant", "serve", "tiny"]
main()
"""
    result = python(code)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(f"error: the worker process cannot be started with '{executable}': ")

"""Flags and YAML files become one configuration; what is wrong is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cotenant.cli.main import app
from cotenant.cli.options import FLAGS, build_config, model_to_measure
from cotenant.config import ModelConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.models.registry import resolve_model

MANUAL = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COTENANT_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "serve.yaml"
    file.write_text(text)
    return file


def test_every_flag_is_in_the_manual() -> None:
    named = set(re.findall(r"--([a-z-]+)", MANUAL.read_text(encoding="utf-8")))
    assert {flag.name for flag in FLAGS.values()} <= named


def test_without_flags_the_defaults_count(tmp_path: Path) -> None:
    expected = ServerConfig(ModelConfig("tiny"), data_dir=str(tmp_path / "cotenant-data"))
    assert build_config("tiny", {}, None) == expected


def test_flags_and_file_give_the_same_configuration(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    given = {
        "served_model_name": ["a", "b"], "max_model_len": 512, "dtype": "float32", "load_format": "dummy",
        "device": "cpu", "seed": 7, "chat_template": "t.jinja", "page_tokens": 8, "num_pages": 99,
        "gpu_memory_utilization": 0.5, "max_num_seqs": 3, "max_num_batched_tokens": 77, "max_queue": 5, "max_loras": 2,
        "enable_prefix_caching": False, "quantization": "fp8", "compress_weights": "on",
        "max_cpu_loras": 6, "enforce_eager": True,
        "cuda_graph_sizes": [1, 4], "max_lora_rank": 8, "lora_modules": [f"sql={adapter}"], "policy": "temporal",
        "slo_ttft_ms": 12.5, "slo_tpot_ms": 3, "slo_itl_ms": 20, "slo_attainment": 0.95,
        "tasklet_tokens": 64, "fuse": False, "sm_shares": [0.25, 0.5], "self_profile": True, "host": "::1", "port": 81,
        "api_key": "k", "max_upload_bytes": 2048, "worker_timeout": 9.5, "data_dir": str(tmp_path / "d"),
        "log_level": "debug", "trace_file": "trace.json", "allowed_origins": ["https://a.example", "http://localhost:3000"],
    }  # fmt: skip
    assert set(given) == set(FLAGS)
    by_flags = build_config("tiny", given, None)
    text = json.dumps({name.replace("_", "-"): value for name, value in given.items()} | {"model": "tiny"})
    assert build_config(None, {}, yaml_file(tmp_path, text)) == by_flags
    assert build_config(None, {}, yaml_file(tmp_path, text.replace("-name", "_name"))) == by_flags
    default = ServerConfig(ModelConfig("tiny"))
    for flag in FLAGS.values():  # each flag changes something, so none is lost on the way
        section = {type(part): part for part in sections_of(by_flags)}[flag.section]
        unchanged = {type(part): part for part in sections_of(default)}[flag.section]
        assert getattr(section, flag.field) != getattr(unchanged, flag.field), flag.name
    assert by_flags.lora.modules == (("sql", str(adapter)),)


def sections_of(config: ServerConfig) -> tuple[object, ...]:
    return (config, config.model, config.cache, config.batch, config.lora, config.coexecution, config.api)


def test_what_is_no_trace_is_left_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    for name, complaint in (
        ("", "is a folder; name a file in it"),
        ("notes.txt", "is there and is no trace"),
        ("notes.txt/trace.json", r"/notes\.txt is not a folder; name another path"),
        ("/proc/x/trace.json", "nothing can be written in /proc: .*; name another path"),
    ):
        with pytest.raises(InvalidInputError, match=f"^--trace-file: .*{complaint}"):
            build_config("tiny", {"trace_file": str(tmp_path / name)}, None)
    with pytest.raises(InvalidInputError, match=r"^--trace-file: .*is a folder; name a file in it"):
        build_config("tiny", {"trace_file": ""}, None)  # of a variable that is not set
    build_config("tiny", {"trace_file": str(tmp_path / "traces" / "trace.json")}, None)  # the worker makes the folder
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_no_name(name: str) -> None:
    """Of a variable that is not set: files would go where the command happens to be run."""
    with pytest.raises(InvalidInputError, match=r"^--data-dir: is empty; leave it out for cotenant-data"):
        build_config("tiny", {"data_dir": name}, None)
    with pytest.raises(InvalidInputError, match=r"^--host: is empty; leave it out for 127\.0\.0\.1"):
        build_config("tiny", {"host": name}, None)
    with pytest.raises(InvalidInputError, match=r"^MODEL is empty: give a folder"):
        resolve_model(build_config(name, {}, None).model)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "port: 1111\nseed: 3\nmodel: other\n")
    config = build_config("tiny", {"port": 2222, "seed": None, "served_model_name": []}, file)
    assert (config.api.port, config.model.seed, config.model.model) == (2222, 3, "tiny")


def test_a_false_or_zero_flag_is_a_given_flag(tmp_path: Path) -> None:
    config = build_config("tiny", {"fuse": False, "seed": 0, "port": 0}, yaml_file(tmp_path, "fuse: true\nseed: 5"))
    assert (config.coexecution.fuse, config.model.seed, config.api.port) == (False, 0, 0)


def test_the_command_line_can_undo_what_a_file_asks_for(tmp_path: Path) -> None:
    asked = "quantization: fp8\nenforce-eager: true\nenable-prefix-caching: false\ncompress-weights: on"
    file = yaml_file(tmp_path, asked)
    given = {"quantization": "none", "enforce_eager": False, "enable_prefix_caching": True, "compress_weights": "auto"}
    assert build_config("tiny", given, file) == build_config("tiny", {}, None)


@pytest.mark.parametrize(("alias", "name"), [("half", "float16"), ("float", "float32")])
def test_a_dtype_may_have_the_name_that_vllm_has_for_it(alias: str, name: str, tmp_path: Path) -> None:
    for config in (
        build_config("tiny", {"dtype": alias}, None),
        build_config("tiny", {}, yaml_file(tmp_path, f"dtype: {alias}")),
    ):
        assert config == build_config("tiny", {"dtype": name}, None)
    assert model_to_measure("tiny", "dummy", alias, "cpu") == model_to_measure("tiny", "dummy", name, "cpu")
    assert f"{alias} is {name}" in FLAGS["dtype"].help


@pytest.mark.parametrize("value", ["on", "off", "'on'", "'off'"])
def test_on_and_off_may_be_what_yaml_makes_of_them(value: str, tmp_path: Path) -> None:
    config = build_config("tiny", {}, yaml_file(tmp_path, f"compress-weights: {value}"))
    assert config.model.compress_weights == value.strip("'")


def test_one_graph_size_needs_no_list(tmp_path: Path) -> None:
    assert build_config("tiny", {}, yaml_file(tmp_path, "cuda-graph-sizes: 8")).batch.cuda_graph_sizes == (8,)


@pytest.mark.parametrize(
    ("device", "given", "seqs", "tokens"),
    [
        ("cuda", {}, 256, 4096),
        ("cpu", {}, 64, 512),
        ("cpu", {"max_num_seqs": 1000}, 1000, 1000),
        ("cuda", {"max_num_seqs": 8}, 8, 4096),
        ("cpu", {"max_num_batched_tokens": 32}, 32, 32),
        ("cuda", {"max_num_seqs": 3, "max_num_batched_tokens": 77}, 3, 77),
    ],
)
def test_limits_that_are_not_given_follow_the_device(
    device: str, given: dict[str, int], seqs: int, tokens: int
) -> None:
    batch = build_config("tiny", {**given, "max_queue": 9}, None).batch.resolved(device)
    assert (batch.max_num_seqs, batch.max_num_batched_tokens, batch.max_queue) == (seqs, tokens, 9)
    assert batch.resolved("cuda") == batch


def test_the_key_comes_from_the_flag_then_the_file_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTENANT_API_KEY", "environment")
    file = yaml_file(tmp_path, "api-key: file")
    assert build_config("tiny", {}, None).api.api_key == "environment"
    assert build_config("tiny", {}, file).api.api_key == "file"
    assert build_config("tiny", {"api_key": "flag"}, file).api.api_key == "flag"


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_opens_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """``--api-key "$UNSET"``. In the environment it counts as not set."""
    with pytest.raises(InvalidInputError, match="--api-key: is empty"):
        build_config("tiny", {"api_key": key}, None)
    with pytest.raises(InvalidInputError, match="--api-key: is empty"):
        build_config("tiny", {}, yaml_file(tmp_path, f"api-key: '{key}'"))
    monkeypatch.setenv("COTENANT_API_KEY", "")
    assert build_config("tiny", {}, None).api.api_key == ""


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="--served-model-name: must not be empty"):
        build_config("tiny", {"served_model_name": ["a", ""]}, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 8000", "unknown key 'prot'"),
        ("enable-prefix-cache: true", "unknown key 'enable-prefix-cache'"),
        ("enable-prefix-caching: 1", "serve.yaml: enable-prefix-caching: expected true or false, got a whole number"),
        ("no-fuse: true", "unknown key 'no-fuse': write 'fuse: false'"),
        ("no_enforce_eager: false", "unknown key 'no_enforce_eager': write 'enforce-eager: true'"),
        ("no-port: 1", "unknown key 'no-port'"),
        ("port: 8133\nseed: 1\nport: 8134", "serve.yaml: 'port' is there twice, lines 1 and 3"),
        ("lora-modules:\n- {name: x, path: y, name: z}", "serve.yaml: 'name' is there twice, line 2"),
        ("compress-weights: maybe", "--compress-weights: must be one of auto, off, on"),
        ("quantization: awq", "--quantization: must be none or one of fp8"),
        ("max-cpu-loras: 7", "--max-cpu-loras: must be at least --max-loras"),
        ("cuda-graph-sizes: [1, 0]", "--cuda-graph-sizes: must be at least 1"),
        ("max-num-seqs: -1", "--max-num-seqs: must be at least 1"),
        ("max-num-seqs: 65537", "--max-num-seqs: must be at least 1 and at most 65536, or 0 for the device's default"),
        ("max-loras: 100000000000000000000", "--max-loras: must be between 1 and 65536"),
        ("max-cpu-loras: 1048577", "--max-cpu-loras: must be at least --max-loras and at most 1048576"),
        ("num-pages: 2147483649", "--num-pages: must be at least 2 and at most 2147483648"),
        ("seed: 9223372036854775808", "--seed: must be a number of 64 bits"),
        ("max-num-seqs: 8\nmax-num-batched-tokens: 7", "--max-num-batched-tokens: must be at least --max-num-seqs"),
        ("port: eight", "serve.yaml: port: expected a whole number, got text"),
        ("port: true", "serve.yaml: port: expected a whole number, got true or false"),
        ("model: 7", "serve.yaml: model: expected text, got a whole number: put it in quotes"),
        ("api_key: 12345", "serve.yaml: api-key: expected text, got a whole number: put it in quotes"),
        ("host: {a: b}", "serve.yaml: host: expected text, got a mapping"),
        ("served-model-name: 2024-11-01", "serve.yaml: served-model-name: expected text, got a date: put it in"),
        ("served-model-name: [a, 1.5]", "served-model-name: entry 2: expected text, got a number: put it in quotes"),
        ("worker-timeout: -1", "--worker-timeout: must be between 0, which is no limit, and 1000000"),
        ("port: 70000", "--port: must be between"),
        ("max-queue: 1\nmax_queue: 2", "'max_queue' is there twice, lines 1 and 2"),
        ("- port", "must hold a mapping"),
        ("port: [", "not valid YAML"),
        ("served-model-name: 2024-13-01", "not valid YAML: month must be in 1..12"),
        ('data-dir: "a\\0b"', r"--data-dir: 'a\x00b' cannot be looked up: embedded null byte"),
        ('trace-file: "a\\0b"', r"--trace-file: 'a\x00b' cannot be looked up: embedded null byte"),
        ("lora-modules: {name: x}", "expected NAME=FOLDER"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(complaint)):
        build_config(None if text.startswith("model") else "tiny", {}, yaml_file(tmp_path, text))


def test_a_wrong_value_of_the_command_line_is_none_of_the_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"^--allowed-origins: entry 1: expected text, got a whole number"):
        build_config("tiny", {"allowed_origins": ["[7]"]}, yaml_file(tmp_path, "allowed-origins: '*'\nport: 1"))


def test_what_anchors_and_merges_repeat_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    text = "seed: &n 7\nport: *n\nlora-modules:\n- &a {name: a, path: x}\n- {<<: *a, name: b}\n"
    config = build_config("tiny", {}, yaml_file(tmp_path, text))
    assert (config.model.seed, config.api.port) == (7, 7)
    assert config.lora.modules == (("a", str(tmp_path / "x")), ("b", str(tmp_path / "x")))


@pytest.mark.parametrize("flag", [flag.name for flag in FLAGS.values() if "float" in str(flag.type)])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_refused_by_name(flag: str, value: float) -> None:
    """The worker would get null for it, which is the default."""
    with pytest.raises(InvalidInputError, match=f"--{flag}: must be ") as refused:
        build_config("tiny", {flag.replace("-", "_"): value}, None)
    assert refused.value.param == flag


@pytest.mark.parametrize("flag", ["slo_ttft_ms", "slo_tpot_ms", "slo_itl_ms"])
def test_a_target_is_one_that_times_can_be_counted_in(flag: str) -> None:
    assert getattr(build_config("tiny", {flag: 1e9}, None).coexecution, flag) == 1e9
    for value in (0.0, -1.0, 1e10, 1e308):
        with pytest.raises(InvalidInputError, match=f"--{flag.replace('_', '-')}: must be above 0 and at most 1e9"):
            build_config("tiny", {flag: value}, None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"none\.yaml cannot be read"):
        build_config("tiny", {}, tmp_path / "none.yaml")


def test_lora_modules_in_every_form(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    given = {"lora_modules": ["a=a", json.dumps({"name": "b", "path": "b", "base_model_name": "tiny"})]}
    expected = (("a", str(tmp_path / "a")), ("b", str(tmp_path / "b")))
    assert build_config("tiny", given, None).lora.modules == expected
    file = yaml_file(tmp_path, "lora-modules:\n- a=a\n- {name: b, path: b}\n")
    assert build_config("tiny", {}, file).lora.modules == expected
    single = yaml_file(tmp_path, "lora-modules: c=c")
    assert build_config("tiny", {}, single).lora.modules == (("c", str(tmp_path / "c")),)


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        ("x", "expected NAME=FOLDER, got 'x'"),
        ("=x", "expected NAME=FOLDER"),
        ("x=", "expected NAME=FOLDER"),
        ("{broken", "not valid JSON"),
        ('{"name": "x"}', "expected NAME=FOLDER"),
        ("x=nowhere", "'x': there is no folder nowhere"),
    ],
)
def test_a_wrong_lora_module_is_named(module: str, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(complaint)):
        build_config("tiny", {"lora_modules": [module]}, None)


def test_origins_are_given_one_by_one_or_as_a_list() -> None:
    for given in (["*", "https://a.example"], ['["*", "https://a.example"]'], '["*", "https://a.example"]'):
        assert build_config("tiny", {"allowed_origins": given}, None).api.allowed_origins == ("*", "https://a.example")


@pytest.mark.parametrize("origin", ["a.example", "https://a.example/", "https://a.example/x", "", '["*"', "[7]"])
def test_an_origin_that_no_page_has_is_refused(origin: str) -> None:
    with pytest.raises(InvalidInputError, match="--allowed-origins: ") as refused:
        build_config("tiny", {"allowed_origins": [origin]}, None)
    assert refused.value.param == "allowed-origins"


def test_the_same_lora_name_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InvalidInputError, match="'x' is given twice"):
        build_config("tiny", {"lora_modules": ["x=a", "x=a"]}, None)


@pytest.mark.parametrize("name", [" ", "a\nb", "\u202ea", "tiny "])
def test_an_adapters_name_is_what_it_looks_like(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        build_config("tiny", {"lora_modules": [f"{name}={tmp_path}"]}, None)
    assert refused.value.message == (
        f"--lora-modules: {name!r} is no adapter's name: it has to be printable text without spaces around it"
    )
    assert refused.value.param == "lora-modules"


def test_names_of_several_words_and_other_scripts_are_names(tmp_path: Path) -> None:
    names = ("my adapter", "ft:tiny:acme::x", "学习")
    config = build_config("tiny", {"lora_modules": [f"{name}={tmp_path}" for name in names]}, None)
    assert tuple(name for name, _ in config.lora.modules) == names


def test_an_adapter_does_not_take_the_base_models_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InvalidInputError, match="'tiny' is the base model's name"):
        build_config("tiny", {"lora_modules": ["tiny=a"]}, None)
    with pytest.raises(InvalidInputError, match="'y' is the base model's name"):
        build_config("tiny", {"lora_modules": ["y=a"], "served_model_name": ["x", "y"]}, None)
    config = build_config("tiny", {"lora_modules": ["tiny=a"], "served_model_name": ["x"]}, None)
    assert [name for name, _ in config.lora.modules] == ["tiny"]


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_serve_offers_exactly_the_flags_of_the_table(columns: str) -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": columns}).output
    offered = set(re.findall(r"--[a-z][a-z-]+", shown))
    off = {"--no-fuse", "--no-enforce-eager", "--no-enable-prefix-caching"}
    assert offered >= {f"--{flag.name}" for flag in FLAGS.values()} | off
    assert "--tensor-parallel-size" not in offered

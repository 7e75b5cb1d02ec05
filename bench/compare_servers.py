"""The same load against cotenant and vLLM, on the same machine in the same run.

python bench/compare_servers.py --trace azure_llm_2023_conv.csv --busiest 600 --sweep 1,2,4,6 --gpus 0,1 --json OUT

Each server gets one GPU; with one GPU they run one after the other. The model has the shapes of Llama-3.1-8B, random
weights, and a tokenizer made up here, which both servers read from the same folder. vLLM comes from the environment, or
from the folder of packages that --vllm-site names. A sweep ends for a server at the first rate that misses the targets.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
START_TIMEOUT_S = 240


def make_model_folder(folder: Path, config: dict[str, Any] = CONFIG) -> None:
    """A config and a tokenizer of one word per token, enough for servers that need no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {name: f"w{config[f'{name}_id']}" for name in ("bos_token", "eos_token")}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def commands(arguments: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """How each server is started, but for its port: by label, (command, environment)."""
    ours = [sys.executable, "-m", "cotenant", "serve", str(folder), "--load-format", "dummy"]
    ours += ["--policy", "inference-only", "--max-model-len", "16384", *arguments.cotenant_args.split()]
    theirs = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    theirs += ["--load-format", "dummy", "--max-model-len", "16384"]
    environment = dict(os.environ)
    site = {"PYTHONPATH": arguments.vllm_site} if arguments.vllm_site else {}
    vllm = {**environment, **site, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    servers = {"cotenant": (ours, environment), "vllm": (theirs, vllm)}
    for extra in arguments.vllm_variant:
        servers["vllm " + extra] = (theirs + extra.split(), vllm)
    return {label: server for label, server in servers.items() if not arguments.only or label in arguments.only}


def wait_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server at {url} ended with exit code {process.returncode}")
        try:
            with urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server at {url} was not healthy within {START_TIMEOUT_S} s")


def measure(
    label: str, command: list[str], environment: dict[str, str], gpu: str, port: int, arguments: argparse.Namespace
) -> None:
    """Start a server, and run the sweep against it; the figures go into ``result_file``. Raises SystemExit where there
    are none."""
    url = f"http://127.0.0.1:{port}"
    result = result_file(label, arguments)
    work = result.parent
    work.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # of an earlier run
    if label == "cotenant":
        command = [*command, "--data-dir", str(work / "data")]
    started = time.monotonic()
    with (work / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**environment, "CUDA_VISIBLE_DEVICES": gpu},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=work,
            start_new_session=True,
        )
        try:
            wait_healthy(url, process)
            print(f"{label}: healthy after {time.monotonic() - started:.1f} s", flush=True)
            load = [sys.executable, "-m", "cotenant", "bench", "serve", "--url", url, "--label", label]
            load += ["--slo-ttft-ms", "500", "--slo-tpot-ms", "40", "--sweep", arguments.sweep, "--stop-when-missed"]
            load += ["--warmup", "16", "--json", str(result), *arguments.load_args.split()]
            load += ["--trace", str(arguments.trace.resolve())] if arguments.trace else []
            load += ["--busiest", str(arguments.busiest)] if arguments.busiest else []
            with (work / "load.log").open("wb") as load_log:
                subprocess.run(load, env=dict(os.environ), stdout=load_log, stderr=subprocess.STDOUT, check=False)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    if not result.exists():
        raise SystemExit(f"the load did not run to its end; {work / 'load.log'} says why")


def result_file(label: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.json.parent, label.replace(" ", "_"), "result.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--busiest", type=float, default=0)
    parser.add_argument("--sweep", default="1,2,4")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--port", type=int, default=8100, help="of the first server; the others take the next ones")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--vllm-site", default="")
    parser.add_argument("--vllm-variant", action="append", default=[], help="another vLLM with these flags")
    parser.add_argument("--cotenant-args", default="")
    parser.add_argument("--load-args", default="", help="more flags for cotenant bench serve")
    arguments = parser.parse_args()
    arguments.json = arguments.json.resolve()
    folder = Path(tempfile.mkdtemp()) / "llama-3.1-8b"
    make_model_folder(folder)
    gpus = arguments.gpus.split(",")
    waiting = list(enumerate(commands(arguments, folder).items()))
    lanes, failed = [], []
    for lane, gpu in enumerate(gpus):

        def run(mine: list[tuple[int, tuple[str, tuple[list[str], dict[str, str]]]]], gpu: str) -> None:
            for index, (label, (command, environment)) in mine:
                try:
                    measure(label, command, environment, gpu, arguments.port + index, arguments)
                except (SystemExit, OSError) as error:
                    print(f"{label}: failed: {error}", file=sys.stderr, flush=True)
                    failed.append(label)

        lanes.append(threading.Thread(target=run, args=(waiting[lane :: len(gpus)], gpu)))
    for lane_thread in lanes:
        lane_thread.start()
    for lane_thread in lanes:
        lane_thread.join()
    runs = []
    for _, (label, _) in waiting:
        if label not in failed:
            found = json.loads(result_file(label, arguments).read_text())
            runs += found if isinstance(found, list) else [found]
    arguments.json.write_text(json.dumps(runs, indent=1) + "\n")
    if failed or not runs:
        raise SystemExit(f"{arguments.json} lacks {', '.join(failed) or 'any server: --only names none'}")


if __name__ == "__main__":
    main()

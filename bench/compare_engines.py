"""`cotenant bench engine` and the same for vLLM, one after the other on the same GPU.

python bench/compare_engines.py --json bench/results/engine_h200.json [--vllm-site DIR]

Shapes of Llama-3.1-8B, random weights. vLLM comes from the environment, or from the folder that --vllm-site names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from compare_servers import make_model_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--vllm-site", default="")
    parser.add_argument("--only", choices=["cotenant", "vllm"])
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    folder = work / "llama-3.1-8b"
    make_model_folder(folder)
    results = []
    if arguments.only != "vllm":
        ours = work / "cotenant.json"
        command = [sys.executable, "-m", "cotenant", "bench", "engine", str(folder), "--load-format", "dummy"]
        command += ["--batch-sizes", "1,8,32,64,128,256", "--num-adapters", "8,64", "--json", str(ours)]
        subprocess.run(command, check=True)
        results.append(json.loads(ours.read_text()))
    if arguments.only != "cotenant":
        theirs = work / "vllm.json"
        script = Path(__file__).parent / "vllm_engine.py"
        environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
        if arguments.vllm_site:
            environment["PYTHONPATH"] = arguments.vllm_site
        command = [sys.executable, str(script), str(folder), str(theirs), "--batch-sizes", "1,8,32,64,128,256"]
        subprocess.run(command, check=True, env=environment, cwd=work)
        results.append(json.loads(theirs.read_text()))
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Run `cotenant demo` under each policy, one after the other, and write what it measured to one JSON file.

python bench/compare_policies.py bench/results/policies_cpu.json
python bench/compare_policies.py bench/results/policies_busy_cpu.json --request-rate 12 --policies multitask,temporal
python bench/render.py            # renders them into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = "adaptive,multitask,temporal,whole-step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--policies", default=POLICIES, help="names with commas between them")
    parser.add_argument("--request-rate", default="3", help="chat requests a second")
    arguments = parser.parse_args()
    reports = []
    for policy in arguments.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "cotenant.cli.main", "demo", "--policy", policy, "--output", folder]
            subprocess.run([*command, "--beside", "", "--request-rate", arguments.request_rate], check=True)
            report = json.loads((Path(folder) / "report.json").read_text())
        loss = report["finetune"].pop("loss")
        report["finetune"] |= {"first_loss": loss[0], "last_loss": loss[-1]}
        reports.append(report)
    result = {
        "command": " ".join(["python bench/compare_policies.py", *sys.argv[1:]]),
        "request_rate": float(arguments.request_rate),
        "reports": reports,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

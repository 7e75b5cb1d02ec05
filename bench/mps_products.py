"""Whether torch's matrix products are right where NVIDIA MPS limits a process to a part of a GPU's SMs: of those with
an 8B Llama's matrices, the share of the elements that are wrong or were never written.

    python bench/mps_products.py 100 90 80 60 40 20
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mps import MpsError, running_mps

from cotenant.bench.machine import machine, versions
from cotenant.models.product_check import wrong_share

_HERE = "--here"
_ROWS = (16, 32, 64, 256, 2048, 8192)
_SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # out, in
_TIMEOUT_S = 120.0


def products_under(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a process finds that has this environment besides: ``num_sms``, and ``wrong``, by number of rows the largest
    share of a product's elements. Raises MpsError if it ends without an answer."""
    command = [sys.executable, __file__, _HERE]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise MpsError(f"matrix products could not be tried under MPS: {said[-1] if said else error}") from error
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def explained(found: Mapping[str, Any]) -> str | None:
    """What is wrong with these products, in words; None: nothing."""
    wrong = {rows: share for rows, share in found["wrong"].items() if share > 0}
    if not wrong:
        return None
    rows = max(wrong, key=lambda each: wrong[each])
    return (
        f"torch's matrix products are wrong on {found['num_sms']} SMs under MPS: with {', '.join(wrong)} rows, up to "
        f"{wrong[rows]:.1%} of the elements of one with {rows}"
    )


def _here() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    wrong = dict.fromkeys(_ROWS, 0.0)
    for num_out, num_in in _SHAPES:
        weight = torch.randn(num_out, num_in, dtype=torch.bfloat16, device=device)
        for rows in _ROWS:
            x = torch.randn(rows, num_in, dtype=torch.bfloat16, device=device)
            wrong[rows] = max(wrong[rows], wrong_share(x, weight))
    print(json.dumps({"num_sms": torch.cuda.get_device_properties(device).multi_processor_count, "wrong": wrong}))


def _share(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 100:
        raise argparse.ArgumentTypeError(f"a share of the SMs is from 1 to 100, in percent, not {text}")
    return int(text)


def main() -> None:
    if sys.argv[1:] == [_HERE]:
        return _here()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("share", type=_share, nargs="+", metavar="PERCENT", help="of the SMs")
    shares = parser.parse_args().share
    print(f"{', '.join(machine()['gpus'])}, torch {versions()['torch']}, CUDA {torch.version.cuda}, bf16")
    print(
        "   %   SMs" + "".join(f"{rows:>10}" for rows in _ROWS) + "  rows: wrong elements, the worst of four matrices"
    )
    with tempfile.TemporaryDirectory() as logs, running_mps(Path(logs) / "mps") as mps:
        for share in shares:
            found = products_under(mps.environment(None if share == 100 else share))
            figures = "".join(f"{found['wrong'][str(rows)]:>10.2%}" for rows in _ROWS)
            print(f"{share:>4}{found['num_sms']:>6}{figures}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except MpsError as error:
        raise SystemExit(f"error: {error}") from None

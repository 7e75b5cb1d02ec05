"""`cotenant bench colocate` as a command, with a short trace and little to train."""

from __future__ import annotations

import subprocess

from forked import run_command

SHORT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0,12,4
2023-11-16 18:15:46.3,9,6
"""
TRAINING = ["--seq-len", "16", "--tokens-per-step", "16", "--alone-seconds", "0.5", "--device", "cpu"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("bench", *arguments)


def bench_colocate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return bench("colocate", *arguments)

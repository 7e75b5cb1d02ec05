"""What the worker process does: it loads the model, says ``Ready``, and runs the loop. It dies with its parent, so two
workers never share a data folder."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from cotenant.config import ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.processes import die_with_parent
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.shortage import is_out_of_memory
from cotenant.runtime.tenants import Tenants, build_tenants
from cotenant.runtime.worker_lock import lock_worker
from cotenant.wire.channel import WorkerChannel
from cotenant.wire.messages import Ready, StartFailed

logger = logging.getLogger(__name__)

START_FAILED_EXIT_CODE = 2
# While a thread reads a job's files or an adapter, say, the loop waits so long for the interpreter each time that it
# has let go of it, as it does at each launch: Python's own 5 ms would be longer than a step.
SWITCH_S = 2e-5


def build_loop(
    config: ServerConfig, channel: WorkerChannel, started_s: float, *, after_crash: bool
) -> tuple[Tenants, WorkerLoop]:
    """Load everything and put it together. Sends ``Ready`` when requests can be served. ``after_crash``: nothing is run
    that nobody asked for, since that may have been the reason."""
    tenants = build_tenants(config, channel.send)
    tenants.lanes.only_for_jobs = after_crash
    if tenants.rehearsal is not None:
        tenants.rehearsal.only_for_jobs = after_crash
    serving, slo = tenants.serving, config.coexecution.slo(tenants.default_slo)
    profiles_itself = config.coexecution.self_profile
    if profiles_itself is None:
        profiles_itself = serving.device.torch_device.type != "cpu"
    loop = tenants.loop(channel, config.coexecution.policy, slo, profiles_itself=profiles_itself and not after_crash)
    channel.send(
        Ready(
            max_model_len=serving.max_model_len,
            num_layers=serving.resolved.spec.num_layers,
            vocab_size=serving.resolved.spec.vocab_size,
            num_pages=serving.engine.num_pages,
            page_tokens=config.cache.page_tokens,
            device=serving.device.name,
            dtype=str(serving.decoder.dtype).removeprefix("torch."),
            policy=config.coexecution.policy,
            slo=slo,
            load_s=time.monotonic() - started_s,
        )
    )
    serving.engine.compile_the_rest()
    return tenants, loop


def _command_line() -> list[str]:
    """The arguments. After ``--wait`` they are a line of JSON on standard input: the process was started before they
    were known, for its imports' sake. Ends the process if none come."""
    if sys.argv[1:] != ["--wait"]:
        return sys.argv[1:]
    line = sys.stdin.readline()
    return msgspec.json.decode(line, type=list[str]) if line else sys.exit(0)


def _end_at_once(channel: WorkerChannel) -> NoReturn:
    """End the process for the exception that is being handled, with the traceback and the exit code of one that nobody
    handles, but wait for no thread: Python would join those that read files, and on a disk that hangs they never end.
    Until this process has ended there is no other worker, and everybody waits."""
    try:
        traceback.print_exc()
        channel.close()  # what was sent goes out first
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)


def main() -> int:
    """Run a worker until it is drained. Exit code 2: it could not start, and said why in ``StartFailed``. It does
    not return where the loop raises."""
    parser = argparse.ArgumentParser(prog="cotenant-worker", description="the worker process of cotenant")
    parser.add_argument("--address", required=True, help="ZeroMQ address that the API process has bound")
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the server's configuration")
    parser.add_argument("--parent-pid", required=True, type=int, help="the API process; this one ends with it")
    parser.add_argument("--after-crash", action="store_true", help="in place of a worker that died")
    arguments = parser.parse_args(_command_line())
    die_with_parent(arguments.parent_pid)
    # A terminal sends Ctrl-C, and its end, to the whole group; the API process decides how this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    started_s = time.monotonic()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=ServerConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = WorkerChannel(arguments.address)
    try:
        lock_worker(Path(config.data_dir))  # before it is looked at how much memory is free
        tenants, loop = build_loop(config, channel, started_s, after_crash=arguments.after_crash)
    except Exception as error:
        if isinstance(error, CotenantError):
            reason = error.message
        elif is_out_of_memory(error):
            reason = (
                "there is not enough memory for the model and what serving needs beside it; lower --max-model-len, "
                f"--max-num-seqs or --max-num-batched-tokens, or take a smaller model ({error})"
            )
        else:
            raise
        channel.send(StartFailed(reason))
        channel.close()
        return START_FAILED_EXIT_CODE
    sys.setswitchinterval(SWITCH_S)
    # What was loaded stays: keep the collector from walking it during an iteration.
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    except Exception:
        _end_at_once(channel)
    tenants.latencies.save(tenants.predictor)
    channel.close()
    return 0

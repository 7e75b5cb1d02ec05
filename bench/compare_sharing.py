"""What one gets without co-execution in one process: this server without jobs and PEFT's training, each in a process of
its own, under the loads of `cotenant bench colocate`.

    cotenant bench colocate llama-3.1-8b --load-format dummy --trace conv.csv --busiest 300 --json grid.json
    python bench/compare_sharing.py --trace conv.csv --busiest 300 --mps-shares 100 --append-to grid.json [--site DIR]
    cotenant bench colocate-report grid.json --html grid.html

``mps``: both on one GPU under NVIDIA MPS; policy `mps-60` gives the server 60% of the SMs and training the other 40%,
`mps-100` limits neither. A share with which torch's matrix products are wrong (bench/mps_products.py) is not measured.
``separate``: two GPUs; as they share nothing, one GPU measures first training alone and then the server alone. With
``--no-mps`` both run side by side without MPS (policy `no-mps`): a GPU then gives them turns.

Training is PEFT with Liger's kernels (bench/peft_finetune.py) at the batch size, of those named, that is fastest alone;
harvest is its speed beside the load as a share of its own speed alone, measured in the same run. Targets change nothing
of what these do, so each load is measured once and judged for each target. Requests come over HTTP here, and without it
in `bench colocate`. ``--append-to F`` adds the cells to those of F, in place of earlier ones of the same policy and
place; servers read compressed weights where F is of such. Logs of the daemon, the servers and the training are kept in
``--logs``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compare_finetune import peer_environment, why_not_importable
from compare_servers import CONFIG, make_model_folder, wait_healthy
from mps import Mps, MpsError, running_mps
from mps_products import explained, products_under
from sharing_flags import ALL_SMS, config_name, needs_mps, parse, peer_label
from sharing_loads import ENDING_SIGNALS, Client, Measured
from sharing_processes import SharingError, Training, last_error, running, tail, training
from sharing_report import merged, new_report, places_missing

from cotenant.bench.colocate_text import comparison_lines, line, with_parts
from cotenant.bench.comparison import SEPARATE, compare
from cotenant.bench.server import free_port
from cotenant.cli.colocate_figures import cell_figures
from cotenant.cli.colocate_loads import SteadyPlan, TracePlan, plan_trace, read_traces
from cotenant.core.errors import CotenantError
from cotenant.core.plan import Slo
from cotenant.runtime.colocate_cell import judge
from cotenant.runtime.load import Answer

_WARM_STEPS = 3  # of training, before anything is measured


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """``parameters``: as its cells have them. ``trace`` None: steady decoding."""

    parameters: dict[str, Any]
    seed: int
    trace: TracePlan | None = None

    def send(self, client: Client) -> Measured:
        if self.trace is not None:
            return client.trace(self.trace, self.seed)
        batch_size, context, num_tokens = (self.parameters[name] for name in ("batch_size", "context", "num_tokens"))
        return client.steady(batch_size, context, num_tokens, self.seed)


@dataclass(slots=True)
class Sharing:
    """One run: what is measured goes into ``report``, and the file is written after each load."""

    arguments: argparse.Namespace
    folder: Path
    loads: Sequence[SharedLoad]
    slos: Sequence[Slo]
    max_model_len: int
    report: dict[str, Any]

    def train_alone(self) -> int:
        """Measure training alone at each batch size; the fastest of them. Raises SharingError if none can be run."""
        trials = self.report["sharing"]["trials"]
        for size in self.arguments.batch_sizes:
            name = f"alone-{size}"
            try:
                with self._training(name, size, {}) as trained:
                    start_s = trained.last_end_s
                    end_s = start_s + self.arguments.alone_seconds
                    speed = trained.tokens_per_s(start_s, end_s, self.arguments.timeout)
            except SharingError as error:
                say(f"training alone, {size} sequences a micro-batch: skipped: {error}")
                continue
            trials.append({"batch_size": size, "tokens_per_s": round(speed, 2), **trained.setting})
            say(f"training alone, {size} sequences a micro-batch: {speed:.0f} tokens/s")
        if not trials:
            raise SharingError(f"training did not run at any batch size; see {self.arguments.logs}")
        best = max(trials, key=lambda trial: trial["tokens_per_s"])
        self.report |= {name: best[name] for name in ("dtype", "device", "num_sms", "versions")}
        self.report["train_alone_tokens_per_s"] = best["tokens_per_s"]
        return int(best["batch_size"])

    def separate(self) -> None:
        """The server with a GPU to itself, and the training that the other GPU would have done meanwhile."""
        with self._server(SEPARATE, [], {}) as client:
            for load in self.loads:
                self._add(SEPARATE, load, load.send(client), self.report["train_alone_tokens_per_s"])

    def shared(self, policy: str, batch_size: int, mps: Mps | None, server_share: int | None) -> None:
        """Both on one device; ``server_share``: percent of its SMs, None or 100: neither is limited."""
        limits = [None, None] if server_share in (None, ALL_SMS) else [server_share, 100 - server_share]
        server_environment, environment = [{} if mps is None else mps.environment(limit) for limit in limits]
        if mps is not None:
            check_shares({"the server": server_environment, "training": environment})
        memory = ["--gpu-memory-utilization", str(self.arguments.server_memory)]
        # The server first: what it may take counts the memory that is in use when it starts.
        with (
            self._server(policy, memory, server_environment) as client,
            self._training(policy, batch_size, environment) as trained,
        ):
            if mps is not None:
                clients = mps.clients()
                say(f"{policy}: clients of MPS: {', '.join(clients)}; training sees {trained.setting['num_sms']} SMs")
                if not clients:
                    raise SharingError(f"both run without MPS; see {self.arguments.logs / 'mps'}")
            for load in self.loads:
                measured = load.send(client)
                start_s, end_s = measured.origin_s + measured.start_s, measured.origin_s + measured.end_s
                self._add(policy, load, measured, trained.tokens_per_s(start_s, end_s, self.arguments.timeout))
        self.report["sharing"]["policies"][policy] = {"training_num_sms": trained.setting["num_sms"]}

    def _add(self, policy: str, load: SharedLoad, measured: Measured, train_tokens_per_s: float) -> None:
        alone = self.report["train_alone_tokens_per_s"]
        check_answers(measured.answers, self.arguments.logs / f"server-{policy}.log")
        for slo in self.slos:
            cell = judge(policy, slo, measured.answers, measured.start_s, measured.end_s, with_ttft=measured.with_ttft)
            cell = replace(cell, train_tokens_per_s=train_tokens_per_s)
            # Of this library: `bench colocate` has its own speed alone.
            figures = {**cell_figures(load.parameters, cell, alone), "train_alone_tokens_per_s": alone}
            self.report["cells"].append(figures)
            say(self._last_line())
        failures = {answer.failure for answer in measured.answers if answer.failure is not None}
        if failures:
            say(f"{policy}: failed requests: {'; '.join(sorted(failures)[:3])}")
        self.save()

    def _last_line(self) -> str:
        """The last cell, with the part of its trace where the file that it is added to has others."""
        path = self.arguments.append_to
        others = [] if path is None else json.loads(path.read_text())["cells"]
        return line(with_parts([*others, *self.report["cells"]])[-1])

    def save(self) -> None:
        """Write what has been measured so far to the files that were asked for."""
        if self.arguments.json is not None:
            write(self.arguments.json, self.report)
        if self.arguments.append_to is not None and self.report["cells"]:
            base = json.loads(self.arguments.append_to.read_text())
            write(self.arguments.append_to, merged(base, self.report))

    @contextlib.contextmanager
    def _server(self, policy: str, flags: Sequence[str], environment: dict[str, str]) -> Iterator[Client]:
        arguments, port = self.arguments, free_port()
        log = arguments.logs / f"server-{policy}.log"
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "cotenant", "serve", str(self.folder), "--load-format", "dummy"]
        command += ["--policy", "inference-only", "--device", arguments.device, "--dtype", arguments.dtype]
        # By itself each would go by its memory.
        command += ["--compress-weights", "on" if self.report["compressed"] else "off"]
        command += ["--max-model-len", str(self.max_model_len), "--max-queue", "1000000", "--port", str(port), *flags]
        # They change nothing of this policy; without them a server on a CPU measures its own first.
        command += ["--slo-ttft-ms", str(arguments.slo_ttft_ms), "--slo-tpot-ms", str(max(arguments.slo_tpot_ms))]
        command += arguments.cotenant_args.split()
        url = f"http://127.0.0.1:{port}"
        with (
            tempfile.TemporaryDirectory(prefix="cotenant-sharing-") as data,
            running([*command, "--data-dir", data], {**self._device(), **environment}, log, log) as process,
        ):
            say(f"{policy}: server starting, log {log}")
            try:
                wait_healthy(url, process)
            except SystemExit as error:
                if not isinstance(error.code, str):  # a signal
                    raise
                raise SharingError(f"{error}: {tail(log)} ({log})") from None
            config = json.loads((self.folder / "config.json").read_text())
            client = Client(url, str(self.folder), config["vocab_size"], self.max_model_len)
            client.warm_up()
            yield client

    @contextlib.contextmanager
    def _training(self, name: str, batch_size: int, environment: dict[str, str]) -> Iterator[Training]:
        """Training that has done its first steps."""
        arguments = self.arguments
        command = [sys.executable, str(Path(__file__).parent / "peft_finetune.py"), str(self.folder), "--endless"]
        command += ["--label", peer_label(arguments), "--liger", arguments.liger]
        command += [] if arguments.no_compile else ["--compile"]
        command += ["--batch-size", str(batch_size), "--seq-len", str(arguments.seq_len), "--r", str(arguments.r)]
        command += ["--tokens-per-step", str(arguments.tokens_per_step), "--dtype", arguments.dtype]
        site = peer_environment(arguments.site)
        found = {variable: site[variable] for variable in ("HF_HUB_OFFLINE", "PYTHONPATH")}
        with training(command, {**found, **self._device(), **environment}, arguments.logs, name) as trained:
            say(f"{name}: training starting, log {trained.log}")
            trained.wait_for_steps(_WARM_STEPS, arguments.timeout)
            yield trained

    def _device(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""} if self.arguments.device == "cpu" else {}


def main() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(
            number, lambda number, _: sys.exit(128 + number)
        )  # so that the processes and the daemon are ended
    arguments = parse(__doc__)
    try:
        problems = measure(arguments)
    except (CotenantError, MpsError, SharingError) as error:
        raise SystemExit(f"error: {error}") from None
    except asyncio.CancelledError:
        raise SystemExit("error: ended by a signal while a load ran") from None
    if problems:
        raise SystemExit(f"{len(problems)} not measured: {'; '.join(problems)}")


def check_answers(answers: Sequence[Answer], log: Path) -> None:
    """Raise SharingError where most requests failed: a server that has come to grief is no way of sharing. Some may."""
    failures = [answer.failure for answer in answers if answer.failure is not None]
    if len(failures) > len(answers) / 2:
        reasons = "; ".join(sorted(set(failures))[:3])
        raise SharingError(f"{len(failures)} of {len(answers)} requests failed ({reasons}): {last_error(log)} ({log})")


def check_shares(environments: Mapping[str, Mapping[str, str]]) -> None:
    """Raise SharingError where matrix products are wrong under MPS: neither answers nor adapters would be right, and
    what is left out takes no time."""
    tried: list[Mapping[str, str]] = []
    for name, environment in environments.items():
        if environment in tried:
            continue
        tried.append(environment)
        problem = explained(products_under(environment))
        if problem is not None:
            raise SharingError(f"{name} cannot be right: {problem}")


def check_peers(arguments: argparse.Namespace) -> None:
    """Raise SharingError where training's packages cannot be imported."""
    modules = ("peft", "transformers", *(() if arguments.liger == "none" else ("liger_kernel.transformers",)))
    problem = why_not_importable(modules, peer_environment(arguments.site))
    if problem is not None:
        raise SharingError(f"{problem}; --site names a folder of packages, --liger none does without Liger")


def measure(arguments: argparse.Namespace) -> list[str]:
    """All that was asked for. What could not be measured, in words."""
    config = CONFIG if arguments.config is None else json.loads(arguments.config.read_text())
    loads, longest = planned_loads(arguments, config["max_position_embeddings"])
    slos = [
        Slo(arguments.slo_ttft_ms, tpot_ms, attainment=arguments.slo_attainment) for tpot_ms in arguments.slo_tpot_ms
    ]
    policies = named_policies(arguments)
    if arguments.append_to is not None:
        check_append(arguments, config_name(arguments), [load.parameters for load in loads], slos)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        # At first, and not when training alone was measured for nothing.
        mps = stack.enter_context(running_mps(arguments.logs / "mps")) if needs_mps(arguments) else None
        check_peers(arguments)
        folder = Path(work) / config_name(arguments)
        make_model_folder(folder, config)
        report = new_report(
            folder.name, arguments, peer_label(arguments), compressed=is_compressed(arguments.append_to)
        )
        sharing = Sharing(arguments, folder, loads, slos, longest, report)
        batch_size = sharing.train_alone()
        for policy, share in policies.items():
            try:
                if policy == SEPARATE:
                    sharing.separate()
                else:
                    sharing.shared(policy, batch_size, mps, share)
            except (SharingError, MpsError) as error:
                problems.append(f"{policy}: {error}")
                say(problems[-1])
    if report["cells"]:
        report["comparison"] = compare(report, arguments.slo_attainment)
    sharing.save()
    shown = report if arguments.append_to is None else json.loads(arguments.append_to.read_text())
    for text in comparison_lines(shown["comparison"]) if shown.get("comparison") else ():
        say(text)
    return problems


def is_compressed(base: Path | None) -> bool:
    """Whether the file that the cells are added to, if there is one, is of steps that read compressed weights."""
    return base is not None and bool(json.loads(base.read_text()).get("compressed"))


def planned_loads(arguments: argparse.Namespace, limit: int) -> tuple[list[SharedLoad], int]:
    """As `bench colocate` plans them, and the tokens of the longest sequence. Raises InvalidInputError."""
    limit = arguments.max_model_len or limit
    sizes, context, num_tokens = arguments.steady_batch_sizes, arguments.context, arguments.num_tokens
    traces = read_traces(arguments.trace, arguments.busiest, limit, arguments.window)
    steady = [SteadyPlan(size, context, num_tokens) for size in sizes]
    loads = [SharedLoad(plan.parameters, seed) for seed, plan in enumerate(steady)]
    for name, trace in traces.items():
        for scale in arguments.time_scale:
            plan = plan_trace(name, trace, scale, arguments.min_requests, arguments.cell_seconds)
            loads.append(SharedLoad(plan.parameters, len(loads), plan))
    if not loads:
        raise SharingError("--steady-batch-sizes or --trace: which load is to be served?")
    longest = max(
        [each.input_len + each.output_len for trace in traces.values() for each in trace.requests]
        + [plan.longest for plan in steady]
    )
    if longest > limit:
        raise SharingError(f"--context: {num_tokens} tokens around {context} take up to {longest}, the model {limit}")
    return loads, arguments.max_model_len or longest


def named_policies(arguments: argparse.Namespace) -> dict[str, int | None]:
    """What cells call each way that was asked for, with the server's share of the SMs in percent where there is one."""
    found: dict[str, int | None] = {}
    for mode in arguments.modes:
        if mode == "separate":
            found[SEPARATE] = None
        elif arguments.no_mps:
            found["no-mps"] = None
        else:
            found |= {f"mps-{share}": share for share in arguments.mps_shares}
    return found


def check_append(
    arguments: argparse.Namespace, model: str, loads: Sequence[dict[str, Any]], slos: Sequence[Slo]
) -> None:
    """Raise SharingError unless the file is a run of `bench colocate` of the same model, job and places."""
    path = arguments.append_to
    try:
        base = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SharingError(f"--append-to: {path} cannot be read: {error}") from error
    if not isinstance(base, dict) or base.get("kind") != "colocate":
        raise SharingError(f"--append-to: {path} is not what `cotenant bench colocate --json` writes")
    theirs = {"model": base["model"], "dtype": base["dtype"], **base["training"]}
    ours = {"model": model, "dtype": arguments.dtype, "seq_len": arguments.seq_len, "r": arguments.r}
    for name, value in ours.items():
        if theirs[name] != value:
            raise SharingError(f"--append-to: {name} is {theirs[name]} in {path}, here it is {value}")
    missing = places_missing(base, loads, slos)
    if missing:
        raise SharingError(f"--append-to: {path} has nothing of {'; '.join(missing)}: name its loads and targets")


def write(path: Path, content: dict[str, Any]) -> None:
    """At once: a run that is cut off leaves the file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(content) + "\n")
    new.replace(path)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()

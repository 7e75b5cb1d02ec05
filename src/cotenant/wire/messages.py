"""Every message that crosses the process boundary. msgspec encodes them as tagged MessagePack arrays.

The API process sends ``ToWorker``; the worker answers with ``FromWorker``. Neither waits for the other: requests are
matched by id, jobs by job id, and a message about something that is gone is ignored by its receiver.
"""

from __future__ import annotations

import msgspec

from cotenant.core.job import JobSpec, StepMetrics
from cotenant.core.plan import Slo
from cotenant.core.request import Request, SequenceOutput, TokenLogprobs


class AddRequest(msgspec.Struct, tag="add_request", frozen=True):
    request: Request


class AbortRequests(msgspec.Struct, tag="abort_requests", frozen=True):
    """The client is gone or has enough: free the sequences at once. No output follows."""

    request_ids: tuple[str, ...]


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Read the adapter in this folder and serve it under ``name``, in place of any other of that name once it has been
    read. Answered by ``AdapterLoaded`` or ``AdapterFailed``; after that the one before goes on serving."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Forget the adapter in this folder under ``name``, but no other that has the name by now. Requests that run on it
    keep it until they end. No answer, but to a ``LoadAdapter`` of the same that has had none yet: ``AdapterFailed``."""

    name: str
    path: str


class StartJob(msgspec.Struct, tag="start_job", frozen=True):
    """Run this job from its newest checkpoint in ``spec.folder``, or from the beginning. One job at a time."""

    spec: JobSpec


class PauseJob(msgspec.Struct, tag="pause_job", frozen=True):
    """Discard the step in flight, write a checkpoint, free the memory. Answered by ``JobPaused``."""

    job_id: str


class CancelJob(msgspec.Struct, tag="cancel_job", frozen=True):
    """Discard the step in flight, write a checkpoint, forget the job. Answered by ``JobCancelled``."""

    job_id: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Finish the live requests, pause the running job with a checkpoint, answer ``Drained``, and exit."""


ToWorker = AddRequest | AbortRequests | LoadAdapter | UnloadAdapter | StartJob | PauseJob | CancelJob | Drain


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded. ``slo`` are the targets in force, given or measured."""

    max_model_len: int
    num_layers: int
    vocab_size: int
    num_pages: int
    page_tokens: int
    device: str
    dtype: str
    policy: str
    slo: Slo
    load_s: float


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The worker cannot serve this model; it exits after this message and need not be restarted."""

    message: str


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """What one iteration produced, in one message."""

    outputs: tuple[SequenceOutput, ...]


class PromptLogprobs(msgspec.Struct, tag="prompt_logprobs", frozen=True):
    """Stretches of requests' ``SequenceOutput.prompt_logprobs`` that are too many for one message, before the outputs
    that they belong to. Only the channel sees it: it takes them apart and puts them together."""

    stretches: tuple[tuple[str, tuple[TokenLogprobs | None, ...]], ...]


class RequestFailed(msgspec.Struct, tag="request_failed", frozen=True):
    """This request cannot be served (a bad adapter, a prompt that can never fit)."""

    request_id: str
    message: str
    code: str | None = None
    param: str | None = None


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", frozen=True):
    """The adapter was read, fits the model, and can be used by requests."""

    name: str


class AdapterFailed(msgspec.Struct, tag="adapter_failed", frozen=True):
    """The folder holds no adapter that fits this model; ``message`` says what is wrong."""

    name: str
    message: str


class JobStarted(msgspec.Struct, tag="job_started", frozen=True):
    """``resumed_step`` 0: from the beginning. ``step_tokens``: training tokens of an average step, for the ETA."""

    job_id: str
    total_steps: int
    resumed_step: int
    step_tokens: float


class JobWarning(msgspec.Struct, tag="job_warning", frozen=True):
    """Something that the job's owner should know. The job goes on. May be repeated after a crash."""

    job_id: str
    message: str


class JobMetrics(msgspec.Struct, tag="job_metrics", frozen=True):
    """Steps that were taken, oldest first; without any, an estimate anew. May repeat steps that were reported before a
    crash, with equal figures.

    ``trained_tokens``: all tokens trained on so far; ``remaining_s``: an estimate from measured progress.
    """

    job_id: str
    steps: tuple[StepMetrics, ...]
    trained_tokens: int
    remaining_s: float | None


class CheckpointSaved(msgspec.Struct, tag="checkpoint_saved", frozen=True):
    """A checkpoint that can be served: ``path`` holds the adapter in PEFT's format. May be repeated after a crash."""

    job_id: str
    step: int
    path: str
    metrics: StepMetrics | None


class JobPaused(msgspec.Struct, tag="job_paused", frozen=True):
    job_id: str
    step: int


class JobCancelled(msgspec.Struct, tag="job_cancelled", frozen=True):
    job_id: str
    step: int


class JobSucceeded(msgspec.Struct, tag="job_succeeded", frozen=True):
    """The final adapter is on disk at ``path`` and is served under the job's adapter name from now on.

    ``total_steps``: steps taken, fewer than announced if the job stopped early. ``best_step``: the step whose adapter
    it is, where that was chosen by the validation file.
    """

    job_id: str
    path: str
    trained_tokens: int
    total_steps: int
    best_step: int | None = None


class JobFailed(msgspec.Struct, tag="job_failed", frozen=True):
    """``bad_step``: the step whose weights gave a loss that is not finite; its checkpoint is not to be served.
    ``param``: the part of the request that is wrong."""

    job_id: str
    code: str
    message: str
    step: int
    bad_step: int | None = None
    param: str | None = None


# Upper bounds of the buckets that relative errors are counted in, without the last one's, which has none.
ERROR_BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


class ErrorCounts(msgspec.Struct, frozen=True):
    """Relative errors since the worker started: ``counts`` in each bucket of ``ERROR_BOUNDS`` and beyond, and their
    ``total``."""

    counts: tuple[int, ...]
    total: float


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Gauges and running totals since the worker started, sent a few times a second.

    ``prefix_cache_queries``, ``prefix_cache_hits``: prompt tokens looked up in the prefix cache and found there.
    ``slack_ms``: of the most urgent request by "tpot", and by "ttft" of the one that has waited longest, if any has.
    ``margin``: the share of the TPOT target that is learned, where the policy aims at it.
    ``step_gap_us``: median time that the device had nothing to do between two online steps of late.
    ``num_iterations``: by mode. ``prediction_errors``: of iterations, by "alone", in which one tenant had the device to
    itself, and "corun". ``harvest_ratio``: what the tasklets that ended of late would have taken alone, as a share of
    the time; None without a job.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    step_gap_us: float | None = None
    num_iterations: dict[str, int] = {}
    num_tasklets: dict[str, int] = {}
    num_fused_tasklets: int = 0
    trained_tokens: int = 0
    tasklet_busy_s: float = 0.0
    online_busy_s: float = 0.0
    mode: str = "none"
    slack_ms: dict[str, float] = {}
    margin: float | None = None
    prediction_error_ratio: float | None = None
    prediction_errors: dict[str, ErrorCounts] = {}
    harvest_ratio: float | None = None
    job_id: str | None = None


class Drained(msgspec.Struct, tag="drained", frozen=True):
    """Everything asked for has ended; the worker exits now."""


FromWorker = (
    Ready
    | StartFailed
    | Outputs
    | PromptLogprobs
    | RequestFailed
    | AdapterLoaded
    | AdapterFailed
    | JobStarted
    | JobWarning
    | JobMetrics
    | CheckpointSaved
    | JobPaused
    | JobCancelled
    | JobSucceeded
    | JobFailed
    | Stats
    | Drained
)

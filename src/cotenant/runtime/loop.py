"""The worker loop: observe, plan, execute, publish."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import Protocol

from cotenant.core.errors import CotenantError
from cotenant.core.plan import IterationRecord, Mode, Partition, Plan, RequestView, Slo, Snapshot
from cotenant.core.request import AdapterRef, FinishReason, SequenceOutput
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.gaps import BatchGaps
from cotenant.runtime.idle_check import IdleCheck
from cotenant.runtime.lanes import LaneCaptures
from cotenant.runtime.prompts import PromptArrangement
from cotenant.runtime.reach import TargetReach
from cotenant.runtime.rehearsal import Rehearsal
from cotenant.runtime.self_profile import SelfProfile
from cotenant.runtime.signs_of_life import SignsOfLife
from cotenant.runtime.stats import LoopStats
from cotenant.runtime.trace import Trace
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import Policy
from cotenant.scheduler.answers import AnswerLengths
from cotenant.scheduler.base import next_batch_ms
from cotenant.scheduler.chunking import most_margin
from cotenant.scheduler.crowding import prompts_ms
from cotenant.scheduler.margin import Margin
from cotenant.scheduler.slack import decode_slack_ms, first_token_slack_ms
from cotenant.wire.messages import (
    AbortRequests,
    AdapterFailed,
    AdapterLoaded,
    AddRequest,
    CancelJob,
    Drain,
    Drained,
    FromWorker,
    JobPaused,
    LoadAdapter,
    Outputs,
    PauseJob,
    RequestFailed,
    StartJob,
    ToWorker,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

_STATS_EVERY_S = 0.2
_SAVE_EVERY_S, _SAVE_BUSY_AFTER_S = 60.0, 120.0  # so much later where the loop is never idle
_IDLE_WAIT_S = 0.05
_BUSY_WAIT_S = 0.001
_SHORT_WAIT_S = 0.005  # a job begins, or goes on, so much later at most than it could


class Channel(Protocol):
    """Where messages come from and go to; ``WorkerChannel`` is one."""

    def send(self, message: FromWorker) -> None: ...

    def receive(self) -> list[ToWorker]:
        """All messages that are here now."""

    def wait(self, timeout_s: float) -> bool:
        """Block until a message can be received, at most ``timeout_s``. True if there is one."""

    def pending(self) -> bool:
        """True if a message can be received now."""


class WorkerLoop:
    """Owns nothing but the order of things. Ends after a ``Drain``, or when the API process is gone.

    ``partitions``: of the SMs, that the policy may plan. ``sizes_chunks``: prompt chunks are sized by the running
    requests' slack; otherwise the configured limit is all.
    """

    def __init__(
        self,
        channel: Channel,
        engine: OnlineEngine,
        training: TrainingTenant,
        policy: Policy,
        executor: Executor,
        predictor: LatencyPredictor,
        slo: Slo,
        can_fuse: bool,
        partitions: tuple[Partition, ...] = (),
        sizes_chunks: bool = False,
        trace: Trace | None = None,
        save_part: Callable[[], bool] | None = None,
        self_profile: SelfProfile | None = None,
        lanes: LaneCaptures | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        """``save_part``: keeps a small part of what the predictor has learned; whether that was the last. Called now
        and then while there is nothing to do, and seldom where there always is something. ``self_profile``: measures in
        idle time what the predictor lacks. ``lanes``: what partitions wait for; None: nothing. ``rehearsal``: of what
        jobs will run; None: none."""
        self._channel = channel
        self._engine = engine
        self._training = training
        self._policy = policy
        self._executor = executor
        self._predictor = predictor
        self._slo = slo
        self._can_fuse = can_fuse
        self._partitions = partitions
        self._sizes_chunks = sizes_chunks
        self._trace = trace
        self._save_part = save_part
        self._self_profile = self_profile
        self._lanes = lanes
        self._rehearsal = rehearsal
        # By time.monotonic, like requests' times:
        self._begin_s = time.monotonic()  # who has waited for longer waited for the worker
        self._next_save_s = time.monotonic() + _SAVE_EVERY_S
        self._busy_s = time.monotonic()  # when there was something to do, the last time
        self._idle_since_s = -math.inf
        self._last_tokens_s = -math.inf  # when some went out
        self._next_stats_s = 0.0
        self._has_learned = False  # since the last time
        self._stats = LoopStats(predictor)
        self._signs = SignsOfLife(channel.send)
        self._reach = TargetReach(slo)
        self._margin = Margin(slo)
        self._margin.begin_at(policy.first_margin(slo, 0.0))
        self._answers = AnswerLengths()
        self._prompts = PromptArrangement(engine, executor, predictor, slo, self._answers, sizes_chunks=sizes_chunks)
        for view in engine.views():  # of another loop's requests
            if view.first_token_s is not None:
                self._margin.resume(view.request_id, view.first_token_s, view.num_generated)
        self._seen: tuple[RequestView, ...] = ()  # by the last plan
        self._gaps = BatchGaps()
        self._idle_check = IdleCheck(engine, channel.pending)
        self._parent_pid = os.getppid()
        self._draining = False
        self._finished = False

    @property
    def margin(self) -> float:
        """The share of the TPOT target that is aimed at now."""
        return self._margin.aim(time.monotonic())

    def take_over_margin(self, other: WorkerLoop) -> None:
        """Aim as close to the targets as another loop's requests have taught that one, and no closer."""
        self._margin.take_over(other._margin)
        self._margin.may_rise = False

    @property
    def begun(self) -> bool:
        """Whether the next iteration goes on with the plan of the one before: tasklets follow the batch in flight."""
        return self._executor.begun is not None

    def run(self) -> None:
        """Iterate until there is nothing more to serve. Where that raises, the trace has what was before."""
        try:
            while not self._finished:
                self.iterate()
        finally:
            if self._trace is not None:
                self._trace.close()

    def iterate(self) -> IterationRecord:
        """One iteration, and what it did."""
        phases_s = [time.perf_counter()]
        snapshot = self._observe()
        phases_s.append(time.perf_counter())
        profile = self._active_profile
        plan, interrupted = self._executor.begun, self._has_come
        # Who has come since waits for no more of what was begun than the plan says.
        if plan is not None and _awaited(snapshot.requests) - _awaited(self._seen):
            plan, interrupted = (plan, _always) if plan.hold_ms else (None, interrupted)
        if plan is None:
            plan = self._policy.plan(snapshot) if profile is None else profile.plan()
        self._seen = snapshot.requests
        phases_s.append(time.perf_counter())
        if profile is None:
            if snapshot.batch.empty:
                self._gaps.interrupt()
            else:
                self._gaps.batch_begins(phases_s[-1])
        record = self._executor.execute(plan, self._emit, interrupted)
        phases_s.append(time.perf_counter())
        if not record.batch.empty:
            self._gaps.batch_ended(phases_s[-1])
        if snapshot.requests and profile is None:  # live until now, if no longer
            self._idle_since_s = time.monotonic()
        self._publish(record, snapshot, plan)
        if self._trace is not None:
            deviation = self._predictor.last_deviation_ratio
            self._trace.iteration([*phases_s, time.perf_counter()], plan, record, deviation)
            self._trace.flush()
        return record

    def _has_come(self) -> bool:
        """Whether there is a message; asked between tasklets, of which a plan may have minutes."""
        self._signs.repeat_if_due()
        return self._channel.pending()

    @property
    def _active_profile(self) -> SelfProfile | None:
        """The self-profile, while the batches are its own."""
        profile = self._self_profile
        return profile if profile is not None and profile.is_active else None

    def _observe(self) -> Snapshot:
        for message in self._channel.receive():
            if self._self_profile is not None and isinstance(message, AddRequest | StartJob | Drain):
                self._self_profile.stop()
            self._handle(message)
        self._training.tidy()
        self._training.start_prepared()
        now_s, requests, is_profiling = time.monotonic(), self._engine.views(), self._active_profile is not None
        in_flight = self._executor.in_flight
        if not is_profiling and any(request.num_prompt_tokens_left for request in requests):
            self._prompts.arrange(requests, now_s, in_flight)
        batch = self._engine.next_shape()
        comes_in = self._sizes_chunks and batch.prefill_tokens > 0
        if batch.num_decode and not is_profiling and (comes_in or not self._margin.has_learned):
            step_ms = self._predictor.batch_ms(self._engine.decodes())
            if step_ms is not None:
                self._tell_margin(step_ms, comes_in=comes_in)
        margin = self.margin
        return Snapshot(
            now_s=now_s,
            slo=self._slo,
            batch=batch,
            requests=requests,
            job=self._training.view(),
            can_fuse=self._can_fuse,
            margin=margin,
            taken_off=self._margin.value - margin,
            idle_s=0.0 if requests else time.monotonic() - self._idle_since_s,
            largest_gap_s=self._gaps.largest_s,
            partitions=self._partitions if self._lanes is None else self._lanes.usable(self._partitions),
            num_ending=self._engine.num_ending if batch.prefill_tokens else 0,
            in_flight=in_flight,
            wait_ms=self._executor.wait_ms,
            least_answer=self._answers.least,
            since_tokens_ms=(now_s - self._last_tokens_s) * 1e3,
        )

    def _tell_margin(self, step_ms: float, *, comes_in: bool) -> None:
        """Where to begin and what to expect. ``step_ms``: of the decodes alone. ``comes_in``: prompts join them."""
        if not self._margin.has_learned:
            self._margin.begin_at(self._policy.first_margin(self._slo, step_ms))
        if comes_in:
            self._margin.expect_prompts(most_margin(self._slo, step_ms), time.monotonic(), step_ms)

    def _publish(self, record: IterationRecord, snapshot: Snapshot, plan: Plan) -> None:
        self._margin.has_job = snapshot.job is not None
        if record.mode is not Mode.NONE and snapshot.requests:
            step_ms = self._predictor.batch_ms(record.batch, behind_tasklets=record.behind_tasklets)
            trained_ms = max(0.0, record.total_ms - (step_ms or 0.0))
            self._margin.trained(trained_ms, time.monotonic())
        self._predictor.observe(record)
        is_wanted = self._self_profile is None or not self._self_profile.note(record)
        if is_wanted:
            if self._sizes_chunks and record.batch.prefill_tokens:
                self._margin.prompts_took(prompts_ms(self._predictor, record.batch), time.monotonic())
            self._stats.count(record, time.perf_counter(), has_job=self._training.job_id is not None)
            self._reach.note(record)
        else:
            self._executor.gaps_ms.clear()
        for request_id, error in self._engine.take_failures():
            self._margin.forget(request_id)
            self._channel.send(RequestFailed(request_id, error.message, error.code, error.param))
        for ref, failure in self._engine.take_loaded():
            answer = AdapterLoaded(ref.name) if failure is None else AdapterFailed(ref.name, failure.message)
            self._channel.send(answer)
        if time.monotonic() >= self._next_stats_s:
            self._publish_progress(snapshot, with_stats=is_wanted)
        trains = plan.num_tasklets > 0 or plan.until_step_end
        trains = trains and self._training.runnable
        idle = record.batch.empty and not trains and self._engine.num_in_flight == 0
        if not record.batch.empty:
            self._idle_check.begin_anew()
        self._has_learned = self._has_learned or not record.batch.empty or bool(record.tasklets or record.beside)
        if self._draining and not self._engine.has_work and self._training.job_id is None:
            self._channel.send(Drained())
            self._finished = True
        elif idle:
            self._rest(min(_IDLE_WAIT_S, plan.look_again_s))
        else:
            self._busy_s = time.monotonic()
            self._get_ready(delays_requests=True)

    def _publish_progress(self, snapshot: Snapshot, *, with_stats: bool) -> None:
        """``with_stats``: not of batches that nobody asked for."""
        self._next_stats_s = time.monotonic() + _STATS_EVERY_S
        self._training.publish()
        self._executor.tidy()
        self._save_if_due(_SAVE_BUSY_AFTER_S)
        if os.getppid() != self._parent_pid:
            logger.error("the API process is gone; the worker exits")
            self._finished = True
        if with_stats:
            self._publish_stats(snapshot)
        else:
            self._signs.repeat_if_due()

    def _save_if_due(self, after_s: float = 0.0) -> bool:
        """Save a part of what was learned, if it is time for that, or was ``after_s`` ago; whether there is more."""
        if self._save_part is None or not self._has_learned or time.monotonic() < self._next_save_s + after_s:
            return False
        if not self._save_part():
            return True
        self._has_learned = False
        self._next_save_s = time.monotonic() + _SAVE_EVERY_S
        return False

    def _publish_stats(self, snapshot: Snapshot) -> None:
        requests, now_s, step_ms = snapshot.requests, snapshot.now_s, next_batch_ms(self._predictor, snapshot)
        slack_ms: dict[str, float] = {}
        if not snapshot.batch.empty and step_ms is not None:
            slack_ms["tpot"] = decode_slack_ms(requests, self._slo, now_s, step_ms, snapshot.margin)
            waiting_ms = first_token_slack_ms(requests, self._slo, now_s, step_ms)
            if math.isfinite(waiting_ms):
                slack_ms["ttft"] = waiting_ms
        margin = self.margin if self._policy.aims else None
        self._signs.send(self._stats.message(self._engine, self._executor, self._training, slack_ms, margin))

    def _rest(self, wait_s: float) -> None:
        """Nothing to run: check what should hold when idle, say what is left to say, and wait for a message."""
        if self._engine.has_work:  # all that is live waits for an adapter to be read
            self._channel.wait(_BUSY_WAIT_S)
            return
        self._idle_check.run(time.monotonic() - self._busy_s)
        if self._training.job_id is not None:
            self._training.publish()
        if not self._training.is_tidy or self._save_if_due():
            return
        if self._get_ready(delays_requests=False) or self._begin_profile():
            return
        self._channel.wait(min(wait_s, _SHORT_WAIT_S) if self._training.waits_shortly else wait_s)

    def _get_ready(self, *, delays_requests: bool) -> bool:
        """Capture something more of what partitions wait for, or rehearse, if it is time for that; whether it was."""
        has_job = self._training.job_id is not None
        for task in (self._lanes, self._rehearsal):
            if task is not None and task.is_wanted(has_job=has_job, delays_requests=delays_requests):
                task.step()
                break
        else:
            return False
        self._gaps.interrupt()
        if task is self._lanes and self._lanes.refused and self._self_profile is not None:
            self._self_profile.forget_partitions()
        return True

    def _begin_profile(self) -> bool:
        """Begin to measure what the predictor lacks, if nobody has wanted anything for a while."""
        profile = self._self_profile
        if profile is None or self._training.job_id is not None or not (self._lanes is None or self._lanes.done):
            return False
        return time.monotonic() >= self._busy_s + profile.quiet_s and profile.begin()

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        if outputs and self._active_profile is None:
            self._channel.send(Outputs(tuple(outputs)))
            now_s = self._last_tokens_s = time.monotonic()
            for output in outputs:
                reason = output.finish_reason
                num_tokens = self._margin.note(output.request_id, len(output.token_ids), now_s, reason is not None)
                if reason is not None:
                    self._answers.ended(num_tokens, reason)
                if reason is FinishReason.ABORT:
                    logger.error("request %s ended: the model's output for it is not finite", output.request_id)
            self._margin.settle(now_s)

    def _handle(self, message: ToWorker) -> None:
        match message:
            case AddRequest(request):
                try:
                    self._engine.add(request)
                    arrival_s = min(time.monotonic(), max(request.arrival_s, self._begin_s))
                    self._margin.arrived(request.request_id, arrival_s)
                except CotenantError as error:
                    self._channel.send(RequestFailed(request.request_id, error.message, error.code, error.param))
            case AbortRequests(request_ids):
                for num_tokens in map(self._margin.forget, request_ids):
                    if num_tokens:
                        self._answers.ended(num_tokens, FinishReason.ABORT)
                self._engine.abort(request_ids)
            case LoadAdapter(name, path):
                self._engine.load_adapter(AdapterRef(name, path))
            case UnloadAdapter(name, path):
                self._engine.drop_adapter(AdapterRef(name, path))
            case StartJob(spec) if self._draining:
                if self._training.job_id != spec.job_id:  # else that is said when it has stopped
                    self._channel.send(JobPaused(spec.job_id, 0))
            case StartJob(spec):
                self._training.prepare(spec)
                if self._training.job_id == spec.job_id:
                    self._predictor.trains(spec.hyperparameters.trained)
            case PauseJob(job_id):
                self._training.pause(job_id)
            case CancelJob(job_id):
                self._training.cancel(job_id)
            case Drain():
                self._draining = True
                self._training.pause_running()


def _always() -> bool:
    return True


def _awaited(requests: tuple[RequestView, ...]) -> set[str]:
    """Those with prompts left."""
    return {request.request_id for request in requests if request.num_prompt_tokens_left}

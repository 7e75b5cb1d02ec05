"""Messages arrive as they were sent, in order, in both directions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cotenant.core.job import Hyperparameters, JobSpec, StepMetrics
from cotenant.core.plan import Slo
from cotenant.core.request import AdapterRef, FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from cotenant.wire.channel import ApiChannel, WorkerChannel
from cotenant.wire.messages import (
    AbortRequests,
    AddRequest,
    CancelJob,
    CheckpointSaved,
    Drain,
    Drained,
    ErrorCounts,
    FromWorker,
    JobFailed,
    JobMetrics,
    Outputs,
    PauseJob,
    Ready,
    StartJob,
    Stats,
    ToWorker,
)

SAMPLING = SamplingParams(8, seed=1, stop_token_ids=(2,), logit_bias={5: -100.0}, logprobs=2)
STEP = StepMetrics(3, 0.5, 1.25, 0.5, 1e-4, 0.9, 640, valid_loss=1.5)
TO_WORKER: list[ToWorker] = [
    AddRequest(Request("r", (1, 2, 3), SAMPLING, 12.5, AdapterRef("ft:a", "/data/a"), priority=-1)),
    AbortRequests(("r", "q")),
    StartJob(JobSpec("j", "tiny", "/d", "/d/t", None, "ft:a", Hyperparameters(target_modules=("q_proj",)), 7)),
    PauseJob("j"),
    CancelJob("j"),
    Drain(),
]
LONG_PROMPT = (None, *(TokenLogprobs(number % 50, -1.0, 1, ((5, -0.5), (6, -1.0))) for number in range(20_000)))
FROM_WORKER: list[FromWorker] = [
    Ready(1024, 2, 2048, 64, 16, "cpu", "float32", "multitask", Slo(50.0, 5.0), 1.5),
    Outputs((SequenceOutput("r", (5,), (TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.0))),)),)),
    Outputs((SequenceOutput("r", (), (), (None, TokenLogprobs(2, -1.0, 3)), FinishReason.STOP, 2),)),
    Outputs(
        (
            SequenceOutput("r", (5,), (), LONG_PROMPT, queue_s=1.5),
            SequenceOutput("q", (5,), (), LONG_PROMPT[:3]),
            SequenceOutput("p", (5,)),
            SequenceOutput("o", (5,), (), LONG_PROMPT[:15_000]),
        )
    ),
    JobMetrics("j", (STEP,), 640, 12.0),
    CheckpointSaved("j", 3, "/d/c", STEP),
    JobFailed("j", "disk_full", "no space", 3),
    JobFailed("j", "training_diverged", "not finite", 3, 2),
    JobFailed("j", "invalid_hyperparameters", "fits none", 0, param="rank_pattern"),
    Stats(num_running=2, num_tasklets={"forward": 6}, slack_ms={"tpot": -1.0}),
    Stats(prediction_errors={"alone": ErrorCounts((1, 0), 0.5)}),
    Drained(),
]


async def exchange(address: str) -> tuple[list[ToWorker], list[FromWorker]]:
    api, worker = ApiChannel(address), WorkerChannel(address)
    try:
        for message in TO_WORKER:
            await api.send(message)
        received: list[ToWorker] = []
        while len(received) < len(TO_WORKER):
            assert worker.wait(60.0)
            assert worker.pending()
            received += worker.receive()
        assert not worker.pending()
        assert worker.receive() == []
        for answer in FROM_WORKER:
            worker.send(answer)
        return received, [await asyncio.wait_for(api.receive(), 60.0) for _ in FROM_WORKER]
    finally:
        worker.close()
        api.close()


def test_every_message_arrives_as_it_was_sent(tmp_path: Path) -> None:
    received, answers = asyncio.run(exchange(f"ipc://{tmp_path}/s"))
    assert received == TO_WORKER
    assert answers == FROM_WORKER


@pytest.mark.parametrize(
    "message",
    [
        Outputs((SequenceOutput("r", (5,), (), LONG_PROMPT),)),
        Outputs(tuple(SequenceOutput(str(number), (5,), (), LONG_PROMPT[:20]) for number in range(1_000))),
    ],
    ids=["one long prompt", "many short ones"],
)
def test_others_have_their_turn_while_a_long_message_comes(tmp_path: Path, message: Outputs) -> None:
    async def run() -> None:
        api, worker = ApiChannel(f"ipc://{tmp_path}/s"), WorkerChannel(f"ipc://{tmp_path}/s")
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        try:
            worker.send(Drained())
            worker.send(message)
            await api.receive()
            await asyncio.sleep(0.5)  # all of it is here
            running = asyncio.create_task(others())
            await asyncio.sleep(0)
            num_turns = 0
            assert await asyncio.wait_for(api.receive(), 60.0) == message
            assert num_turns >= 3 * len(LONG_PROMPT) // 4096
            running.cancel()
        finally:
            worker.close()
            api.close()

    asyncio.run(run())


def test_a_message_that_was_sent_before_the_worker_connected_is_not_lost(tmp_path: Path) -> None:
    async def late() -> list[ToWorker]:
        api = ApiChannel(f"ipc://{tmp_path}/s")
        sending = asyncio.create_task(api.send(PauseJob("j")))
        await asyncio.sleep(0.01)
        worker = WorkerChannel(f"ipc://{tmp_path}/s")
        while not worker.wait(0.05):
            await asyncio.sleep(0.01)
        await sending
        messages = worker.receive()
        worker.close()
        api.close()
        return messages

    assert asyncio.run(asyncio.wait_for(late(), 60)) == [PauseJob("j")]

"""A worker's loop with all it has, driven iteration by iteration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import Partition, Slo
from cotenant.device import Device
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.self_profile import SelfProfile
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import AddRequest, FromWorker, Outputs, ToWorker
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request

PROMPT = [5 + 7 * place % 90 for place in range(41)]


class Worker:
    """A loop of its own, driven iteration by iteration; ``inbox``: what the API process sends next."""

    def __init__(
        self,
        folder: Path,
        device: Device,
        partitions: tuple[Partition, ...] = (),
        num_pages: int = 512,
        policy: str = "adaptive",
    ) -> None:
        save_llama(folder / "model", max_positions=512)
        decoder = self.decoder = support.load(folder / "model")
        self.engine = OnlineEngine(
            decoder, num_pages, 4, BatchConfig(4, 64), 512, LoraConfig(), (), device=device
        )  # 512 tokens: one context of those that are measured
        self.predictor = LatencyPredictor("test", "test")
        self.training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, self.send)
        self.profile = SelfProfile(self.engine, self.predictor, partitions, support.VOCAB_SIZE)
        self.inbox: list[ToWorker] = []
        self.sent: list[FromWorker] = []
        self.num_waits = 0
        self.loop = WorkerLoop(
            self,
            self.engine,
            self.training,
            create_policy(policy, self.predictor),
            Executor(device, decoder, self.engine, self.training),
            self.predictor,
            Slo(1000.0, 100.0),
            can_fuse=False,
            partitions=partitions,
            sizes_chunks=device.overlaps,
            self_profile=self.profile,
        )

    # The loop's channel.

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def receive(self) -> list[ToWorker]:
        messages, self.inbox = self.inbox, []
        return messages

    def pending(self) -> bool:
        return bool(self.inbox)

    def wait(self, timeout_s: float) -> bool:
        self.num_waits += 1
        time.sleep(1e-4)
        return False

    # What tests do.

    def iterate_until(self, is_there: Callable[[], bool]) -> None:
        deadline_s = time.perf_counter() + 60  # threads may have to wait for a slow disk
        while time.perf_counter() < deadline_s:
            self.loop.iterate()
            if is_there():
                return
        raise AssertionError("a minute of iterations and it is not there")

    def rest(self) -> None:
        """Until there is nothing more to do."""
        before = self.num_waits
        self.iterate_until(lambda: self.num_waits > before)

    def answer(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 9) -> list[int]:
        self.inbox.append(AddRequest(request(name, prompt, max_tokens)))
        self.iterate_until(lambda: len(self.tokens(name)) == max_tokens)
        return self.tokens(name)

    def tokens(self, name: str) -> list[int]:
        outputs = (output for message in self.sent if isinstance(message, Outputs) for output in message.outputs)
        return [token for output in outputs if output.request_id == name for token in output.token_ids]

    def has_measured(self, shape: tuple[int, int], partition: Partition | None = None) -> bool:
        size, context = shape
        return self.predictor.has_measured_decode(size, size * context, int(1.5 * size * context), partition)

    def check_idle(self) -> None:
        self.engine.check_integrity()
        assert (self.engine.num_running, self.engine.num_waiting, self.engine.kv_cache_usage) == (0, 0, 0.0)

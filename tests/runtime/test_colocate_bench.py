"""What training gets beside a load, counted within a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.config import BatchConfig, CacheConfig, ModelConfig, ServerConfig
from cotenant.core.plan import BatchShape, Partition, Slo
from cotenant.core.tasklet import TaskletShape
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime import colocate_bench, steady
from cotenant.runtime.colocate_bench import ColocateBench
from cotenant.runtime.colocate_cell import judge
from cotenant.runtime.finetune_workload import Workload
from cotenant.runtime.load import Answer, Arrival, Load
from cotenant.runtime.loop import WorkerLoop
from cotenant.scheduler import margin
from cotenant.scheduler.slack import MOST_MARGIN
from small_model import small_model
from undisturbed import holds_once

TOKENS_PER_STEP = 512  # a step then takes much longer than an iteration
SMALL_MODELS_TOKENS = 2048  # the same of the model of ``small_config``


def small_config(folder: Path, max_model_len: int) -> ModelConfig:
    """Of a model that takes a third of the built-in one's time for a step, and less for training."""
    return ModelConfig(small_model(folder)[0], load_format="dummy", max_model_len=max_model_len, device="cpu")


@pytest.fixture
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write and to read: of steps that take a tenth of a second, none of these tests comes to the epoch's end."""
    monkeypatch.setattr(colocate_bench, "_STEPS_PER_EPOCH", 256)


@pytest.mark.usefixtures("few_examples")
def test_training_counts_no_faster_in_cells_that_are_shorter_than_a_step(tmp_path: Path) -> None:
    """A cell that begins within a step counts that step's tasklets at what they are of the whole step."""
    config = ServerConfig(model=small_config(tmp_path, 128), batch=BatchConfig())
    tokens_per_step = 4096  # of which a cell has several micro-batches
    with ColocateBench(config, Workload(64, tokens_per_step, 64, 16, False)) as bench:
        bench.alone(0.1)  # the first one is slow

        def counts_as_alone() -> bool:
            alone = max(bench.alone(0.2) for _ in range(2))
            cell_s = tokens_per_step / alone / 8
            cells = [bench.trace("whole-step", Slo(500, 1000), [], cell_s)]  # ends at a step's end
            cells += [bench.trace("temporal", Slo(500, 1000), [Arrival(0.0, 4, 1)], cell_s) for _ in range(13)]
            assert all(cell.num_failed == 0 for cell in cells)
            # A machine that was busy with something else may be faster since, for some of the time.
            alone = max(alone, bench.alone(0.2))
            return 0 < max(cell.train_tokens_per_s for cell in cells) < 3 * alone

        assert holds_once(counts_as_alone)


@pytest.mark.usefixtures("few_examples")
def test_a_cell_has_the_training_of_its_first_iteration(tmp_path: Path) -> None:
    """Which may be all that there is time for; what nothing trains beside has none."""
    config = ServerConfig(model=small_config(tmp_path, 128), batch=BatchConfig())
    with ColocateBench(config, Workload(64, SMALL_MODELS_TOKENS, 64, 16, False)) as bench:
        bench.alone(0.1)

        def has_it() -> bool:
            alone = max(bench.alone(0.2) for _ in range(2))
            cell_s = SMALL_MODELS_TOKENS / alone / 4
            cells = [bench.trace("whole-step", Slo(500, 1000), [], cell_s) for _ in range(4)]
            alone = max(alone, bench.alone(0.2))
            return all(0 < cell.train_tokens_per_s < 3 * alone for cell in cells)

        assert holds_once(has_it)
        cell = bench.trace("inference-only", Slo(500, 1000), [Arrival(0.0, 4, 8)], 0.1)
        assert (cell.train_tokens_per_s, cell.num_failed) == (0.0, 0)


def test_training_alone_is_timed_until_it_has_come_somewhere(tmp_path: Path) -> None:
    """Its speed is what harvest is a share of."""
    config = ServerConfig(model=small_config(tmp_path, 512), batch=BatchConfig())
    with ColocateBench(config, Workload(512, 1024, 512, 16, False)) as bench:
        assert bench.alone(1e-6) > 0


@pytest.mark.usefixtures("few_examples")
def test_what_is_live_at_the_end_is_answered_without_training(tmp_path: Path) -> None:
    config = ServerConfig(model=small_config(tmp_path, 128), batch=BatchConfig())
    with ColocateBench(config, Workload(64, SMALL_MODELS_TOKENS, 64, 16, False)) as bench:
        bench.alone(0.1)

        def is_answered() -> bool:
            # At its fastest: were a step soon to take a part of that, tokens enough to judge by would come until the
            # end.
            step_s = SMALL_MODELS_TOKENS / max(bench.alone(0.2) for _ in range(2))
            begin_s = time.perf_counter()
            # Room for a step even where something else has the machine in between.
            cell = bench.trace("whole-step", Slo(2e3 * step_s, 1), [Arrival(0.0, 4, 60)], 8 * step_s)
            is_fast = time.perf_counter() - begin_s < 20 * step_s
            assert (cell.num_failed, cell.num_attained) == (0, 0)
            # As many gaps as are enough to judge by: too few tokens came until the end.
            return is_fast and len(cell.itl_ms) == 31 and cell.train_tokens_per_s > 0

        assert holds_once(is_answered)


def test_who_has_tokens_enough_to_be_judged_by_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long answers would make a cell last several times as long as its load."""
    loads, num_tokens, slo, duration_s = list[Load](), 900, Slo(300, 5), 0.05

    class Kept(Load):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            loads.append(self)

    config = ServerConfig(model=ModelConfig(model="tiny", max_model_len=1024, device="cpu"), batch=BatchConfig())
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)
        monkeypatch.setattr(colocate_bench, "Load", Kept)
        cell = bench.trace("inference-only", slo, [Arrival(0.0, 4, num_tokens)], duration_s)
    assert (cell.num_requests, cell.num_failed) == (1, 0)
    token_s = loads[0].answers[0].token_s
    until_s = duration_s + (slo.ttft_ms + 32 * slo.tpot_ms) / 1e3
    if token_s[31] <= until_s:  # on a machine that is busy with something else they may come later
        assert len(token_s) < num_tokens
        assert len(cell.itl_ms) == sum(at_s <= until_s for at_s in token_s) - 1


def test_what_is_learned_from_is_served_and_its_end_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that come in its time; nothing of it is left for what is measured then."""
    loads = list[Load]()

    class Kept(Load):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            loads.append(self)

    config = ServerConfig(model=small_config(tmp_path, 128), batch=BatchConfig())
    arrivals = [Arrival(0.0, 4, 8), Arrival(0.02, 4, 100), Arrival(0.3, 4, 8)]
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)
        monkeypatch.setattr(colocate_bench, "Load", Kept)
        known = bench._tenants.predictor.batch_ms(BatchShape(1, 8))

        def is_learned() -> bool:
            bench.learn("temporal", Slo(1e9, 1e9), arrivals, 0.1)
            assert len(loads[-1].answers) == 2
            return bench._tenants.predictor.batch_ms(BatchShape(1, 8)) != known

        assert holds_once(is_learned), "it is what predictions rest on"
        assert loads[-1].answers[0].token_s
        cell = bench.trace("temporal", Slo(1e9, 1e9), arrivals, 0.4)
    assert (cell.num_requests, cell.num_failed) == (3, 0)


def test_of_steps_that_nobody_knows_some_tasklets_run_beside_each(tmp_path: Path) -> None:
    """The room that they get is beside what the step takes, which is measured first."""
    config = ServerConfig(model=small_config(tmp_path, 1024), batch=BatchConfig())
    with ColocateBench(config, Workload(32, 64, 32, 16, False)) as bench:
        bench.alone(0.2)

        def has_room() -> bool:
            found = bench.profile(2.0 * bench.longest_tasklet_ms, 48, 32, 24)
            return found.alone_ms < found.beside_ms and found.tasklets_per_step > 0.5

        assert holds_once(has_room)


def test_steady_sequences_are_timed_when_the_margin_has_come_to_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else slack that was saved up while it was lower would be spent then, and TPOT be longer than it is."""
    margins, decode = list[tuple[int, float]](), ColocateBench._decode

    def noted(bench: ColocateBench, loop: WorkerLoop, watch: Any, num_tokens: int) -> Any:
        times_s = decode(bench, loop, watch, num_tokens)
        margins.append((num_tokens, loop.margin))
        return times_s

    monkeypatch.setattr(ColocateBench, "_decode", noted)
    config = ServerConfig(model=small_config(tmp_path, 1024), batch=BatchConfig())
    slo = Slo(1e4, 4.0)
    monkeypatch.setattr(margin, "_FIRST_RISE", 0.00007)  # at rest after 600 tokens, not 1,400
    monkeypatch.setattr(steady, "_UNTIMED", 128)
    monkeypatch.setattr(steady, "_UNDER_POLICY", 64)
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)

        def is_at_rest() -> bool:
            bench.steady("adaptive", slo, 2, 200, 70)
            timed, untimed = margins.pop(), margins.pop()
            assert timed[0] == 70
            return timed[1] < untimed[1] + 0.001

        assert holds_once(is_at_rest)


def test_a_margin_without_room_to_come_to_rest_rises_no_more_while_sequences_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would, for they meet their target; and spend what they had saved up before, and be late by that."""
    learned, begin = list[WorkerLoop](), ColocateBench._begin

    def noted(bench: ColocateBench, load: Load, policy: str, *others: Any) -> Any:
        watch, loop = begin(bench, load, policy, *others)
        if policy == "adaptive":
            learned.append(loop)
        return watch, loop

    monkeypatch.setattr(ColocateBench, "_begin", noted)
    monkeypatch.setattr(colocate_bench, "most_learning", lambda *_: 1)
    monkeypatch.setattr(steady, "_UNTIMED", 128)
    monkeypatch.setattr(steady, "_UNDER_POLICY", 64)
    config = ServerConfig(model=small_config(tmp_path, 1024), batch=BatchConfig())
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)

        def is_in_time() -> bool:
            learned.clear()
            cell = bench.steady("adaptive", Slo(1e4, 6.0), 2, 200, 140)
            teacher, timed = learned[-2:]
            assert timed.margin <= teacher.margin < MOST_MARGIN
            return max(cell.tpot_ms) <= 6.0

        assert holds_once(is_in_time)


def test_a_margin_is_learned_with_no_more_than_there_are_pages_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else some sequences would wait for pages, and others run on to their end meanwhile."""
    rooms = list[tuple[int, int]]()

    def noted(answers: Sequence[Answer], room: int) -> int:
        rooms.append((len(answers), room))
        return min(1, steady.most_learning(answers, room))

    monkeypatch.setattr(colocate_bench, "most_learning", noted)
    monkeypatch.setattr(steady, "_WELL_WITHIN", math.inf)  # else a pause would take pages until it is made up for
    config = ServerConfig(model=small_config(tmp_path, 1024), cache=CacheConfig(num_pages=64, page_tokens=16))
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)
        cells = [bench.steady(policy, Slo(1e4, 6.0), 4, 100, 16) for policy in ("adaptive", "temporal")]
    assert [(cell.num_requests, cell.num_failed) for cell in cells] == [(4, 0)] * 2
    assert rooms == [(4, 64 // 4 * 16)], "of those that aim by a margin"
    short, long = ([Answer(Arrival(0.0, 1, 2000), [0.0] * count)] * 4 for count in (16, 150))
    assert [steady.most_learning(answers, 256) for answers in (short, long)] == [3, 1]
    assert steady.most_learning(short, 8192) == 24
    assert steady.most_learning(long, 150) == 0


def test_a_cell_whose_requests_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the targets are."""
    monkeypatch.setattr(colocate_bench, "ANSWERED_WITHIN_S", 0.1)
    config = ServerConfig(model=ModelConfig(model="tiny", max_model_len=128, device="cpu"), batch=BatchConfig())
    with ColocateBench(config, Workload(64, TOKENS_PER_STEP, 64, 16, False)) as bench:
        bench.alone(0.1)
        cell = bench.trace("whole-step", Slo(1e9, 1e9), [Arrival(0.0, 4, 120)], 0.1)
    assert (cell.num_requests, cell.num_failed) == (1, 1)


@given(st.integers(0, 40))
def test_an_answer_is_judged_by_its_tokens_until_the_end_if_they_are_enough(num_inside: int) -> None:
    slow, fast = [0.1 * (index + 1) for index in range(num_inside)], [5 + 0.001 * index for index in range(140)]
    answer = Answer(Arrival(0.0, 4, num_inside + 140), [*slow, *fast])
    cell = judge("temporal", Slo(1e4, 50), [answer], 0.0, 2.0, with_ttft=True, until_s=4.5)
    if num_inside >= 32:
        assert (cell.num_attained, cell.tpot_ms) == (0, [pytest.approx(100)])
    else:
        # A first token may take 10 s here: without one until the end it is late by nothing that it has had.
        assert (cell.num_attained, len(cell.itl_ms)) == (num_inside == 0, 31), "as many as are enough"
    assert cell.output_tokens_per_s == pytest.approx(min(num_inside, 20) / 2.0)
    assert len(judge("temporal", Slo(1e4, 50), [answer], 0.0, 2.0, with_ttft=True).itl_ms) == num_inside + 139


@given(st.lists(st.floats(0.0, 1.0), max_size=31), st.integers(0, 300), st.floats(0.0, 2.0))
def test_who_lacks_tokens_at_the_end_is_late_however_fast_the_rest_comes(
    under_policy: list[float], num_alone: int, due_s: float
) -> None:
    """What comes behind the time that each had for 32 tokens is served without training."""
    slo, duration_s = Slo(500, 50), 2.0
    until_s = duration_s + (slo.ttft_ms + 32 * slo.tpot_ms) / 1e3
    token_s = sorted(due_s + share * (until_s - due_s) for share in under_policy)
    token_s += [until_s + 1e-6 * (index + 1) for index in range(num_alone)]
    answer = Answer(Arrival(due_s, 4, len(under_policy) + num_alone), token_s)
    cell = judge("adaptive", slo, [answer], 0.0, duration_s, with_ttft=True, until_s=until_s)
    assert cell.num_failed == (not token_s)
    if num_alone:
        assert cell.num_attained == 0


def test_what_runs_in_a_partition_for_the_first_time_runs_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, run_tasklet, ran = Partition(48, 84), CpuDevice.run_tasklet, list[Partition | None]()

    def noted(
        device: CpuDevice,
        launch: Callable[[], TaskletShape],
        *,
        behind_online: bool = False,
        partition: Partition | None = None,
    ) -> None:
        ran.append(partition)
        run_tasklet(device, launch, behind_online=behind_online, partition=partition)

    monkeypatch.setattr(CpuDevice, "partitions", (there,))
    monkeypatch.setattr(CpuDevice, "run_tasklet", noted)
    config = ServerConfig(model=ModelConfig(model="tiny", max_model_len=128, device="cpu"), batch=BatchConfig())
    with ColocateBench(config, Workload(64, 128, 64, 16, False)) as bench:
        bench.alone(0.1)

        def train(policy: str) -> None:
            ran.clear()
            assert holds_once(lambda: bench.trace(policy, Slo(500, 1000), [], 0.1).train_tokens_per_s > 0)

        train("multitask")
        assert set(ran) == {None}, "it has no partitions"
        for num_there in (True, False):
            train("adaptive")  # without requests, training has all SMs
            assert (ran[0] == there) == (there in ran) == num_there
            assert ran[-1] is None

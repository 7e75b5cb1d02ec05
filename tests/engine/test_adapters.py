"""Adapters in one batch, those that are still being read, and what a broken one can harm."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef, FinishReason, SequenceOutput
from cotenant.engine import adapters
from cotenant.models.lora import LoraAdapter, read_adapter


@pytest.fixture(scope="module")
def refs(small, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return [small.make_adapter(folder, f"adapter-{seed}", seed) for seed in range(4)]


def until(engine, done: Callable[[], bool]) -> list[SequenceOutput]:
    """Step until ``done``: a step gives nothing while all that waits for is being read."""
    outputs: list[SequenceOutput] = []
    for _ in range(5000):
        if done():
            return outputs
        outputs += engine.step()
        engine.check_integrity()
        time.sleep(0.001)
    raise AssertionError("it did not come to pass")


def run(small, engine, requests=()) -> dict[str, list[SequenceOutput]]:
    for request in requests:
        engine.add(request)
    outputs: dict[str, list[SequenceOutput]] = {}
    for output in until(engine, lambda: not engine.has_work):
        outputs.setdefault(output.request_id, []).append(output)
    return outputs


def warm(small, engine, refs: list[AdapterRef]) -> None:
    """Bring adapters into host memory."""
    run(small, engine, [small.request(small.prompt(3), 1, adapter=ref) for ref in refs])


def alone(small, prompt: tuple[int, ...], adapter: AdapterRef | None, num_tokens: int) -> list[int]:
    (outputs,) = run(small, small.engine(), [small.request(prompt, num_tokens, adapter=adapter)]).values()
    return small.tokens(outputs)


def test_one_batch_of_several_adapters(small, refs) -> None:
    prompt = small.prompt(9)
    expected = {ref: alone(small, prompt, ref, 8) for ref in (None, *refs[:3])}
    assert expected[None] == small.greedy(prompt, 8)
    assert len({tuple(text) for text in expected.values()}) == 4
    engine = small.engine(max_loras=3, max_num_batched_tokens=13)
    requests = [small.request(prompt, 8, adapter=ref) for ref in (refs[0], None, refs[1], refs[0], refs[2], None)]
    outputs = run(small, engine, requests)
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == expected[request.adapter]


def test_rows_of_an_adapter_lie_side_by_side(small, refs) -> None:
    engine = small.engine(max_loras=2)
    warm(small, engine, refs[:2])
    for adapter in (refs[0], None, refs[1]) * 2:
        engine.add(small.request(small.prompt(4), 3, adapter=adapter))
    prefill = engine.schedule().host
    assert [(span.start, span.stop) for span in prefill.spans()] == [(8, 16), (16, 24)]
    engine.step()
    decode = engine.schedule()
    assert decode.shape.num_adapters == 2
    assert engine.decodes() == decode.shape
    assert [(span.start, span.stop) for span in decode.host.spans()] == [(2, 4), (4, 6)]


def test_preemption_with_more_adapters_than_slots(small, refs) -> None:
    engine = small.engine(num_pages=20, page_tokens=2, max_num_seqs=6, max_num_batched_tokens=12, max_loras=2)
    requests = [small.request(small.prompt(4, seed), 20, adapter=refs[seed % 4]) for seed in range(8)]
    outputs = run(small, engine, requests)
    assert engine.num_preemptions > 0
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == alone(small, request.prompt, request.adapter, 20)


def test_a_request_without_a_slot_waits_and_base_requests_pass_it(small, refs) -> None:
    engine = small.engine(max_loras=1)
    warm(small, engine, refs[:2])
    holder, wants, same, base = (
        small.request(small.prompt(5), 12, adapter=refs[0]),
        small.request(small.prompt(5), 3, adapter=refs[1]),
        small.request(small.prompt(5), 3, adapter=refs[0]),
        small.request(small.prompt(5), 3),
    )
    for request in (holder, wants, same, base):
        engine.add(request)
    assert engine.next_shape().num_adapters == 1
    order = [output.request_id for output in until(engine, lambda: not engine.has_work) if output.finish_reason]
    # 'same' could share the holder's slot, and would keep it from 'wants' by doing so.
    assert order == [base.request_id, holder.request_id, wants.request_id, same.request_id]


def test_a_stream_for_a_loaded_adapter_does_not_starve_another(small, refs) -> None:
    engine = small.engine(max_loras=1)
    warm(small, engine, refs[:2])
    engine.add(small.request(small.prompt(4), 5, adapter=refs[0]))
    wants = small.request(small.prompt(4), 1, adapter=refs[1])
    engine.add(wants)
    for _ in range(8):
        engine.add(small.request(small.prompt(4), 5, adapter=refs[0]))
        if wants.request_id in {output.request_id for output in engine.step()}:
            return
    raise AssertionError("the request for the other adapter starved")


def test_a_request_whose_adapter_is_being_read_holds_nobody_up(small, refs, monkeypatch) -> None:
    disk = threading.Event()

    def slow(*arguments: object) -> LoraAdapter:
        assert disk.wait(60)
        return read_adapter(*arguments)  # type: ignore[arg-type]

    engine = small.engine(max_loras=2)
    warm(small, engine, refs[:1])
    monkeypatch.setattr(adapters, "read_adapter", slow)
    slow_one = small.request(small.prompt(5), 3, adapter=refs[1])
    others = [small.request(small.prompt(5), 3, adapter=ref) for ref in (None, refs[0])]
    for request in (slow_one, *others):
        engine.add(request)
    assert [view.waits_for_adapter for view in engine.views()] == [True, False, False]
    finished: set[str] = set()
    for _ in range(50):
        finished |= {output.request_id for output in engine.step() if output.finish_reason}
    assert finished == {request.request_id for request in others}
    disk.set()
    engine.wait_for_adapters(refs[1:2])
    assert [view.waits_for_adapter for view in engine.views()] == [False]
    (outputs,) = run(small, engine).values()
    assert small.tokens(outputs) == alone(small, slow_one.prompt, refs[1], 3)


def test_what_pushes_a_planned_adapter_out_makes_a_new_plan(small, refs, monkeypatch) -> None:
    """Host memory has room for three. Two are ready and planned; before they are admitted two others have been read."""
    may_go_on = threading.Event()

    def read(folder: Path, *args: object) -> LoraAdapter:
        if folder.name in (refs[2].name, refs[3].name):
            assert may_go_on.wait(60)
        return read_adapter(folder, *args)

    monkeypatch.setattr(adapters, "read_adapter", read)
    engine = small.engine(max_loras=2, max_cpu_loras=3)
    requests = [small.request(small.prompt(9), 4, adapter=ref) for ref in refs]
    for request in requests:
        engine.add(request)
    cache = engine._adapters.cache
    for ref in refs[:2]:
        cache.wait(ref)
    assert engine.next_shape() is not None
    may_go_on.set()
    for ref in refs[2:]:
        cache.wait(ref)
    outputs = run(small, engine)
    assert [small.tokens(outputs[request.request_id]) for request in requests] == [
        alone(small, small.prompt(9), ref, 4) for ref in refs
    ]


def test_a_bad_adapter_is_refused_and_others_run_on(small, refs, tmp_path) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "adapter_config.json").write_text("not json")
    neighbour = small.request(small.prompt(5), 5, adapter=refs[0])
    for max_loras in (1, 2):  # with a slot to be had, and with none
        engine = small.engine(max_loras=max_loras)
        engine.add(neighbour)
        outputs = until(engine, lambda engine=engine: engine.num_running == 1)
        names = ("missing", "junk")
        for name in names:
            adapter = AdapterRef(name, str(tmp_path / name))
            engine.add(small.request(small.prompt(3), 2, adapter=adapter, request_id=name))
        failures: dict[str, InvalidInputError] = {}

        def all_told(engine=engine, failures=failures) -> bool:
            failures.update(engine.take_failures())
            return not engine.has_work

        outputs += until(engine, all_told)
        assert failures.keys() == set(names)
        for name, error in failures.items():
            assert isinstance(error, InvalidInputError)
            assert str(tmp_path / name) in error.message
        assert small.tokens(outputs) == alone(small, neighbour.prompt, refs[0], 5)
        assert engine.take_failures() == []


def fails(small, engine, prompt: tuple[int, ...], ref: AdapterRef) -> bool:
    """Whether a request for the adapter ends because there is no such adapter."""
    request = small.request(prompt, 2, adapter=ref)
    engine.add(request)
    failures: list[str] = []

    def told() -> bool:
        failures.extend(request_id for request_id, _ in engine.take_failures())
        return bool(failures)

    until(engine, told)
    return failures == [request.request_id]


def test_a_registered_adapter_is_served_without_its_folder_until_it_is_dropped(small, refs) -> None:
    prompt = small.prompt(6)
    engine = small.engine()
    for source in (refs[0], refs[1]):  # registering again replaces it
        fresh = AdapterRef("ft:fresh", f"/nowhere/{source.name}")
        engine.register_adapter(fresh, read_adapter(Path(source.path), small.decoder.spec, 8))
        (outputs,) = run(small, engine, [small.request(prompt, 6, adapter=fresh)]).values()
        assert small.tokens(outputs) == alone(small, prompt, source, 6)
    assert fails(small, engine, prompt, AdapterRef("ft:fresh", f"/nowhere/{refs[0].name}"))
    engine.add(small.request(prompt, 200, adapter=fresh))
    outputs = until(engine, lambda: engine.num_running == 1)
    engine.drop_adapter("ft:fresh")
    outputs += until(engine, lambda: not engine.has_work)
    assert small.tokens(outputs) == alone(small, prompt, refs[1], 200)
    assert fails(small, engine, prompt, fresh)


def load(engine, ref: AdapterRef) -> tuple[InvalidInputError | None, list[SequenceOutput]]:
    """Why the adapter could not be read, and what was put out meanwhile."""
    told: list[tuple[AdapterRef, InvalidInputError | None]] = []

    def is_told() -> bool:
        told.extend(engine.take_loaded())
        return bool(told)

    engine.load_adapter(ref)
    outputs = until(engine, is_told)
    ((loaded, error),) = told
    assert loaded == ref
    return error, outputs


def test_an_adapter_serves_until_its_successor_has_been_read(small, refs, tmp_path) -> None:
    prompt = small.prompt(9)
    texts = [alone(small, prompt, ref, 60) for ref in refs[:2]]
    ref = AdapterRef("changing", str(tmp_path / "changing"))
    engine = small.engine()
    shutil.copytree(refs[0].path, ref.path)
    assert load(engine, ref) == (None, [])
    running = small.request(prompt, 60, adapter=ref)
    engine.add(running)
    outputs = until(engine, lambda: engine.num_running == 1)

    (tmp_path / "changing" / "adapter_model.safetensors").write_bytes(b"torn")
    error, more = load(engine, ref)
    assert error is not None
    assert (error.code, ref.path in error.message) == ("invalid_adapter", True)
    again = small.request(prompt, 60, adapter=ref)
    engine.add(again)
    outputs += more + until(engine, lambda: engine.num_running == 2)
    assert engine.take_failures() == []

    shutil.copytree(refs[1].path, ref.path, dirs_exist_ok=True)
    error, more = load(engine, ref)
    assert error is None
    successor = small.request(prompt, 60, adapter=ref)
    engine.add(successor)
    outputs += more + until(engine, lambda: not engine.has_work)
    for request, text in ((running, texts[0]), (again, texts[0]), (successor, texts[1])):
        assert small.tokens([output for output in outputs if output.request_id == request.request_id]) == text

    engine.load_adapter(ref)
    engine.drop_adapter(ref.name)
    shutil.rmtree(ref.path)
    assert fails(small, engine, prompt, ref)
    assert engine.take_loaded() == []


def test_who_waits_while_its_adapter_is_replaced_takes_no_pages_of_the_old_one(small, refs) -> None:
    prompt = small.prompt(30)
    fresh = AdapterRef("ft:fresh", "/nowhere/fresh")
    engine = small.engine(max_num_seqs=1)
    engine.register_adapter(fresh, read_adapter(Path(refs[0].path), small.decoder.spec, 8))
    run(small, engine, [small.request(prompt, 4, adapter=fresh)])
    waiting = small.request(prompt, 12, adapter=fresh)
    engine.add(waiting)
    engine.register_adapter(fresh, read_adapter(Path(refs[1].path), small.decoder.spec, 8))
    (outputs,) = run(small, engine).values()
    assert engine.num_hit_tokens == 0
    assert small.tokens(outputs) == alone(small, prompt, refs[1], 12)


@pytest.mark.parametrize("use_reload", [True, False], ids=["replaced", "deleted"])
def test_who_has_begun_ends_on_the_same_weights_however_often_it_is_preempted(
    small, refs, tmp_path, use_reload
) -> None:
    """Whether others are served under their name by then, or none."""
    ref = AdapterRef("changing", str(tmp_path / "changing"))
    shutil.copytree(refs[0].path, ref.path)
    engine = small.engine(num_pages=24, page_tokens=4, max_loras=1, max_cpu_loras=2)
    begun = [small.request(small.prompt(12, seed), 30, adapter=ref, priority=1) for seed in range(2)]
    for request in begun:
        engine.add(request)
    outputs = until(engine, lambda: engine.num_running == 2)
    if use_reload:
        shutil.copytree(refs[1].path, ref.path, dirs_exist_ok=True)
        error, more = load(engine, ref)
        assert error is None
        outputs += more
    else:
        engine.drop_adapter(ref.name)
        shutil.rmtree(ref.path)
    urgent = [small.request(small.prompt(50, seed), 20, adapter=other) for seed, other in enumerate(refs[2:4])]
    for request in urgent:
        engine.add(request)
    outputs += until(engine, lambda: not engine.has_work)
    assert engine.num_preemptions >= 2
    assert engine.take_failures() == []
    texts = {
        each.request_id: small.tokens([output for output in outputs if output.request_id == each.request_id])
        for each in (*begun, *urgent)
    }
    for request, source in zip((*begun, *urgent), (refs[0], refs[0], *refs[2:4]), strict=True):
        assert texts[request.request_id] == alone(small, request.prompt, source, request.sampling.max_tokens)


def test_who_waits_while_its_adapter_is_deleted_has_it_all_the_same(small, refs, tmp_path) -> None:
    ref = AdapterRef("going", str(tmp_path / "going"))
    shutil.copytree(refs[0].path, ref.path)
    engine = small.engine(max_num_seqs=1)
    requests = [small.request(small.prompt(9, seed), 20, adapter=ref) for seed in range(3)]
    for request in requests:
        engine.add(request)
    outputs = until(engine, lambda: engine.num_running == 1)
    engine.drop_adapter(ref.name)
    shutil.rmtree(ref.path)
    outputs += until(engine, lambda: not engine.has_work)
    assert engine.take_failures() == []
    for request in requests:
        mine = [output for output in outputs if output.request_id == request.request_id]
        assert small.tokens(mine) == alone(small, request.prompt, refs[0], 20)
    assert fails(small, engine, small.prompt(9), ref)


def test_a_folder_that_changed_while_its_adapter_was_out_of_memory_gives_no_pages_of_the_old_one(
    small, refs, tmp_path
) -> None:
    """Nobody says that it changed: it is read again because others were used meanwhile."""
    prompt = small.prompt(30)
    ref = AdapterRef("changing", str(tmp_path / "changing"))
    shutil.copytree(refs[0].path, ref.path)
    engine = small.engine(max_loras=1, max_cpu_loras=2)

    def ask() -> tuple[list[int], int]:
        """The text, and how many tokens of the prompt were found in the cache."""
        num_hits = engine.num_hit_tokens
        (outputs,) = run(small, engine, [small.request(prompt, 12, adapter=ref)]).values()
        return small.tokens(outputs), engine.num_hit_tokens - num_hits

    assert ask() == (alone(small, prompt, refs[0], 12), 0)
    warm(small, engine, refs[2:])  # two others push it out of host memory
    shutil.copytree(refs[1].path, ref.path, dirs_exist_ok=True)
    assert ask() == (alone(small, prompt, refs[1], 12), 0)
    warm(small, engine, refs[2:])
    shutil.copytree(refs[1].path, ref.path, dirs_exist_ok=True)  # other files, the same weights
    assert ask() == (alone(small, prompt, refs[1], 12), 28)
    shutil.copytree(refs[0].path, ref.path, dirs_exist_ok=True)
    assert ask() == (alone(small, prompt, refs[1], 12), 28)  # it is in host memory: nobody has looked
    warm(small, engine, refs[2:])
    assert ask() == (alone(small, prompt, refs[0], 12), 28)  # those of the first time


def test_who_waits_or_runs_while_the_folder_changes_takes_pages_of_its_own_weights_alone(small, refs, tmp_path) -> None:
    prompt = small.prompt(30)
    ref = AdapterRef("changing", str(tmp_path / "changing"))
    shutil.copytree(refs[0].path, ref.path)
    engine = small.engine(max_loras=1, max_cpu_loras=2, max_num_seqs=1)
    running = small.request(prompt, 40, adapter=ref)
    engine.add(running)
    outputs = until(engine, lambda: engine.num_running == 1)
    shutil.copytree(refs[1].path, ref.path, dirs_exist_ok=True)
    waiting = [small.request(prompt, 12, adapter=one) for one in (ref, refs[2], refs[3], ref)]
    for request in waiting:
        engine.add(request)
    outputs += until(engine, lambda: not engine.has_work)
    texts = [
        small.tokens([output for output in outputs if output.request_id == request.request_id])
        for request in (running, *waiting)
    ]
    assert texts == [
        alone(small, prompt, weights, num_tokens)
        for weights, num_tokens in ((refs[0], 40), (refs[0], 12), (refs[2], 12), (refs[3], 12), (refs[1], 12))
    ]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_harms_no_neighbour(small, refs, tmp_path, caplog, poison: float) -> None:
    """Neither those in its batches nor those who get its pages afterwards."""
    bad = small.make_adapter(tmp_path, "bad", 9, poison=poison)
    engine = small.engine(num_pages=12, page_tokens=4, max_num_seqs=4, max_num_batched_tokens=16)
    doomed = [small.request(small.prompt(length), 10, adapter=bad, prompt_logprobs=1) for length in (5, 30)]
    healthy = [small.request(small.prompt(9, seed), 10, adapter=(None, refs[0])[seed % 2]) for seed in range(6)]
    with caplog.at_level(logging.ERROR):
        outputs = run(small, engine, [doomed[0], *healthy[:3], doomed[1], *healthy[3:]])
    for request in doomed:
        (output,) = outputs[request.request_id]
        assert output.finish_reason is FinishReason.ABORT
        assert output.token_ids == ()
        assert output.prompt_logprobs is None
        assert request.request_id in caplog.text
    for request in healthy:
        assert small.tokens(outputs[request.request_id]) == alone(small, request.prompt, request.adapter, 10)
    run(small, engine, [small.request(small.prompt(30), 0, adapter=bad, request_id="prompt only")])
    assert engine.kv_cache.isfinite().all()
    (output,) = run(small, engine, [small.request(small.prompt(5), 0, adapter=bad, prompt_logprobs=0)]).values()
    assert output[0].finish_reason is FinishReason.ABORT

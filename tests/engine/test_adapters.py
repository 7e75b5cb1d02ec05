"""Adapters in one batch, those that are still being read, and what a broken one can harm."""

import threading
from pathlib import Path

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef, FinishReason
from cotenant.engine import adapters
from cotenant.models.lora import LoraAdapter, read_adapter
from engine.adapter_runs import alone, run, until, warm


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
    small.make_adapter(tmp_path, "nan", 9, poison=float("nan"))
    neighbour = small.request(small.prompt(5), 5, adapter=refs[0])
    for max_loras in (1, 2):  # with a slot to be had, and with none
        engine = small.engine(max_loras=max_loras)
        engine.add(neighbour)
        outputs = until(engine, lambda engine=engine: engine.num_running == 1)
        names = ("missing", "junk", "nan")
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


def test_an_adapter_whose_products_are_not_finite_harms_no_neighbour(small, refs, tmp_path) -> None:
    """Neither those in its batches nor those who get its pages afterwards."""
    bad = small.make_adapter(tmp_path, "bad", 9, poison=3e38)
    engine = small.engine(num_pages=12, page_tokens=4, max_num_seqs=4, max_num_batched_tokens=16)
    doomed = [small.request(small.prompt(length), 10, adapter=bad, prompt_logprobs=1) for length in (5, 30)]
    healthy = [small.request(small.prompt(9, seed), 10, adapter=(None, refs[0])[seed % 2]) for seed in range(6)]
    outputs = run(small, engine, [doomed[0], *healthy[:3], doomed[1], *healthy[3:]])
    for request in doomed:
        (output,) = outputs[request.request_id]
        assert output.finish_reason is FinishReason.ABORT
        assert output.token_ids == ()
        assert output.prompt_logprobs is None
    for request in healthy:
        assert small.tokens(outputs[request.request_id]) == alone(small, request.prompt, request.adapter, 10)
    run(small, engine, [small.request(small.prompt(30), 0, adapter=bad, request_id="prompt only")])
    assert engine.kv_cache.isfinite().all()
    (output,) = run(small, engine, [small.request(small.prompt(5), 0, adapter=bad, prompt_logprobs=0)]).values()
    assert output[0].finish_reason is FinishReason.ABORT

"""Adapters in one batch, their slots, and what a broken one can harm."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef, FinishReason
from cotenant.models.lora import load_adapter


@pytest.fixture(scope="module")
def refs(small, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder = tmp_path_factory.mktemp("adapters")
    return [small.make_adapter(folder, f"adapter-{seed}", seed) for seed in range(4)]


def alone(small, prompt: tuple[int, ...], adapter: AdapterRef | None, num_tokens: int) -> list[int]:
    (outputs,) = small.run(small.engine(), [small.request(prompt, num_tokens, adapter=adapter)]).values()
    return small.tokens(outputs)


def test_one_batch_of_several_adapters(small, refs) -> None:
    prompt = small.prompt(9)
    expected = {ref: alone(small, prompt, ref, 8) for ref in (None, *refs[:3])}
    assert expected[None] == small.greedy(prompt, 8)
    assert len({tuple(text) for text in expected.values()}) == 4
    engine = small.engine(max_loras=3, max_num_batched_tokens=13)
    requests = [small.request(prompt, 8, adapter=ref) for ref in (refs[0], None, refs[1], refs[0], refs[2], None)]
    outputs = small.run(engine, requests)
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == expected[request.adapter]


def test_rows_of_an_adapter_lie_side_by_side(small, refs) -> None:
    engine = small.engine(max_loras=2)
    for adapter in (refs[0], None, refs[1]) * 2:
        engine.add(small.request(small.prompt(4), 3, adapter=adapter))
    prefill = engine.schedule().batch
    assert [(span.start, span.stop) for span in prefill.spans] == [(8, 16), (16, 24)]
    engine.step()
    decode = engine.schedule()
    assert decode.shape.num_adapters == 2
    assert [(span.start, span.stop) for span in decode.batch.spans] == [(2, 4), (4, 6)]


def test_preemption_with_more_adapters_than_slots(small, refs) -> None:
    engine = small.engine(num_pages=20, page_tokens=2, max_num_seqs=6, max_num_batched_tokens=12, max_loras=2)
    requests = [small.request(small.prompt(4, seed), 20, adapter=refs[seed % 4]) for seed in range(8)]
    outputs = small.run(engine, requests)
    assert engine.num_preemptions > 0
    for request in requests:
        assert small.tokens(outputs[request.request_id]) == alone(small, request.prompt, request.adapter, 20)


def test_a_request_without_a_slot_waits_and_base_requests_pass_it(small, refs) -> None:
    engine = small.engine(max_loras=1)
    holder, wants, same, base = (
        small.request(small.prompt(5), 12, adapter=refs[0]),
        small.request(small.prompt(5), 3, adapter=refs[1]),
        small.request(small.prompt(5), 3, adapter=refs[0]),
        small.request(small.prompt(5), 3),
    )
    for request in (holder, wants, same, base):
        engine.add(request)
    assert engine.next_shape().num_adapters == 1
    order: list[str] = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
        engine.check_integrity()
    # 'same' could share the holder's slot, and would keep it from 'wants' by doing so.
    assert order == [base.request_id, holder.request_id, wants.request_id, same.request_id]


def test_a_stream_for_a_loaded_adapter_does_not_starve_another(small, refs) -> None:
    engine = small.engine(max_loras=1)
    engine.add(small.request(small.prompt(4), 5, adapter=refs[0]))
    wants = small.request(small.prompt(4), 1, adapter=refs[1])
    engine.add(wants)
    for _ in range(8):
        engine.add(small.request(small.prompt(4), 5, adapter=refs[0]))
        if wants.request_id in {output.request_id for output in engine.step()}:
            return
    raise AssertionError("the request for the other adapter starved")


def test_the_least_recently_used_makes_room(small, refs, tmp_path) -> None:
    folders = [AdapterRef(ref.name, str(tmp_path / ref.name)) for ref in refs[:3]]
    for ref, copy in zip(refs, folders, strict=False):
        shutil.copytree(ref.path, copy.path)
    engine = small.engine(max_loras=2)
    for index in (0, 1, 0, 2):  # the last one evicts 1, not 0
        small.run(engine, [small.request(small.prompt(3), 2, adapter=folders[index])])
    for folder in folders:
        shutil.rmtree(folder.path)
    for index in (0, 2):  # still on the device: the folder is not needed
        small.run(engine, [small.request(small.prompt(3), 2, adapter=folders[index])])
    engine.add(small.request(small.prompt(3), 2, adapter=folders[1], request_id="evicted"))
    engine.step()
    ((request_id, error),) = engine.take_failures()
    assert request_id == "evicted"
    assert "adapter-1" in error.message or folders[1].path in error.message
    assert not engine.has_work
    assert engine.take_failures() == []


def test_an_adapter_in_use_is_not_evicted_however_long_ago_it_was_loaded(small, refs, tmp_path) -> None:
    copy = AdapterRef("copy", str(tmp_path / "copy"))
    shutil.copytree(refs[0].path, copy.path)
    engine = small.engine(max_loras=2)
    engine.add(small.request(small.prompt(4), 20, adapter=copy))
    engine.step()
    shutil.rmtree(copy.path)
    for ref in refs[1:]:
        engine.add(small.request(small.prompt(4), 1, adapter=ref))
        engine.step()
        engine.check_integrity()
    again = small.request(small.prompt(4), 3, adapter=copy)
    outputs = small.run(engine, [again])
    assert small.tokens(outputs[again.request_id]) == alone(small, again.prompt, refs[0], 3)


def test_a_bad_adapter_is_refused_and_others_run_on(small, refs, tmp_path) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "adapter_config.json").write_text("not json")
    neighbour = small.request(small.prompt(5), 5, adapter=refs[0])
    for max_loras in (1, 2):  # with a slot to be had, and with none
        engine = small.engine(max_loras=max_loras)
        engine.add(neighbour)
        engine.step()
        for name in ("missing", "junk"):
            with pytest.raises(InvalidInputError):
                engine.add(small.request(small.prompt(3), 2, adapter=AdapterRef(name, str(tmp_path / name))))
            engine.check_integrity()
        (outputs,) = small.run(engine).values()
        assert small.tokens(outputs) == alone(small, neighbour.prompt, refs[0], 5)[1:]


def test_a_registered_adapter_is_served_without_its_folder_until_it_is_dropped(small, refs) -> None:
    prompt = small.prompt(6)
    spec = small.decoder.spec
    engine = small.engine()
    for source in (refs[0], refs[1]):  # registering again replaces it
        fresh = AdapterRef("ft:fresh", f"/nowhere/{source.name}")
        from_disk = load_adapter(Path(source.path), spec, torch.device("cpu"), torch.float32, 8)
        engine.register_adapter(fresh, from_disk)
        (outputs,) = small.run(engine, [small.request(prompt, 6, adapter=fresh)]).values()
        assert small.tokens(outputs) == alone(small, prompt, source, 6)
    with pytest.raises(InvalidInputError):
        engine.add(small.request(prompt, 6, adapter=AdapterRef("ft:fresh", f"/nowhere/{refs[0].name}")))
    running = small.request(prompt, 6, adapter=fresh)
    engine.add(running)
    engine.step()
    engine.drop_adapter("ft:fresh")
    with pytest.raises(InvalidInputError):
        engine.add(small.request(prompt, 6, adapter=fresh))
    (outputs,) = small.run(engine).values()
    assert small.tokens(outputs) == alone(small, prompt, refs[1], 6)[1:]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_an_adapter_that_is_not_finite_harms_no_neighbour(small, refs, tmp_path, caplog, poison: float) -> None:
    """Neither those in its batches nor those who get its pages afterwards."""
    bad = small.make_adapter(tmp_path, "bad", 9, poison=poison)
    engine = small.engine(num_pages=12, page_tokens=4, max_num_seqs=4, max_num_batched_tokens=16)
    doomed = [small.request(small.prompt(length), 10, adapter=bad, prompt_logprobs=1) for length in (5, 30)]
    healthy = [small.request(small.prompt(9, seed), 10, adapter=(None, refs[0])[seed % 2]) for seed in range(6)]
    with caplog.at_level(logging.ERROR):
        outputs = small.run(engine, [doomed[0], *healthy[:3], doomed[1], *healthy[3:]])
    for request in doomed:
        (output,) = outputs[request.request_id]
        assert output.finish_reason is FinishReason.ABORT
        assert output.token_ids == ()
        assert output.prompt_logprobs is None
        assert request.request_id in caplog.text
    for request in healthy:
        assert small.tokens(outputs[request.request_id]) == alone(small, request.prompt, request.adapter, 10)
    small.run(engine, [small.request(small.prompt(30), 0, adapter=bad, request_id="prompt only")])
    assert engine.kv_cache.isfinite().all()
    (output,) = small.run(engine, [small.request(small.prompt(5), 0, adapter=bad, prompt_logprobs=0)]).values()
    assert output[0].finish_reason is FinishReason.ABORT

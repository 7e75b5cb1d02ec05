"""Which weights a request gets, and keeps, while its adapter is replaced, deleted, or changed on disk."""

import shutil
from pathlib import Path

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef, FinishReason
from cotenant.models.lora import read_adapter
from engine.adapter_runs import alone, fails, load, run, until, warm


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
    engine.drop_adapter(fresh)
    outputs += until(engine, lambda: not engine.has_work)
    assert small.tokens(outputs) == alone(small, prompt, refs[1], 200)
    assert fails(small, engine, prompt, fresh)


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
    engine.drop_adapter(ref)
    ((told, refused),) = engine.take_loaded()
    assert refused is not None
    assert (told, "was unloaded" in refused.message) == (ref, True)
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
        engine.drop_adapter(ref)
        shutil.rmtree(ref.path)
    urgent = [small.request(small.prompt(50, seed), 20, adapter=other) for seed, other in enumerate(refs[2:4])]
    for request in urgent:
        engine.add(request)
    engine.wait_for_adapters(refs[2:4])  # else those who have begun may end before others can take their seats
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
    engine.drop_adapter(ref)
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


def test_who_waits_for_what_is_not_at_hand_as_it_is_deleted_is_told_so(small, tmp_path) -> None:
    """Host memory has one beside the slot: the others would have been read from the folders that are gone."""
    refs = [small.make_adapter(tmp_path, f"adapter-{seed}", seed) for seed in range(4)]
    engine = small.engine(max_num_seqs=1, max_loras=1, max_cpu_loras=2)
    requests = [small.request(small.prompt(9), 200 if ref is refs[0] else 20, adapter=ref) for ref in refs]
    engine.add(requests[0])
    outputs = until(engine, lambda: engine.num_running == 1)
    for request in requests[1:]:
        engine.add(request)
    engine.wait_for_adapters(refs)  # each was read once; what is in order first is read again, alone
    outputs += until(engine, lambda: [view.waits_for_adapter for view in engine.views()] == [False, False, True, True])
    for ref in refs:
        engine.drop_adapter(ref)
        shutil.rmtree(ref.path)
    outputs += until(engine, lambda: not engine.has_work)
    ended = {output.request_id for output in outputs if output.finish_reason is FinishReason.LENGTH}
    assert ended == {request.request_id for request in requests[:2]}
    assert {request_id for request_id, _ in engine.take_failures()} == {each.request_id for each in requests[2:]}


@pytest.mark.parametrize("is_stepped", [True, False], ids=["told", "untold"])
def test_who_comes_after_a_folder_was_mended_does_not_hear_that_it_was_broken(
    small, refs, tmp_path, is_stepped: bool
) -> None:
    """Though another waits for the seat, and for host memory, before those who want it."""
    ref = small.make_adapter(tmp_path, "mended", 7)
    weights = Path(ref.path) / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"")
    engine = small.engine(max_num_seqs=1, max_loras=1, max_cpu_loras=2)
    engine.add(small.request(small.prompt(9), 60, adapter=refs[0]))
    until(engine, lambda: engine.num_running == 1)
    engine.add(small.request(small.prompt(9), 20, adapter=refs[1]))
    early, late = (small.request(small.prompt(9, seed), 5, adapter=ref) for seed in (1, 2))
    engine.add(early)
    engine._adapters.cache.wait(ref)
    told = []
    if is_stepped:
        engine.step()
        told += engine.take_failures()
        assert [request_id for request_id, _ in told] == [early.request_id], "it waited for nothing any more"
    weights.write_bytes(content)
    engine.add(late)
    outputs = until(engine, lambda: not engine.has_work)
    told += engine.take_failures()
    assert [request_id for request_id, _ in told] == [early.request_id]
    assert small.tokens([each for each in outputs if each.request_id == late.request_id]) == alone(
        small, late.prompt, ref, 5
    )


def test_who_waits_for_an_adapter_keeps_it_when_its_name_is_given_to_another_folder(small, refs, tmp_path) -> None:
    old, new = small.make_adapter(tmp_path, "old", 1), small.make_adapter(tmp_path, "new", 2)
    old, new = AdapterRef("name", old.path), AdapterRef("name", new.path)
    engine = small.engine(max_num_seqs=1)
    engine.add(small.request(small.prompt(9), 60, adapter=refs[0]))
    until(engine, lambda: engine.num_running == 1)
    before = small.request(small.prompt(9, 1), 5, adapter=old)
    expected = alone(small, before.prompt, old, 5)
    engine.add(before)
    engine.wait_for_adapters([old])
    error, outputs = load(engine, new)
    assert error is None
    shutil.rmtree(old.path)
    after = small.request(small.prompt(9, 2), 5, adapter=new)
    engine.add(after)
    outputs += until(engine, lambda: not engine.has_work)
    assert engine.take_failures() == []
    tokens = [small.tokens([each for each in outputs if each.request_id == of.request_id]) for of in (before, after)]
    assert tokens == [expected, alone(small, after.prompt, new, 5)]


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_that_are_loaded_at_once_each_hears_of_its_own(small, tmp_path, is_first: bool) -> None:
    broken, whole = (small.make_adapter(tmp_path, name, 1) for name in ("broken", "whole"))
    (Path(broken.path) / "adapter_config.json").write_text("{")
    engine = small.engine()
    refs = (broken, whole) if is_first else (whole, broken)
    for ref in refs:
        engine.load_adapter(ref)
    loaded: dict[AdapterRef, InvalidInputError | None] = {}

    def both() -> bool:
        loaded.update(engine.take_loaded())
        return len(loaded) == 2

    until(engine, both)
    assert loaded[whole] is None
    assert broken.path in str(loaded[broken])
    requests = {ref: small.request(small.prompt(5), 3, adapter=ref) for ref in refs}
    outputs = run(small, engine, requests.values())
    assert [request_id for request_id, _ in engine.take_failures()] == [requests[broken].request_id]
    assert list(outputs) == [requests[whole].request_id]

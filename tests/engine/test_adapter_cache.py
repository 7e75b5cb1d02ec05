"""The adapter cache: what is read when, what stays, and that nobody loses an adapter that is in use."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.config import LoraConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef
from cotenant.engine import adapters
from cotenant.engine.adapters import AdapterCache, Hold
from cotenant.models.lora import LoraAdapter, LoraPair, read_adapter, save_adapter
from cotenant.models.spec import ModelSpec

CPU = torch.device("cpu")
TINY = ModelSpec("llama", 1, 8, 8, 1, 1, 8, 11, 32)


def tiny_adapter(number: float, r: int = 2) -> LoraAdapter:
    """Its A holds one number, by which it is told."""
    num_out, num_in = TINY.module_shape("q_proj")
    pair = LoraPair(torch.full((r, num_in), number), torch.full((num_out, r), 1.0))
    return LoraAdapter("tiny", TINY, r, float(r), {(0, "q_proj"): pair})


def number_of(adapter: LoraAdapter) -> float:
    group = adapter.packed(0, "q_proj")
    assert group is not None
    return float(group.a.max())


@pytest.fixture(scope="module")
def tiny_refs(tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    folder = tmp_path_factory.mktemp("tiny")
    for number in range(20):
        save_adapter(tiny_adapter(1 + number, r=1 + number % 3), folder / str(number), "tiny")
    return [AdapterRef(f"tiny-{number}", str(folder / str(number))) for number in range(20)]


@pytest.fixture(params=[False, True], ids=["packed", "stacks"])
def make_cache(request: pytest.FixtureRequest) -> Iterator[Callable[..., AdapterCache]]:
    made: list[AdapterCache] = []

    def make(max_loras: int = 2, max_cpu_loras: int | None = None) -> AdapterCache:
        config = LoraConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_lora_rank=4)
        made.append(AdapterCache(TINY, CPU, torch.float32, config, use_stacks=request.param))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def fetch(cache: AdapterCache, ref: AdapterRef, in_use: frozenset[AdapterRef] = frozenset()) -> LoraAdapter:
    cache.prefetch(ref)
    cache.wait(ref)
    assert cache.is_ready(ref), cache.failure(ref)
    return cache.acquire(ref, in_use)


def test_reading_does_not_hold_up_the_caller(make_cache, tiny_refs, monkeypatch) -> None:
    disk = threading.Event()
    threads = []

    def slow(*arguments: object) -> LoraAdapter:
        threads.append(threading.current_thread())
        assert disk.wait(60)
        return read_adapter(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(adapters, "read_adapter", slow)
    cache, ref = make_cache(), tiny_refs[3]
    for _ in range(3):
        cache.prefetch(ref)
    assert not cache.is_ready(ref)
    assert cache.failure(ref) is None
    disk.set()
    cache.wait(ref)
    assert cache.is_ready(ref)
    assert number_of(cache.acquire(ref, frozenset())) == 4
    cache.check_integrity({ref})
    assert len(threads) == 1, "it was read more than once"
    assert threads[0] is not threading.current_thread()


def test_a_slot_is_given_to_another_while_its_owner_stays_in_host_memory(make_cache, tiny_refs, tmp_path) -> None:
    cache = make_cache(max_loras=2)
    folders = [AdapterRef(ref.name, str(tmp_path / ref.name)) for ref in tiny_refs[:4]]
    for ref, copy in zip(tiny_refs, folders, strict=False):
        shutil.copytree(ref.path, copy.path)
        cache.prefetch(copy)
    for copy in folders:
        cache.wait(copy)
        shutil.rmtree(copy.path)
    held = cache.acquire(folders[0], frozenset())
    for number in (1, 2, 3, 1):
        assert number_of(cache.acquire(folders[number], {folders[0]})) == number + 1
        cache.check_integrity({folders[0], folders[number]})
    assert number_of(held) == 1
    assert cache.acquire(folders[0], frozenset()) is held


def test_the_least_recently_used_leave_host_memory(make_cache, tiny_refs) -> None:
    """By default sixteen stay; what lies in a slot is never among those that go."""
    cache = make_cache(max_loras=1)
    assert cache.max_cpu_loras == 16
    fetch(cache, tiny_refs[0])
    for ref in tiny_refs[1:16]:
        cache.prefetch(ref)
        cache.wait(ref)
    cache.prefetch(tiny_refs[1])  # used again: 2 goes in its place
    cache.prefetch(tiny_refs[16])
    cache.wait(tiny_refs[16])
    cache.prefetch(tiny_refs[16])
    ready = [ref for ref in tiny_refs if cache.is_ready(ref)]
    assert ready == [*tiny_refs[:2], *tiny_refs[3:17]]
    cache.check_integrity(frozenset())


def test_what_is_waited_for_stays_in_host_memory_however_much_else_is_read(make_cache, tiny_refs, monkeypatch) -> None:
    read: list[str] = []

    def counting(folder: Path, *arguments: object) -> LoraAdapter:
        read.append(str(folder))
        return read_adapter(folder, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(adapters, "read_adapter", counting)
    cache = make_cache(max_loras=1, max_cpu_loras=4)
    running, waiting, others = tiny_refs[0], tiny_refs[1 : 1 + cache.max_read_ahead], tiny_refs[4:10]
    fetch(cache, running)
    for other in others:
        for ref in (other, *waiting):
            cache.prefetch(ref)
        cache.wait(other)
    for ref in waiting:
        assert cache.is_ready(ref)
    assert len(read) == len(set(read)) == 10, "what is waited for was read again"
    assert sum(cache.is_ready(other) for other in others) <= 1


def test_host_memory_has_room_for_one_more_than_the_slots(make_cache, tiny_refs) -> None:
    cache = make_cache(max_loras=2, max_cpu_loras=2)
    for number in (0, 1, 2, 3, 0, 2):
        assert number_of(fetch(cache, tiny_refs[number])) == number + 1
        cache.check_integrity(frozenset())


def test_a_failure_is_told_until_the_next_try(make_cache, tiny_refs, tmp_path) -> None:
    cache, ref = make_cache(), AdapterRef("late", str(tmp_path / "late"))
    cache.prefetch(ref)
    cache.wait(ref)
    cache.prefetch(ref)  # nobody has seen the failure yet, so it stays
    for _ in range(2):
        error = cache.failure(ref)
        assert isinstance(error, InvalidInputError)
        assert ref.path in error.message
    assert not cache.is_ready(ref)
    shutil.copytree(tiny_refs[5].path, ref.path)
    assert number_of(fetch(cache, ref)) == 6
    assert cache.failure(ref) is None
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "adapter_config.json").write_text("[]")
    junk = AdapterRef("junk", str(tmp_path / "junk"))
    cache.prefetch(junk)
    cache.wait(junk)
    assert cache.failure(junk) is not None
    cache.drop("junk")
    assert cache.failure(junk) is None


def test_an_adapter_of_too_high_a_rank_is_refused(make_cache, tmp_path) -> None:
    save_adapter(tiny_adapter(1, r=5), tmp_path / "high", "tiny")
    cache, ref = make_cache(), AdapterRef("high", str(tmp_path / "high"))
    cache.prefetch(ref)
    cache.wait(ref)
    error = cache.failure(ref)
    assert error is not None
    assert "--max-lora-rank, which is 4" in error.message


def test_a_registered_adapter_is_a_frozen_copy(make_cache) -> None:
    cache, ref = make_cache(), AdapterRef("ft:new", "/nowhere")
    source = tiny_adapter(7)
    cache.register(ref, source)
    source.weights[0, "q_proj"].a.fill_(8)
    cache.wait(ref)
    assert number_of(cache.acquire(ref, frozenset())) == 7
    cache.register(ref, source)
    cache.wait(ref)
    assert number_of(cache.acquire(ref, frozenset())) == 8


def test_an_adapter_that_was_dropped_while_it_is_held_stays_for_who_holds_it(make_cache, tiny_refs) -> None:
    cache, ref = make_cache(max_loras=2, max_cpu_loras=3), tiny_refs[0]
    running = fetch(cache, ref)
    hold = cache.hold(ref)
    cache.register(ref, tiny_adapter(50.0))
    successor = fetch(cache, ref, frozenset({hold.ref}))
    assert hold.ref not in {ref, *tiny_refs}
    cache.check_integrity({ref, hold.ref})
    assert (number_of(running), number_of(successor)) == (1, 50)
    for other in tiny_refs[1:8]:  # it is preempted meanwhile: others have its slot, and push out what nobody holds
        fetch(cache, other)
    assert not cache.is_ready(ref)
    assert cache.is_ready(hold.ref)
    assert number_of(cache.acquire(hold.ref, frozenset())) == 1
    retired = hold.ref
    cache.let_go(hold)
    cache.check_integrity(frozenset())
    assert not cache.is_ready(retired)


def test_what_is_held_leaves_room_for_what_others_wait_for(make_cache, tiny_refs) -> None:
    cache = make_cache(max_loras=1, max_cpu_loras=2)
    for ref in tiny_refs[:4]:
        fetch(cache, ref)
        assert cache.hold(ref) is not None
    fetch(cache, tiny_refs[5])
    assert all(cache.is_ready(ref) for ref in tiny_refs[:4])


@settings(max_examples=60, deadline=None)
@given(
    use_stacks=st.booleans(),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "end", "preempt", "resume", "drop", "register"]), st.integers(0, 5)
        ),
        max_size=40,
    ),
)
def test_whatever_comes_and_goes_who_has_begun_keeps_its_adapter(
    tiny_refs: list[AdapterRef], use_stacks: bool, steps: list[tuple[str, int]]
) -> None:
    cache = AdapterCache(
        TINY, CPU, torch.float32, LoraConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=4), use_stacks
    )
    numbers = {ref: 1.0 + index for index, ref in enumerate(tiny_refs)}
    running: list[tuple[Hold, LoraAdapter, float]] = []
    preempted: list[tuple[Hold, float]] = []
    for index, (action, choice) in enumerate(steps):
        ref = tiny_refs[choice]
        in_use = {hold.ref for hold, _, _ in running}
        if action == "start" and (ref in in_use or len(in_use) < cache.max_loras):
            adapter = fetch(cache, ref, frozenset(in_use))
            number = number_of(adapter)
            assert number >= 100 or number == numbers[ref]
            hold = cache.hold(ref)
            assert hold is not None
            running.append((hold, adapter, number))
        elif action == "end" and running:
            cache.let_go(running.pop(choice % len(running))[0])
        elif action == "preempt" and running:
            hold, _, number = running.pop(choice % len(running))
            preempted.append((hold, number))
        elif action == "resume" and preempted:
            hold, number = preempted[choice % len(preempted)]
            if hold.ref in in_use or len(in_use) < cache.max_loras:
                preempted.pop(choice % len(preempted))
                running.append((hold, fetch(cache, hold.ref, frozenset(in_use)), number))
        elif action == "drop":
            cache.drop(ref.name)
        elif action == "register":
            cache.register(ref, tiny_adapter(100.0 + index))
        for _, adapter, number in running:
            assert number_of(adapter) == number
        cache.check_integrity({hold.ref for hold, _, _ in running})
    holds = [hold for hold, *_ in (*running, *preempted)]
    retired = [hold.ref for hold in holds if hold.ref not in tiny_refs]
    assert all(cache.is_ready(ref) for ref in retired)
    for hold in holds:
        cache.let_go(hold)
    assert not any(cache.is_ready(ref) for ref in retired)
    cache.close()


def test_a_fingerprint_tells_weights_apart_and_nothing_else(make_cache, tmp_path) -> None:
    adapters_by_name = {
        "one": tiny_adapter(1.0),
        "same": tiny_adapter(1.0),
        "other": tiny_adapter(2.0),
        "rank": tiny_adapter(1.0, r=3),
        "scaled": LoraAdapter("tiny", TINY, 2, 4.0, tiny_adapter(1.0).weights),
        "module": LoraAdapter("tiny", TINY, 2, 2.0, {(0, "k_proj"): tiny_adapter(1.0).weights[0, "q_proj"]}),
    }
    cache = make_cache(max_loras=2, max_cpu_loras=8)
    found = {}
    for name, adapter in adapters_by_name.items():
        save_adapter(adapter, tmp_path / name, "tiny")
        ref = AdapterRef(name, str(tmp_path / name))
        fetch(cache, ref)
        found[name] = cache.fingerprint(ref)
    assert found.pop("same") == found["one"]
    assert len(set(found.values())) == len(found)

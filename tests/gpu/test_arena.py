"""The CUDA arena: content, addresses, captured graphs, memory that runs out, and how long a GiB takes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch

from cotenant.device import create_device
from cotenant.device.arena import Arena
from cotenant.device.cuda.graphs import capture_graph
from cotenant.engine.kv_cache import KvCache, Resized
from cotenant.models.spec import ModelSpec

MIB = 1 << 20
GIB = 1 << 30


def create_arena(num_chunks: int, chunk_bytes: int = 2 * MIB) -> Arena:
    return create_device("cuda").create_arena(num_chunks * chunk_bytes, chunk_bytes)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.empty_cache()  # what other tests left to torch's allocator
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What CUDA loads with its first kernels takes memory, too."""
    arena = create_arena(1)
    arena.map([0])
    arena.tensor(torch.uint8).fill_(1)
    free_bytes()
    arena.close()


# Of several times the best one is judged: on a shared host the driver takes longer now and then. What pauses come to
# under load is bench/resize_under_load.py's to measure.
def elapsed_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def test_content_stays_and_what_comes_back_is_zero() -> None:
    arena = create_arena(4)
    chunks = arena.tensor(torch.int64).view(4, -1)  # nothing is mapped yet
    address = chunks.data_ptr()
    arena.map([0, 2, 3])
    for chunk in (0, 2, 3):
        assert not chunks[chunk].any()
        chunks[chunk] = chunk + 1
    arena.unmap([2])
    arena.map([1, 2])
    assert arena.mapped == {0, 1, 2, 3}
    assert (chunks == torch.tensor([[1], [0], [0], [4]], device="cuda")).all()
    assert arena.tensor(torch.bfloat16).data_ptr() == address
    assert chunks.device == create_device("cuda").torch_device


def test_many_chunks_come_at_once_around_those_that_are_there() -> None:
    arena = create_arena(30)
    chunks = arena.tensor(torch.int64).view(30, -1)
    arena.map([4, 25])
    chunks[[4, 25]] = 7
    arena.map(set(range(30)) - {4, 9, 25})
    assert not chunks[[chunk for chunk in range(30) if chunk not in (4, 9, 25)]].any()
    assert (chunks[[4, 25]] == 7).all()
    arena.unmap(set(range(30)) - {4, 9, 25})
    assert arena.mapped == {4, 25}
    assert (chunks[[4, 25]] == 7).all()


def test_chunks_are_whole_pages_of_the_device() -> None:
    with pytest.raises(ValueError, match="positive multiple of"):
        create_arena(4, MIB)


def test_memory_goes_back_to_the_device() -> None:
    arena = create_arena(4, 256 * MIB)
    before = free_bytes()
    arena.map(range(4))
    assert before - free_bytes() >= GIB
    arena.unmap([1, 3])
    assert before - free_bytes() < 0.6 * GIB
    arena.close()
    assert before - free_bytes() < 64 * MIB


def test_memory_lives_as_long_as_a_tensor_over_it() -> None:
    arena = create_arena(4, 256 * MIB)
    before = free_bytes()
    arena.map([1, 2])
    tensor = arena.tensor(torch.uint8)[256 * MIB : 768 * MIB]
    tensor.fill_(7)
    del arena
    gc.collect()
    assert (tensor == 7).all()
    assert before - free_bytes() >= 0.5 * GIB
    del tensor
    assert before - free_bytes() < 64 * MIB


def test_a_captured_graph_goes_on_when_other_chunks_change() -> None:
    arena = create_arena(6)
    arena.map(range(6))
    rows = arena.tensor(torch.int64).view(6, -1)
    index = torch.tensor([0, 4], device="cuda")
    total = torch.zeros((), dtype=torch.int64, device="cuda")
    width = rows.shape[1]

    def read() -> None:
        total.copy_(rows.index_select(0, index).sum())

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()

    rows[0], rows[4] = 3, 5
    graph.replay()
    assert total.item() == 8 * width
    arena.unmap([1, 2, 5])
    graph.replay()
    assert total.item() == 8 * width
    arena.map([2])
    rows[2] = 11
    arena.unmap([4])
    arena.map([4])  # the graph reads this one: zeros now
    graph.replay()
    assert total.item() == 3 * width
    rows[4] = 2
    graph.replay()
    assert total.item() == 5 * width


def test_out_of_memory_changes_nothing() -> None:
    _, total = torch.cuda.mem_get_info()
    num_chunks = total // GIB + 8
    arena = create_arena(num_chunks, GIB)
    arena.map([0])
    arena.tensor(torch.uint8)[:GIB].fill_(9)
    torch.cuda.empty_cache()
    before = free_bytes()
    with pytest.raises(torch.OutOfMemoryError, match=r"cannot map \d+ chunks of 1024 MiB: cuda:0 has \d+ MiB free"):
        arena.map(range(1, num_chunks))
    assert arena.mapped == {0}
    assert abs(free_bytes() - before) < 64 * MIB
    arena.map([num_chunks - 1])
    assert (arena.tensor(torch.uint8)[: 64 * MIB] == 9).all()


def test_what_torch_keeps_for_later_is_given_back_first() -> None:
    arena = create_arena(4, GIB)
    torch.cuda.empty_cache()
    kept = torch.empty(free_bytes() - 2 * GIB, dtype=torch.uint8, device="cuda")
    del kept  # torch's allocator has it still
    assert torch.cuda.mem_get_info()[0] < 3 * GIB
    arena.map(range(4))
    assert not arena.tensor(torch.uint8).view(4, -1)[:, ::4096].any()


def test_what_one_arena_kept_another_takes_and_finds_zeros() -> None:
    device = create_device("cuda")
    first, second = (device.create_arena(GIB, 128 * MIB) for _ in range(2))
    before = free_bytes()
    first.map(range(8))
    first.tensor(torch.uint8).fill_(7)
    first.unmap([1, 2, 5], keep=True)
    assert before - free_bytes() >= GIB, "the device holds on to it"
    second.map([0, 3, 4, 6])  # three that were kept, and a new one
    assert before - free_bytes() < 1.2 * GIB
    ours, theirs = (arena.tensor(torch.uint8).view(8, -1)[:, ::4096] for arena in (second, first))
    assert not ours[[0, 3, 4, 6]].any()
    assert (theirs[[0, 3, 4, 6, 7]] == 7).all()
    second.unmap([0, 3], keep=True)
    device.release_kept_memory()
    assert before - free_bytes() < 0.95 * GIB
    first.close()
    second.close()
    assert before - free_bytes() < 64 * MIB


def test_kept_memory_is_given_back_before_memory_runs_out() -> None:
    device = create_device("cuda")
    _, total = torch.cuda.mem_get_info()
    first, second = device.create_arena(4 * GIB, 128 * MIB), device.create_arena(total, GIB)
    first.map(range(32))
    first.unmap(range(32), keep=True)
    num_chunks = (free_bytes() + 2 * GIB) // GIB  # of a size that nobody kept
    second.map(range(num_chunks))
    assert not second.tensor(torch.uint8)[: num_chunks * GIB : 4096].any()


def test_a_gib_that_is_kept_moves_within_a_millisecond() -> None:
    device = create_device("cuda")
    arenas = [device.create_arena(GIB, 128 * MIB) for _ in range(2)]
    chunks = range(8)
    arenas[0].map(chunks)
    moves = []
    for turn in range(11):
        moves.append(elapsed_ms(lambda: arenas[turn % 2].unmap(chunks, keep=True)))  # noqa: B023
        arenas[1 - turn % 2].map(chunks)
    print(f"arena, 1 GiB kept: unmap {min(moves):.2f} to {max(moves):.2f} ms")
    assert min(moves) < 1


def test_a_gib_moves_within_5_ms() -> None:
    arena = create_arena(64, 32 * MIB)
    arena.map(range(32))  # others stay mapped beside them
    chunks = range(32, 64)
    arena.map(chunks)  # the first time loads the driver's code
    arena.unmap(chunks)
    grow, shrink = [], []
    for _ in range(5):
        grow.append(elapsed_ms(lambda: arena.map(chunks)))
        shrink.append(elapsed_ms(lambda: arena.unmap(chunks)))
    print(f"arena, 1 GiB: map {min(grow):.2f} to {max(grow):.2f} ms, unmap {min(shrink):.2f} to {max(shrink):.2f} ms")
    assert min(grow) < 5
    assert min(shrink) < 5


def create_cache(num_pages: int, max_pages: int | None = None) -> KvCache:
    """Pages of 2 MiB, chunks of 128 MiB."""
    spec = ModelSpec(
        family="llama", num_layers=32, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8,
        head_dim=128, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    cache = KvCache(spec, torch.bfloat16, create_device("cuda"), 16, num_pages, max_pages)
    assert (cache.page_bytes, cache.chunk_bytes) == (2 * MIB, 128 * MIB)
    return cache


def test_a_half_full_cache_gives_a_gib_up_and_takes_it_back_within_5_ms() -> None:
    cache = create_cache(4 * GIB // (2 * MIB))
    grow, shrink, num_moved = [], [], []
    for _ in range(5):
        pages = [page for owner in range(cache.num_pages) for page in cache.pool.allocate(owner, 1)]
        for owner in range(1, cache.num_pages, 2):  # every chunk is half full
            cache.pool.free(owner)
        owners = range(0, cache.num_pages, 2)
        for owner in owners:
            cache.tensor[pages[owner]] = owner % 256
        results: list[Resized] = []
        cache.resize(cache.max_pages - GIB // cache.page_bytes)
        shrink.append(elapsed_ms(lambda: results.append(cache.step(GIB))))  # noqa: B023
        cache.resize(cache.max_pages)
        grow.append(elapsed_ms(lambda: results.append(cache.step(GIB))))  # noqa: B023
        assert [result.done for result in results] == [True, True]
        num_moved.append(len(results[0].moves))
        cache.check_integrity()
        for owner in owners:
            (page,) = cache.pool.pages(owner)
            assert page == results[0].moves.get(pages[owner], pages[owner])
        held = cache.tensor[[cache.pool.pages(owner)[0] for owner in owners]].flatten(1)
        expected = torch.tensor([owner % 256 for owner in owners], dtype=held.dtype, device="cuda")
        assert (held == expected.unsqueeze(1)).all()
        del held
        for owner in owners:
            cache.pool.free(owner)
    print(
        f"cache, 1 GiB: grow {min(grow):.2f} to {max(grow):.2f} ms, shrink {min(shrink):.2f} to {max(shrink):.2f} ms "
        f"with {num_moved} pages moved"
    )
    assert all(num_moved)
    assert min(grow) < 5
    assert min(shrink) < 5


def test_a_cache_that_cannot_grow_stays_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    _, total = torch.cuda.mem_get_info()
    cache = create_cache(64, total // (2 * MIB) + 1024)
    cache.tensor[cache.pool.allocate(1, 1)[0]] = 3
    cache.resize(cache.max_pages)
    assert cache.step(2 * total).done, "the target is given up"
    assert cache.num_pages == 64
    assert "stays at 64 pages" in caplog.text
    assert "cannot map" in caplog.text
    cache.check_integrity()
    cache.resize(128)
    assert cache.step(GIB).done
    assert cache.num_pages == 128
    assert (cache.tensor[cache.pool.pages(1)[0]] == 3).all()


def test_what_a_graph_needs_is_not_free() -> None:
    device = create_device("cuda")
    numbers = torch.ones(1 << 26, device="cuda")

    def run() -> None:
        numbers.add_(numbers * 2)  # 256 MiB that only the graph's own launches may use again

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = device.memory_bytes()[0]
        graph = capture_graph(run, torch.cuda.graph_pool_handle(), warm_up=False)
        assert before - device.memory_bytes()[0] >= 256 * MIB
        del graph
        torch.cuda.empty_cache()
        assert before - device.memory_bytes()[0] < 64 * MIB

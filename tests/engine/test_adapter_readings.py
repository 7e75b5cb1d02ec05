"""Which adapters are read, and in which order, where requests for them are given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotenant.core.request import AdapterRef
from cotenant.engine import adapters
from cotenant.models.lora import LoraAdapter, read_adapter
from engine.adapter_runs import alone, run, until


class HeldDisk:
    """``names``: of the adapters whose reading has begun. It ends when the test says so."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.begun = threading.Event()
        self.may_go_on = threading.Event()

    def read(self, folder: Path, *arguments: object) -> LoraAdapter:
        self.names.append(folder.name)
        self.begun.set()
        assert self.may_go_on.wait(60)
        return read_adapter(folder, *arguments)  # type: ignore[arg-type]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    held = HeldDisk()
    monkeypatch.setattr(adapters, "read_adapter", held.read)
    yield held
    held.may_go_on.set()


def test_what_only_aborted_requests_wanted_is_not_read(small, refs, disk) -> None:
    engine = small.engine()
    given_up = [small.request(small.prompt(5), 3, adapter=ref) for ref in (refs[0], refs[1], refs[1], refs[2])]
    for request in given_up:
        engine.add(request)
    assert disk.begun.wait(60)
    shared = small.request(small.prompt(5), 3, adapter=refs[2])
    engine.add(shared)
    engine.abort([request.request_id for request in given_up])
    engine.check_integrity()
    last = small.request(small.prompt(5), 3, adapter=refs[3])
    engine.add(last)
    disk.may_go_on.set()
    outputs = run(small, engine)
    assert outputs.keys() == {shared.request_id, last.request_id}
    assert disk.names == [refs[0].name, refs[2].name, refs[3].name], "the first one's reading had begun"
    engine.check_integrity()
    again = small.request(small.prompt(5), 3, adapter=refs[1])
    (answer,) = run(small, engine, [again]).values()
    assert disk.names[3:] == [refs[1].name]
    assert small.tokens(answer) == alone(small, again.prompt, refs[1], 3)


def test_what_is_loaded_or_registered_is_there_though_a_request_for_it_was_given_up(small, refs, disk) -> None:
    engine = small.engine()
    first = small.request(small.prompt(5), 3, adapter=refs[0])
    engine.add(first)
    assert disk.begun.wait(60)
    engine.load_adapter(refs[1])
    registered = read_adapter(Path(refs[2].path), small.decoder.spec, 8)
    fresh = AdapterRef("ft:fresh", "/nowhere/fresh")
    engine.register_adapter(fresh, registered)
    given_up = [small.request(small.prompt(5), 3, adapter=ref) for ref in (refs[1], fresh)]
    for request in given_up:
        engine.add(request)
    engine.abort([request.request_id for request in given_up])
    disk.may_go_on.set()
    loaded: list[object] = []
    until(engine, lambda: loaded.extend(engine.take_loaded()) or loaded)
    assert loaded == [(refs[1], None)]
    later = small.request(small.prompt(5), 3, adapter=fresh)
    outputs = run(small, engine, [later])
    assert small.tokens(outputs[later.request_id]) == alone(small, later.prompt, refs[2], 3)
    assert disk.names.count(refs[1].name) == 1

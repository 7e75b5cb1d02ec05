"""Adapters that are loaded and unloaded while serving: names, and what the worker says of a folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api_worker.clients import kill_worker, make_client, run, running, until
from api_worker.stand_in_worker import BROKEN_ADAPTER, DEADLY_ADAPTER
from cotenant.api.models import ModelNames
from cotenant.api.worker_client import WorkerClient
from cotenant.config import LoraConfig, ModelConfig, ServerConfig
from cotenant.core.errors import CotenantError, InvalidInputError, NotFoundError, OverloadedError
from cotenant.core.request import AdapterRef
from cotenant.store import JobStatus, Store, open_store
from store.rows import add_job, add_running_job, make_adapter


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path / "data")
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    folder = tmp_path / "adapter"
    folder.mkdir()
    return str(folder)


@asynccontextmanager
async def serving(store: Store, folder: str, start: str = "ready") -> AsyncIterator[tuple[ModelNames, WorkerClient]]:
    """The names of a server whose flags name one adapter, ``flagged``."""
    config = ServerConfig(ModelConfig("tiny"), lora=LoraConfig(modules=(("flagged", folder),)))
    async with running(make_client(start), ready=start == "ready") as client:
        yield ModelNames(config, None, "base", client, store), client


def scenario(store: Store, folder: str, steps: Callable[[ModelNames, WorkerClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with serving(store, folder) as (names, client):
            await steps(names, client)

    run(whole)


async def names_of(names: ModelNames) -> list[str]:
    return [card.id for card in await names.cards()]


def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(store: Store, folder: str) -> None:
    async def steps(names: ModelNames, client: WorkerClient) -> None:
        with pytest.raises(NotFoundError):
            await names.resolve("new")
        await names.load_adapter("new", folder, replace=False)
        assert (await names.resolve("new")).adapter == AdapterRef("new", folder)
        card = await names.card("new")
        assert (card.root, card.parent) == (folder, "tiny")
        assert await names_of(names) == ["tiny", "flagged", "new"]
        await kill_worker(client)
        assert (await names.resolve("new")).adapter == AdapterRef("new", folder)
        await names.unload_adapter("new")
        await names.unload_adapter("flagged")
        assert await names_of(names) == ["tiny"]
        for name in ("new", "tiny"):
            with pytest.raises(NotFoundError, match="cannot be found"):
                await names.unload_adapter(name)

    scenario(store, folder, steps)


def test_a_name_in_use_is_refused_unless_the_adapter_is_replaced(store: Store, folder: str, tmp_path: Path) -> None:
    async def steps(names: ModelNames, client: WorkerClient) -> None:
        other = tmp_path / "other"
        other.mkdir()
        await names.load_adapter("new", folder, replace=False)
        for name in ("new", "flagged", "tiny"):
            with pytest.raises(InvalidInputError, match="is in use"):
                await names.load_adapter(name, str(other), replace=False)
        with pytest.raises(InvalidInputError, match="base model"):
            await names.load_adapter("tiny", str(other), replace=True)
        assert (await names.resolve("new")).adapter == AdapterRef("new", folder)
        await names.load_adapter("new", str(other), replace=True)
        assert (await names.resolve("new")).adapter == AdapterRef("new", str(other))

    scenario(store, folder, steps)


def test_a_jobs_adapter_keeps_its_name_and_cannot_be_unloaded(store: Store, folder: str) -> None:
    job = add_running_job(store)
    path = make_adapter(store, job, "adapter")
    values = {"status": JobStatus.SUCCEEDED, "adapter_path": path, "finished_at": 1}
    assert store.jobs.change(job.id, [JobStatus.RUNNING], values)

    async def steps(names: ModelNames, client: WorkerClient) -> None:
        assert (await names.resolve(job.adapter_name)).adapter is not None
        with pytest.raises(InvalidInputError, match="fine-tuning job"):
            await names.load_adapter(job.adapter_name, folder, replace=True)
        with pytest.raises(InvalidInputError, match="fine-tuning job"):
            await names.unload_adapter(job.adapter_name)

    scenario(store, folder, steps)


def test_the_names_of_what_a_job_will_make_are_in_use_until_it_has_ended(store: Store, folder: str) -> None:
    queued, running = add_job(store), add_running_job(store)

    async def steps(names: ModelNames, client: WorkerClient) -> None:
        for job in (queued, running):
            for name in (job.adapter_name, f"{job.adapter_name}:ckpt-step-7"):
                for replace in (False, True):
                    with pytest.raises(InvalidInputError, match=r"is in use: .* will have") as refused:
                        await names.load_adapter(name, folder, replace=replace)
                    assert refused.value.param == "lora_name"
            await names.load_adapter(f"{job.adapter_name}:mine", folder, replace=False)
        store.jobs.change(queued.id, [JobStatus.VALIDATING], {"status": JobStatus.CANCELLED})
        await names.load_adapter(queued.adapter_name, folder, replace=False)
        assert (await names.resolve(queued.adapter_name)).adapter == AdapterRef(queued.adapter_name, folder)

    scenario(store, folder, steps)


def test_a_name_is_listed_once_with_what_it_serves(store: Store, folder: str) -> None:
    """Also where it is given twice; ``check_given_names`` has refused a job's before."""
    job = add_running_job(store)
    values = {"status": JobStatus.SUCCEEDED, "adapter_path": make_adapter(store, job, "adapter"), "finished_at": 1}
    assert store.jobs.change(job.id, [JobStatus.RUNNING], values)

    async def whole() -> None:
        modules = (("other", folder), (job.adapter_name, folder))
        config = ServerConfig(ModelConfig("tiny", ("a", "b", "a")), lora=LoraConfig(modules=modules))
        async with running(make_client("ready")) as client:
            names = ModelNames(config, None, "base", client, store)
            assert await names_of(names) == ["a", "b", "other", job.adapter_name]
            assert (await names.card(job.adapter_name)).root == folder
            assert (await names.resolve(job.adapter_name)).adapter == AdapterRef(job.adapter_name, folder)
            await names.unload_adapter(job.adapter_name)
            assert (await names.card(job.adapter_name)).root == values["adapter_path"]

    run(whole)


@pytest.mark.parametrize(
    ("name", "path", "error", "complaint"),
    [
        ("new", "/nowhere/at/all", NotFoundError, "no folder '/nowhere"),
        ("new", "a\0b", NotFoundError, "no folder"),
        ("new", "x" * 4096, NotFoundError, "no folder"),
        (BROKEN_ADAPTER, None, InvalidInputError, "this is no adapter"),
        (DEADLY_ADAPTER, None, OverloadedError, "not running"),
    ],
)
def test_what_cannot_be_loaded_is_no_model(
    store: Store, folder: str, name: str, path: str | None, error: type[CotenantError], complaint: str
) -> None:
    async def steps(names: ModelNames, client: WorkerClient) -> None:
        with pytest.raises(error, match=complaint):
            await names.load_adapter(name, path or folder, replace=False)
        assert await names_of(names) == ["tiny", "flagged"]
        await until(lambda: client.ready is not None)
        await names.load_adapter("another", folder, replace=False)

    scenario(store, folder, steps)


def test_the_same_name_at_the_same_time_is_loaded_once(store: Store, folder: str) -> None:
    async def steps(names: ModelNames, client: WorkerClient) -> None:
        loads = [names.load_adapter("new", folder, replace=False) for _ in range(4)]
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["InvalidInputError"] * 3 + ["NoneType"]

    scenario(store, folder, steps)


def test_nothing_is_loaded_without_a_worker(store: Store, folder: str) -> None:
    async def whole() -> None:
        async with serving(store, folder, "slow") as (names, _):
            with pytest.raises(OverloadedError):
                await names.load_adapter("new", folder, replace=False)
            assert await names_of(names) == ["tiny", "flagged"]

    run(whole)

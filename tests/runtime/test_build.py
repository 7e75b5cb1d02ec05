"""What a server says of its configuration once it knows its device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from cotenant.cli.bench_colocate import _config
from cotenant.config import CacheConfig, CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime import build
from cotenant.runtime.build import build_serving
from cotenant.runtime.sizing import partition_bytes, prompt_partitions


@pytest.mark.parametrize(("policy", "is_told"), [("harli", True), ("static", True), ("adaptive", False)])
def test_a_policy_that_needs_partitions_is_told_where_there_are_none(
    policy: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build_serving(ServerConfig(ModelConfig("tiny", device="cpu"), coexecution=CoExecutionConfig(policy)))
    assert ("training runs only while nobody asks" in caplog.text) == is_told


@pytest.mark.parametrize("cache", [CacheConfig(num_pages=5), CacheConfig(cpu_cache_bytes=1 << 16)])
def test_a_cache_without_room_for_one_request_names_the_flag_that_gives_it_more(cache: CacheConfig) -> None:
    """On a CPU no share of the memory says how large it is."""
    config = ServerConfig(ModelConfig("tiny", device="cpu", max_model_len=512), cache=cache)
    with pytest.raises(InvalidInputError, match="lower --max-model-len or give --num-pages 32 or more"):
        build_serving(config)
    build_serving(replace(config, cache=CacheConfig(num_pages=32)))


def test_a_gpu_whose_products_are_wrong_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_products(_: object) -> None:
        raise InvalidInputError("they are wrong")

    config = ServerConfig(ModelConfig("tiny", device="cpu"))
    monkeypatch.setattr(build, "check_products", check_products)
    build_serving(config)
    monkeypatch.setattr(build, "runs_on_cuda", lambda device: True)
    with pytest.raises(InvalidInputError, match="they are wrong"):
        build_serving(config)


class SplitDevice(CpuDevice):
    partitions = (Partition(32, 100), Partition(48, 84), Partition(80, 52))


@pytest.mark.parametrize(
    ("has_kernels", "enforce_eager", "is_divided"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_multiprocessors_are_divided_where_decode_steps_are_captured(
    has_kernels: bool,
    enforce_eager: bool,
    is_divided: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Launched kernel by kernel, a step leaves the host no time for tasklets beside it."""
    divided: list[int] = []

    class LargeDevice(CpuDevice):
        num_multiprocessors = 100

        def split(self, online_sms: Iterable[int]) -> None:
            divided.extend(online_sms)
            self.partitions = tuple(Partition(num, 100 - num) for num in divided)

    monkeypatch.setattr(build, "create_device", lambda name: LargeDevice())
    monkeypatch.setattr(build, "is_supported", lambda *arguments: has_kernels)
    monkeypatch.setattr(build, "prepare", lambda *arguments: None)
    config = ServerConfig(ModelConfig("tiny", device="cpu"), coexecution=CoExecutionConfig("harli", sm_shares=(0.3,)))
    build_serving(replace(config, batch=replace(config.batch, enforce_eager=enforce_eager)))
    assert divided == ([30] if is_divided else [])
    for told in ("training runs only while nobody asks", "--sm-shares: no multiprocessors are divided here"):
        assert (told in caplog.text) == (not is_divided)


@pytest.mark.parametrize(("policy", "online_sms"), [("static", [80]), ("harli", []), ("adaptive", [])])
def test_batches_with_prompts_are_captured_where_a_policy_runs_them(policy: str, online_sms: list[int]) -> None:
    server = ServerConfig(ModelConfig("tiny"), coexecution=CoExecutionConfig(policy))
    compared = _config(ModelConfig("tiny"), 0, ["adaptive", "harli", policy], fuse=None)
    for config in (server, compared):
        assert [each.online_sms for each in prompt_partitions(config, SplitDevice())] == online_sms
    assert partition_bytes(with_prompts=True) > partition_bytes(with_prompts=False)

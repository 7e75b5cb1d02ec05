"""Which partitions of the SMs are asked for, of a driver that here only keeps count. tests/gpu/test_partitions.py has a
real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Partition
from cotenant.device.cuda import partitions

NUM_SMS = 132


class Driver:
    api = SimpleNamespace(
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        CUgreenCtxCreate_flags=SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1),
        CUstream_flags=SimpleNamespace(CU_STREAM_NON_BLOCKING=1),
    )
    refused: frozenset[int] = frozenset()

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuDeviceGetDevResource":
            return self._sms(NUM_SMS)
        if name == "cuDevSmResourceSplitByCount":
            count = arguments[3]
            if count % 8 or count in self.refused:
                raise RuntimeError(f"{count} SMs are refused")
            return [self._sms(count)], 1, self._sms(NUM_SMS - count)
        return 7

    def _sms(self, count: int) -> Any:
        return SimpleNamespace(sm=SimpleNamespace(smCount=count, smCoscheduledAlignment=8))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[Driver]:
    class Chosen(Driver):
        pass

    monkeypatch.setattr(partitions, "Driver", Chosen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: object())
    return Chosen


def split(*online_sms: int) -> list[Partition]:
    return list(partitions.split_multiprocessors(torch.device("cuda", 0), online_sms))


def test_numbers_of_sms_are_rounded_up_and_those_that_meet_are_one(driver: type[Driver]) -> None:
    assert split(63, 31, 29, 132, 140) == [Partition(32, 100), Partition(64, 68)]
    assert split(0) == [Partition(8, 124)], "a small share of them is no share of none"


def test_a_partition_that_the_driver_refuses_costs_no_other(
    driver: type[Driver], caplog: pytest.LogCaptureFixture
) -> None:
    driver.refused = frozenset({48})
    assert split(32, 48, 64) == [Partition(32, 100), Partition(64, 68)]
    assert "48 SMs are refused" in caplog.text
    with pytest.raises(RuntimeError, match="48 SMs are refused"):
        split(48)


class Older(Driver):
    """That of a GPU, or of bindings, without green contexts."""

    def call(self, name: str, *arguments: Any) -> Any:
        raise RuntimeError(f"{name}: there are no green contexts")


class Missing(Driver):
    def __init__(self) -> None:
        raise InvalidInputError("there are no bindings", param="device")


@pytest.mark.parametrize("chosen", [Older, Missing])
def test_without_green_contexts_there_are_no_partitions_and_the_log_says_so_once(
    chosen: type[Driver], driver: type[Driver], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(partitions, "Driver", chosen)
    made = partitions.Partitions(torch.device("cuda", 0))
    for _ in range(2):
        made.split([32, 64])
        assert made.streams == {}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "no partitions of the SMs" in record.message
    assert "there are no" in record.message


def test_partitions_that_cannot_be_made_take_none_away(driver: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    made = partitions.Partitions(torch.device("cuda", 0))
    made.split([32])
    monkeypatch.setattr(partitions, "Driver", Older)
    made.split([64])
    assert list(made.streams) == [Partition(32, 100)]

"""How products of a few rows are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.models.skinny_tiling import (
    MAX_ROWS,
    CompressedTiling,
    Multiprocessors,
    choose_compressed_tiling,
    choose_tiling,
    num_sms_at_hand,
    sms_at_hand,
)

H200 = Multiprocessors(132, 132, 232_448)
SMALL_GPU = Multiprocessors(58, 58, 101_376)


@given(
    num_rows=st.integers(1, MAX_ROWS),
    num_out=st.integers(1, 2048).map(lambda count: 16 * count),
    num_in=st.integers(1, 512).map(lambda count: 32 * count),
    count=st.integers(8, 132),
    device=st.sampled_from([H200, SMALL_GPU]),
    is_finished=st.booleans(),
)
def test_all_of_a_matrix_is_read_once(
    num_rows: int, num_out: int, num_in: int, count: int, device: Multiprocessors, is_finished: bool
) -> None:
    """Within the shared memory, and in the same parts on however many SMs: sums are added up in one order."""
    sms = device._replace(num=min(count, device.total))
    tiling, whole = (choose_tiling(num_rows, num_out, num_in, each, is_finished=is_finished) for each in (sms, device))
    assert (tiling is None) == (whole is None)
    if tiling is None or whole is None:
        assert num_out % 64 or num_in % 128
        return
    assert num_out % tiling.columns == 0
    assert num_in % (tiling.splits * tiling.depth) == 0
    assert tiling.rows >= num_rows
    assert tiling.num_stages >= 1
    assert tiling.num_stages * tiling.stage_bytes <= device.shared_bytes
    assert tiling.splits == whole.splits
    assert num_rows > 32 or tiling.splits <= (1 if is_finished else 2)


@pytest.mark.parametrize("num_rows", [16, 32])
@pytest.mark.parametrize("num_sms", [32, 40, 48, 64, 132])
def test_all_programs_of_a_small_matrix_run_at_once(num_rows: int, num_sms: int) -> None:
    """Else most SMs would wait for those with one more."""
    for num_in in (4096, 14336):
        tiling = choose_tiling(num_rows, 4096, num_in, H200._replace(num=num_sms))
        assert tiling is not None
        assert tiling.splits == 2
        num_each = -(-tiling.num_programs(4096) // num_sms)
        assert num_each * tiling.num_stages * tiling.stage_bytes <= H200.shared_bytes


@pytest.mark.parametrize("num_sms", [32, 48, 132])
@pytest.mark.parametrize("num_in", [4096, 14336])
def test_where_all_programs_run_at_once_there_is_room_for_others(num_in: int, num_sms: int) -> None:
    """On all SMs for one more on each, and in the same parts on however many."""
    sms = H200._replace(num=num_sms)
    for num_out in (4096, 6144, 28672):
        tiling = choose_tiling(64, num_out, num_in, sms)
        assert tiling is not None
        roomy = tiling.leaving_room(num_out, sms)
        assert roomy.splits == tiling.splits
        assert num_in % (roomy.splits * roomy.depth) == 0
        assert roomy.num_stages * roomy.stage_bytes <= tiling.num_stages * tiling.stage_bytes
        whole = choose_tiling(64, num_out, num_in, H200)
        assert whole is not None
        at_once = [each.runs_at_once(num_out, H200) for each in (tiling, whole)]
        assert at_once == [num_out < 28672] * 2
        if num_sms == 132 and num_out < 28672:
            assert 3 * (roomy.num_stages * roomy.stage_bytes + 1024) <= H200.shared_bytes + 1024


@pytest.mark.parametrize("num_rows", [16, 32])
@pytest.mark.parametrize(("num_out", "num_in"), [(4096, 4096), (4096, 14336), (6144, 4096)])
def test_where_each_program_has_an_sm_there_is_room_for_another(num_out: int, num_in: int, num_rows: int) -> None:
    tiling = choose_tiling(num_rows, num_out, num_in, H200)
    assert tiling is not None
    assert tiling.num_programs(num_out) <= H200.num
    roomy = tiling.leaving_room(num_out, H200)
    assert roomy == tiling._replace(num_stages=4 if num_rows == 32 else 5)
    assert H200.at_once(roomy) == 2


@given(
    num_rows=st.integers(1, MAX_ROWS),
    num_out=st.integers(1, 1200).map(lambda count: 128 * count),
    num_in=st.integers(1, 128).map(lambda count: 128 * count),
    count=st.integers(8, 132),
    device=st.sampled_from([H200, SMALL_GPU]),
)
def test_parts_of_a_compressed_product_follow_from_the_shape(
    num_rows: int, num_out: int, num_in: int, count: int, device: Multiprocessors
) -> None:
    """Of the matrix and not of the rows, so that all have the same bits; each part gets a part of the list."""
    sms = device._replace(num=min(count, device.total))
    tiling = choose_compressed_tiling(num_rows, num_out, num_in, sms)
    assert tiling.splits == choose_compressed_tiling(1, num_out, num_in, H200).splits
    assert tiling.splits in (1, 2, 4)
    assert tiling.splits == 1 or num_in >= 512 * tiling.splits
    assert choose_compressed_tiling(num_rows, num_out, num_in, sms, is_finished=True).splits == 1
    assert tiling.rows >= num_rows
    assert 3 <= tiling.num_stages <= 5
    assert tiling.leaving_room(num_out, sms) == tiling._replace(num_stages=min(4, tiling.num_stages))


@pytest.mark.parametrize("num_sms", [48, 64, 132])
@pytest.mark.parametrize("num_rows", [16, 32, 64])
def test_a_compressed_product_finds_room(num_rows: int, num_sms: int) -> None:
    """All programs of a small one at once; beside one of them on an SM of a whole GPU one that shrinks, of 64 KiB."""
    for num_out, num_in in ((6144, 4096), (4096, 4096), (4096, 14336)):
        tiling = choose_compressed_tiling(num_rows, num_out, num_in, H200._replace(num=num_sms))
        assert tiling.runs_at_once(num_out, H200)
        assert tiling.splits == (2 if num_out == 6144 else 4)
        each = -(-num_out // 128 * tiling.splits // num_sms)
        if num_rows < 64:
            assert each * (_shared_bytes(tiling) + 1024) <= H200.shared_bytes + 1024
        if num_sms == 132:
            assert _shared_bytes(tiling.leaving_room(num_out, H200)) + 64 * 1024 + 1024 <= H200.shared_bytes
    assert not choose_compressed_tiling(num_rows, 28672, 4096, H200).runs_at_once(28672, H200)


def _shared_bytes(tiling: CompressedTiling) -> int:
    return (tiling.num_stages - 1) * tiling.stage_bytes + tiling.sums_bytes


def test_sms_at_hand_are_said_for_what_is_inside() -> None:
    assert num_sms_at_hand() is None
    with sms_at_hand(48):
        assert num_sms_at_hand() == 48
        with sms_at_hand(32):
            assert num_sms_at_hand() == 32
        assert num_sms_at_hand() == 48
    assert num_sms_at_hand() is None

"""Files: what is committed is there, what is not leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.core.errors import ConflictError, InvalidInputError, NotFoundError
from cotenant.store import JobStatus, Store, open_store
from cotenant.store.files import FileTooLargeError
from cotenant.store.ids import new_id
from store.rows import CONTENT, add_file, add_job


def on_disk(store: Store) -> list[str]:
    return sorted(path.name for path in (store.folder / "files").iterdir())


def test_a_file_survives_reopening(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    record = add_file(store)
    store.close()

    store = open_store(tmp_path)
    found, content = store.files.open(record.id)
    with content:
        assert content.read() == CONTENT
    assert found == record
    assert found.size_bytes == len(CONTENT)
    store.close()


def test_an_upload_past_the_limit_leaves_nothing_behind(store: Store) -> None:
    upload = store.files.begin_upload(10)
    upload.write(b"0123456789")
    with pytest.raises(FileTooLargeError, match="larger than 10 bytes"):
        upload.write(b"x")
    upload.discard()
    assert on_disk(store) == []
    assert store.files.page().items == []


def test_what_a_crash_cut_short_is_removed_at_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = add_file(store)
    unfinished = store.files.begin_upload(100)
    unfinished.write(b"half")
    orphan = store.files.place(b"content without a row")
    assert len(on_disk(store)) == 3
    store.close()

    store = open_store(tmp_path)
    assert on_disk(store) == [kept.id]
    assert orphan != kept.id
    store.close()


def test_files_of_others_in_the_data_folder_are_left_alone(tmp_path: Path) -> None:
    """Also where they are named a little like what a crash of ours leaves, which goes."""
    job = new_id("ftjob-")
    theirs = (
        "files/thesis.pdf",
        "files/file-notes",
        "src/.tmp-build/a.o",
        ".tmp-notes.txt",
        "files/project/.tmp-build/x",
        "files/project/.tmp-abcdefgh",
        "files/.tmp-old/x",
        "jobs/mine/.tmp-abcdefgh/x",
        "jobs/.tmp-replaced-by-me/x",
        ".tmp-download/x",
        "files/.tmp-download/x",
        "jobs/.tmp-download/x",
        ".tmp-replaced-download/x",
    )
    ours = (
        ".tmp-abc_efg1",
        "files/.tmp-abcdefgh",
        "jobs/.tmp-0123456789abcdef/x",
        f"jobs/{job}/.tmp-abcdefgh/x",
        f"jobs/{job}/checkpoints/.tmp-abcdefgh",
    )
    for name in (*theirs, *ours):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    open_store(tmp_path).close()
    for name in theirs:
        assert (tmp_path / name).read_text() == "mine"
    for name in ours:
        assert not (tmp_path / name).exists()


def test_pages_follow_the_order_of_creation(store: Store) -> None:
    ids = [add_file(store, purpose="batch" if number % 2 else "fine-tune").id for number in range(5)]

    first = store.files.page(limit=2)
    assert [file.id for file in first.items] == ids[:2:-1]
    assert first.has_more
    rest = store.files.page(after=first.items[-1].id, limit=3)
    assert [file.id for file in rest.items] == ids[2::-1]
    assert not rest.has_more
    assert [file.id for file in store.files.page(ascending=True, after=ids[3]).items] == ids[4:]
    assert [file.id for file in store.files.page(purpose="batch").items] == [ids[3], ids[1]]
    with pytest.raises(InvalidInputError, match="'after'"):
        store.files.page(after="file-unknown")


@pytest.mark.parametrize("status", [JobStatus.VALIDATING, JobStatus.RUNNING, JobStatus.PAUSED])
def test_a_file_in_use_cannot_be_deleted(store: Store, status: JobStatus) -> None:
    training, validation = add_file(store), add_file(store)
    job = add_job(store, training, validation=validation.id)
    store.jobs.change(job.id, [JobStatus.VALIDATING], {"status": status})

    for file in (training, validation):
        with pytest.raises(ConflictError, match=f"{job.id}.*{status}"):
            store.files.delete(file.id)
    assert len(on_disk(store)) == 2

    store.jobs.change(job.id, [status], {"status": JobStatus.CANCELLED})
    store.files.delete(training.id)
    assert on_disk(store) == [validation.id]
    with pytest.raises(NotFoundError):
        store.files.get(training.id)
    with pytest.raises(NotFoundError):
        store.files.delete(training.id)


def test_an_open_file_stays_readable_after_its_deletion(store: Store) -> None:
    record = add_file(store)
    _, content = store.files.open(record.id)
    store.files.delete(record.id)
    with content:
        assert content.read() == CONTENT


@pytest.mark.parametrize("name", ["../cotenant.db", "/etc/passwd", "..", "", "file-\x00"])
def test_ids_are_looked_up_and_never_paths(store: Store, name: str) -> None:
    with pytest.raises(NotFoundError):
        store.files.open(name)
    with pytest.raises(NotFoundError):
        store.files.delete(name)

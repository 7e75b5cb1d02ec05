"""What survives: SIGKILL at any moment, a second server, a newer version, a moved folder, a full disk."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from cotenant.core.errors import ConflictError, InvalidInputError
from cotenant.store import JobStatus, StoreError, open_store
from cotenant.store.ballast import Ballast
from cotenant.store.database import Database
from cotenant.store.schema import SCHEMA_VERSION
from forked import run_command
from store.rows import add_file, add_job, add_running_job, make_adapter, metrics_event

_WRITER = Path(__file__).with_name("endless_writer.py")
_TESTS = Path(__file__).parent.parent


def test_what_was_confirmed_survives_sigkill(tmp_path: Path) -> None:
    generator = random.Random(0)
    confirmed: list[str] = []
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, str(_WRITER), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(_TESTS)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        said = [process.stdout.readline() for _ in range(6)]
        time.sleep(generator.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        output = "".join(said) + process.communicate()[0]
        confirmed += output.splitlines() if output.endswith("\n") else output.splitlines()[:-1]

    assert len(confirmed) > 20
    store = open_store(tmp_path)
    for line in confirmed:
        kind, name, *rest = line.split()
        if kind == "file":
            record, content = store.files.open(name)
            with content:
                assert content.read() == expected_content(rest[0])
            assert record.size_bytes == len(expected_content(rest[0]))
        elif kind == "job":
            assert store.jobs.get(name).status is JobStatus.VALIDATING
        else:
            assert store.events.recorded_step(name) >= int(rest[0])
    rows = {file.id for file in store.files.page().items}
    assert {path.name for path in (tmp_path / "files").iterdir()} == rows
    store.close()


def expected_content(number: str) -> bytes:
    return f"content {number}\n".encode() * 100


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ConflictError, match=r"in use by a server \(process \d+\).*--data-dir"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


@pytest.mark.parametrize("name", ["run?1", "run?mode=ro", "run%3F", "run#1", "a b@c:1"])
def test_the_database_lies_in_its_folder_whatever_that_is_called(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / name)
    file = add_file(store)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "cotenant.db").is_file()
    store = open_store(tmp_path / name)
    assert store.files.page().items == [file]
    store.close()


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "cotenant.db") as connection:
        connection.execute("UPDATE schema_version SET version = ?", (SCHEMA_VERSION + 1,))
    connection.close()
    with pytest.raises(ConflictError, match=f"schema {SCHEMA_VERSION + 1}"):
        open_store(tmp_path)
    with pytest.raises(ConflictError, match="newer version"):  # the lock was given back
        open_store(tmp_path)


def test_jobs_of_the_first_schema_belong_to_whatever_is_served(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    job = add_running_job(store)
    store.close()
    with sqlite3.connect(tmp_path / "cotenant.db") as connection:
        connection.execute("ALTER TABLE jobs DROP COLUMN base_fingerprint")
        connection.execute("UPDATE schema_version SET version = 1")
    connection.close()
    for _ in range(2):
        store = open_store(tmp_path)
        assert store.jobs.get(job.id).base_fingerprint is None
        assert store.jobs.first(JobStatus.RUNNING, "any") == store.jobs.get(job.id)
        assert store.jobs.of_other_bases([JobStatus.RUNNING], "any") == []
        store.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match=r"data folder .*file.*--data-dir"):
        open_store(tmp_path / "file")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "cotenant.db").write_bytes(b"this is no database" * 1000)
    with pytest.raises(StoreError, match="not a database"):
        open_store(broken)


@pytest.mark.parametrize("name", ["files", "jobs"])
def test_something_else_in_the_place_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    spoiled: dict[str, Callable[[], object]] = {
        "is no folder": lambda: place.write_text("mine"),
        "is a link to nothing": lambda: place.symlink_to(tmp_path / "gone" / "away"),
    }
    for complaint, spoil in spoiled.items():
        spoil()
        with pytest.raises(InvalidInputError, match=rf"{place} cannot be used: .*{complaint}.*--data-dir"):
            open_store(tmp_path)
        place.unlink()
    open_store(tmp_path).close()  # the lock was given back


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["files", "jobs"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(mode=0o500)
    with pytest.raises(InvalidInputError, match=rf"{name} cannot be used: it cannot be read and written.*--data-dir"):
        open_store(tmp_path)


@pytest.mark.parametrize("said", [[], [2, 2], ["two"], [-1]])
def test_a_database_that_does_not_tell_its_version_is_refused(tmp_path: Path, said: list[int | str]) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "cotenant.db") as connection:
        connection.execute("DELETE FROM schema_version")
        connection.executemany("INSERT INTO schema_version VALUES (?)", [(version,) for version in said])
    connection.close()
    shown = ", ".join(map(repr, said)) or "nothing"
    with pytest.raises(InvalidInputError, match=f"cotenant.db is damaged: .*schema_version holds {shown} in place"):
        open_store(tmp_path)


def test_a_moved_folder_keeps_serving_its_adapters(tmp_path: Path) -> None:
    store = open_store(tmp_path / "old")
    job = add_running_job(store)
    path = make_adapter(store, job, "adapter")
    store.jobs.succeed(job.id, adapter_path=path, trained_tokens=1, total_steps=1, result_file=None, events=[])
    store.close()

    (tmp_path / "old").rename(tmp_path / "new")
    store = open_store(tmp_path / "new")
    served = store.find_adapter(job.adapter_name)
    assert served is not None
    assert Path(served.path).is_relative_to(tmp_path / "new")
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no right to mount a small file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_refuses_uploads_and_still_lets_a_failure_be_recorded(small_disk: Path) -> None:
    store = open_store(small_disk / "data")
    job = add_running_job(store)
    kept = add_file(store)
    with pytest.raises(StoreError, match="full") as refused:
        add_file(store, bytes(5 << 20))
    assert refused.value.code == "disk_full"
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        until_full(lambda: filler.write(bytes(4096)), OSError)

    # The database goes on for a while on the space that was set aside.
    for step in range(1, 60):
        store.events.add_metrics(job.id, [metrics_event(step)], step, None)
    failed = store.jobs.change(job.id, [JobStatus.RUNNING], {"status": JobStatus.FAILED})
    assert failed is not None
    assert "full" in str(until_full(lambda: add_job(store, kept), StoreError))

    (small_disk / "filler").unlink()
    assert store.jobs.get(job.id).status is JobStatus.FAILED
    add_job(store, kept)
    store.close()


def test_a_disk_that_is_full_at_the_start_is_named(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        until_full(lambda: filler.write(bytes(4096)), OSError)
    for _ in range(2):  # what is there after the first time is no obstacle
        with pytest.raises(StoreError, match="full") as refused:
            open_store(small_disk / "data")
        assert refused.value.code == "disk_full"
    assert run_command("profile", "tiny", "--data-dir", str(small_disk / "data")).returncode == 1
    failed = run_command("serve", "tiny", "--port", "0", "--data-dir", str(small_disk / "data"))
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith("error: The disk with the data folder is full.")
    (small_disk / "filler").unlink()
    open_store(small_disk / "data").close()


def test_a_quota_that_is_used_up_takes_the_space_set_aside(tmp_path: Path) -> None:
    """Which no test may set here. SQLite tells it from a broken disk by nothing."""

    def write(connection: Connection) -> str:
        if (tmp_path / "BALLAST").exists():
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
            raise DBAPIError("INSERT", {}, error)
        return "written"

    ballast = Ballast(tmp_path)
    database = Database(tmp_path / "cotenant.db", ballast)
    ballast.restore()
    assert database.write(write) == "written"
    database.close()


def until_full(write: Callable[[], object], error: type[Exception]) -> Exception:
    for _ in range(100_000):
        try:
            write()
        except error as full:
            return full
    raise AssertionError("the disk never was full")

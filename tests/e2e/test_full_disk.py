"""A disk that is really full: the job on it fails and says why, the server goes on answering, and nothing is torn.

The data folder is a small file system of its own, which takes the right to mount one.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy

from e2e.refusals import (
    CHAT,
    FILES,
    JOBS,
    assert_refused,
    create_job,
    greedy_answer,
    hyperparameters,
    stored,
    upload,
    wait_for,
    wait_until,
)
from online import MESSAGES, MODEL
from serving import RunningServer, start_server
from undisturbed import until_undisturbed

DISK_BYTES = 24 << 20
LONG_JOB = {"max_steps": 10**6, "save_steps": 50, "r": 2, "target_modules": ["q_proj", "v_proj"]}


class SmallDisk:
    """A data folder with little room, and a server on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"
        self.server: RunningServer | None = None
        self.client = httpx.Client(timeout=120)

    def start(self) -> None:
        self.server = start_server(self.folder)
        self.client.close()
        self.client = httpx.Client(base_url=self.server.base_url, timeout=120)

    def restart(self, *, kill: bool) -> None:
        assert self.server is not None
        if kill:
            self.server.kill()
        else:
            assert self.server.stop() == 0
        self.start()

    def fill(self) -> None:
        """Leave no room for anything."""
        with self.filler.open("ab", buffering=0) as filler:
            for num_bytes in (1 << 20, 4096):
                try:
                    while True:
                        filler.write(b"\1" * num_bytes)
                except OSError:
                    continue

    def leave(self, num_bytes: int) -> None:
        """Leave so much room."""
        self.fill()
        os.truncate(self.filler, self.filler.stat().st_size - num_bytes)

    def free(self) -> None:
        self.filler.unlink()

    @property
    def log(self) -> str:
        assert self.server is not None
        return self.server.log


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "data"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a small file system here")
    small = SmallDisk(folder)
    try:
        small.start()
        yield small
    finally:
        small.client.close()
        if small.server is not None:
            small.server.kill()
        subprocess.run(["umount", "-l", str(folder)], check=True)


def examples(count: int = 12, num_words: int = 3) -> bytes:
    answer = "so good " * (num_words // 2)
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{answer}{n}."}]}
        for n in range(count)
    ]
    return "\n".join(json.dumps(row) for row in rows).encode()


def listed(disk: SmallDisk, path: str) -> list[dict[str, Any]]:
    answer = disk.client.get(path, params={"limit": 1000})
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def answers(disk: SmallDisk, model: str) -> bool:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4}
    return disk.client.post(CHAT, json=body).status_code == 200


def start_long_job(disk: SmallDisk, file_id: str) -> str:
    """A job that goes on for ever and has written a checkpoint."""
    job_id = create_job(disk.client, training_file=file_id, **hyperparameters(**LONG_JOB))
    wait_for(disk.client, job_id, "running")
    wait_until(lambda: listed(disk, f"{JOBS}/{job_id}/checkpoints"))
    return job_id


def assert_failed_for_want_of_space(disk: SmallDisk, job_id: str) -> None:
    wait_until(lambda: disk.client.get(f"{JOBS}/{job_id}").json()["status"] == "failed", timeout_s=120)
    job = disk.client.get(f"{JOBS}/{job_id}").json()
    assert job["error"]["code"] == "disk_full"
    assert "disk" in job["error"]["message"]
    assert "full" in job["error"]["message"]
    assert job["fine_tuned_model"] is None
    event = listed(disk, f"{JOBS}/{job_id}/events")[0]
    assert (event["level"], event["message"]) == ("error", job["error"]["message"])


def assert_nothing_is_torn(disk: SmallDisk) -> None:
    """Every file that the server lists is whole, every tensor file can be read, and there are no others."""
    assert not list(disk.folder.rglob(".tmp-*"))
    files = {file["id"]: file["bytes"] for file in listed(disk, FILES)}
    assert {path.name: path.stat().st_size for path in (disk.folder / "files").iterdir()} == files
    for path in disk.folder.glob("jobs/**/*.safetensors"):
        safetensors.numpy.load_file(path)
    for path in disk.folder.glob("jobs/**/*.json"):
        json.loads(path.read_bytes())
    with sqlite3.connect(f"file:{disk.folder / 'cotenant.db'}?mode=ro", uri=True) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()
    for job in listed(disk, JOBS):
        for checkpoint in listed(disk, f"{JOBS}/{job['id']}/checkpoints")[:2]:
            assert answers(disk, checkpoint["fine_tuned_model_checkpoint"])


def test_a_job_fails_the_server_goes_on_and_with_room_again_a_new_job_works(disk: SmallDisk) -> None:
    file_id = upload(disk.client, examples())
    answer = greedy_answer(disk.client)
    failed = []
    for _ in range(2):  # the space that is set aside to record the failure must be there the next time too
        job_id = start_long_job(disk, file_id)
        disk.fill()
        assert_failed_for_want_of_space(disk, job_id)
        failed.append(job_id)
        assert greedy_answer(disk.client) == answer
        disk.free()

    disk.fill()
    for num_bytes in (1, 3_000_000):
        refused = disk.client.post(FILES, files={"file": ("a", b"x" * num_bytes)}, data={"purpose": "fine-tune"})
        assert_refused(refused, 500, None, "disk_full", "full", "Free some space")
    assert greedy_answer(disk.client) == answer
    assert disk.client.get("/health").status_code == 200
    assert {job["id"] for job in listed(disk, JOBS)} == set(failed)
    assert_nothing_is_torn(disk)

    disk.free()
    job = create_job(disk.client, training_file=upload(disk.client, examples()), **hyperparameters(max_steps=2, r=2))
    model = wait_for(disk.client, job, "succeeded")["fine_tuned_model"]
    disk.restart(kill=False)
    statuses = {job["id"]: job["status"] for job in listed(disk, JOBS)}
    assert statuses == {job: "succeeded", **dict.fromkeys(failed, "failed")}
    assert answers(disk, model)
    assert greedy_answer(disk.client) == answer
    assert_nothing_is_torn(disk)
    assert "Traceback" not in disk.log


def test_a_failed_job_is_resumed_and_ends_with_the_bits_of_one_that_never_failed(disk: SmallDisk) -> None:
    settings = {"max_steps": 96, "save_steps": 7, "save_total_limit": 3, "r": 4, "batch_size": 4, "lora_dropout": 0.1}
    file_id = upload(disk.client, examples(30))
    asked = {"training_file": file_id, "validation_file": file_id, "seed": 11, **hyperparameters(**settings)}
    jobs: list[dict[str, Any]] = []

    def failed_twice(_: int) -> str | None:
        job_id = create_job(disk.client, **asked)
        going_on = []
        for kill in (True, False):
            known = len(reported_steps(disk, job_id))
            wait_until(lambda: listed(disk, f"{JOBS}/{job_id}/checkpoints"))
            wait_until(lambda known=known: len(reported_steps(disk, job_id)) > known or has_ended(disk, job_id))
            disk.fill()
            wait_until(lambda: has_ended(disk, job_id), timeout_s=120)
            if status_of(disk, job_id) == "succeeded":
                disk.free()
                return "the job had come to its end before the disk was full"
            assert_failed_for_want_of_space(disk, job_id)
            disk.free()
            disk.restart(kill=kill)
            message = disk.client.get(f"{JOBS}/{job_id}").json()["error"]["message"]
            _, way_on, step = message.partition("resume the job: it goes on from step ")
            assert way_on, message
            resumed = disk.client.post(f"{JOBS}/{job_id}/resume").json()
            assert (resumed["error"], resumed["finished_at"]) == (None, None)
            going_on.append(f"Fine-tuning job goes on from step {step.rstrip('.')}")
        jobs.append(wait_for(disk.client, job_id, "succeeded"))
        messages = [event["message"] for event in reversed(listed(disk, f"{JOBS}/{job_id}/events"))]
        assert [message for message in messages if message.startswith("Fine-tuning job goes on")] == going_on
        assert reported_steps(disk, job_id) == list(range(1, 97))
        return None

    until_undisturbed(failed_twice)
    (job,) = jobs
    undisturbed = wait_for(disk.client, create_job(disk.client, **asked), "succeeded")
    assert result_of(disk, job) == result_of(disk, undisturbed)
    assert_nothing_is_torn(disk)
    assert "Traceback" not in disk.log


def status_of(disk: SmallDisk, job_id: str) -> str:
    return str(disk.client.get(f"{JOBS}/{job_id}").json()["status"])


def has_ended(disk: SmallDisk, job_id: str) -> bool:
    return status_of(disk, job_id) in ("succeeded", "failed")


def reported_steps(disk: SmallDisk, job_id: str) -> list[int]:
    """In order."""
    events = listed(disk, f"{JOBS}/{job_id}/events")
    return sorted(event["data"]["step"] for event in events if event["type"] == "metrics")


def result_of(disk: SmallDisk, job: dict[str, Any]) -> tuple[bytes, bytes]:
    """The adapter's weights and the file of metrics."""
    adapter = disk.folder / "jobs" / job["id"] / "adapter" / "adapter_model.safetensors"
    return adapter.read_bytes(), disk.client.get(f"{FILES}/{job['result_files'][0]}/content").content


def test_neither_uploads_nor_checkpoints_take_what_the_database_needs(disk: SmallDisk) -> None:
    """There is room for them, but not for that besides."""
    file_id = upload(disk.client, examples())
    job_id = start_long_job(disk, file_id)
    disk.leave(3 << 19)
    refused = disk.client.post(FILES, files={"file": ("a", b"x" * 1000)}, data={"purpose": "fine-tune"})
    assert_refused(refused, 500, None, "disk_full", "full", "Free some space")
    assert_failed_for_want_of_space(disk, job_id)
    disk.free()
    assert upload(disk.client, b"x" * 1000)
    assert_nothing_is_torn(disk)


def test_killed_on_a_full_disk(disk: SmallDisk) -> None:
    """It starts again without any room, answers, and takes its work up when there is some."""
    file_id = upload(disk.client, examples())
    answer = greedy_answer(disk.client)
    job_id = start_long_job(disk, file_id)
    disk.fill()
    disk.restart(kill=True)
    disk.fill()  # what the start has tidied up
    assert greedy_answer(disk.client) == answer
    assert stored(disk.server) == {file_id}  # type: ignore[arg-type]
    disk.free()
    job = disk.client.get(f"{JOBS}/{job_id}").json()
    if job["status"] != "failed":  # nobody had room to write that it has
        assert disk.client.post(f"{JOBS}/{job_id}/cancel").status_code in (200, 400)
    wait_until(lambda: disk.client.get(f"{JOBS}/{job_id}").json()["status"] in ("failed", "cancelled"))
    new = create_job(disk.client, training_file=file_id, **hyperparameters(max_steps=2, r=2))
    assert answers(disk, wait_for(disk.client, new, "succeeded")["fine_tuned_model"])
    assert_nothing_is_torn(disk)


def test_an_upload_larger_than_the_disk_gives_its_space_back(disk: SmallDisk) -> None:
    kept = upload(disk.client, b"x" * 1000)
    answer = disk.client.post(FILES, files={"file": ("a", b"x" * (2 * DISK_BYTES))}, data={"purpose": "fine-tune"})
    assert_refused(answer, 500, None, "disk_full", "full")
    assert stored(disk.server) == {kept}  # type: ignore[arg-type]
    assert upload(disk.client, b"x" * (DISK_BYTES // 2))
    assert_nothing_is_torn(disk)


def test_tokenised_examples_need_room_too(disk: SmallDisk) -> None:
    """The disk is filled between the upload and the validation, which has nowhere to write."""
    file_id = upload(disk.client, examples(1200, num_words=500))
    disk.fill()
    job_id = create_job(disk.client, training_file=file_id)
    assert_failed_for_want_of_space(disk, job_id)
    assert MODEL in {card["id"] for card in listed(disk, "/v1/models")}
    disk.free()
    new = create_job(disk.client, training_file=file_id, **hyperparameters(max_steps=1, r=2))
    wait_for(disk.client, new, "succeeded")
    assert_nothing_is_torn(disk)

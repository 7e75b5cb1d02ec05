"""A model that is deleted between a request's arrival and the reading of its adapter, and adapters of its name."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from e2e.refusals import JOBS, create_job, hyperparameters, wait_for, wait_until
from online import error_of, figure_in
from serving import RunningServer, running_server

ROWS = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]})
    for n in range(12)
)
FLAGS = ("--max-model-len", "256")


def train(http: httpx.Client) -> tuple[str, str]:
    """The name of a model that a job has made, and the job's id."""
    file = http.post("/v1/files", files={"file": ("a.jsonl", ROWS)}, data={"purpose": "fine-tune"}).json()
    job_id = create_job(http, training_file=file["id"], **hyperparameters(max_steps=2, r=4))
    return str(wait_for(http, job_id, "succeeded")["fine_tuned_model"]), job_id


def asked_before(server: RunningServer, model: str, change: Callable[[], Any], **more: Any) -> httpx.Response:
    """The answer to a request that was admitted before ``change``, and that the worker has heard of after it."""
    with ThreadPoolExecutor(1) as pool, server.stopped_worker() as worker_pid:
        body = {"model": model, "prompt": "The sun", "max_tokens": 3, **more}
        answer = pool.submit(httpx.post, f"{server.base_url}/v1/completions", json=body, timeout=60)
        metrics, num_choices = f"{server.base_url}/metrics", more.get("n", 1)
        wait_until(lambda: figure_in(httpx.get(metrics, timeout=60).text, "num_requests_live") == num_choices)
        change()
        os.kill(worker_pid, signal.SIGCONT)
        return answer.result()


def test_a_model_deleted_before_its_adapter_is_read_is_not_found(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "data", *FLAGS) as server,
        httpx.Client(base_url=server.base_url, timeout=60) as http,
    ):
        for more in ({}, {"stream": True}, {"n": 2}):
            model, _ = train(http)
            adapter = http.get(f"/v1/models/{model}").json()["root"]
            answer = asked_before(server, model, lambda model=model: http.delete(f"/v1/models/{model}"), **more)
            assert not Path(adapter).exists()
            assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found"), answer.text
            assert (error_of(answer)["param"], model in error_of(answer)["message"]) == ("model", True)
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "The sun"}).status_code == 200


def is_changing(server: RunningServer) -> bool:
    """Whether an adapter is being loaded: others wait for that."""
    try:
        httpx.post(f"{server.base_url}/v1/unload_lora_adapter", json={"lora_name": "nobody"}, timeout=0.5)
    except httpx.ReadTimeout:
        return True
    except httpx.TimeoutException:  # it has not even been asked
        return False
    return False


def test_a_deleted_job_leaves_the_adapter_alone_that_has_its_models_name_by_now(tmp_path: Path) -> None:
    """One that has been loaded, and one that is being loaded as the job is deleted."""
    with (
        running_server(tmp_path / "data", *FLAGS) as server,
        httpx.Client(base_url=server.base_url, timeout=60) as http,
        ThreadPoolExecutor(1) as pool,
    ):
        for is_loaded in (False, True):
            model, job_id = train(http)
            folder = tmp_path / f"adapter-{is_loaded}"
            shutil.copytree(http.get(f"/v1/models/{model}").json()["root"], folder)
            assert http.delete(f"/v1/models/{model}").status_code == 200
            body = {"lora_name": model, "lora_path": str(folder)}
            with server.stopped_worker() as worker_pid:
                loading = pool.submit(http.post, "/v1/load_lora_adapter", json=body)
                if is_loaded:
                    os.kill(worker_pid, signal.SIGCONT)
                    assert loading.result().status_code == 200
                    shutil.rmtree(folder)
                else:
                    wait_until(lambda: is_changing(server))
                assert http.delete(f"{JOBS}/{job_id}").status_code == 200
            assert loading.result().status_code == 200
            answer = http.post("/v1/completions", json={"model": model, "prompt": "The sun", "max_tokens": 3})
            assert answer.status_code == 200, answer.text

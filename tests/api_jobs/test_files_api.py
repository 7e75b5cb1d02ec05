"""``/v1/files`` over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from api_jobs.support import MAX_UPLOAD_BYTES, Server, examples, run, server


def stored(data_dir: Path) -> list[Path]:
    return list((data_dir / "files").iterdir())


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + end


def file_part(content: bytes, name: bytes = b"file", filename: bytes = b"a.jsonl") -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"; filename="' + filename + b'"\r\n\r\n' + content


def field_part(name: bytes, value: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"\r\n\r\n' + value


PURPOSE = field_part(b"purpose", b"fine-tune")


async def post(
    there: Server, body: bytes | AsyncIterator[bytes], content_type: str = "multipart/form-data; boundary=B"
) -> httpx.Response:
    return await there.http.post("/v1/files", content=body, headers={"Content-Type": content_type})


def test_a_files_whole_life(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            content = examples(2000)
            answer = await there.http.post(
                "/v1/files", files={"file": ("../../träin.jsonl", content)}, data={"purpose": "fine-tune"}
            )
            file = answer.json()
            assert file == {
                "id": file["id"],
                "object": "file",
                "bytes": len(content),
                "created_at": file["created_at"],
                "filename": "../../träin.jsonl",
                "purpose": "fine-tune",
                "status": "processed",
                "expires_at": None,
                "status_details": None,
            }
            assert [path.name for path in stored(tmp_path)] == [file["id"]]

            assert (await there.http.get(f"/v1/files/{file['id']}")).json() == file
            download = await there.http.get(f"/v1/files/{file['id']}/content")
            assert download.content == content
            assert download.headers["content-length"] == str(len(content))

            deleted = await there.http.delete(f"/v1/files/{file['id']}")
            assert deleted.json() == {"id": file["id"], "object": "file", "deleted": True}
            assert stored(tmp_path) == []
            for path in ("", "/content"):
                gone = await there.http.get(f"/v1/files/{file['id']}{path}")
                assert gone.status_code == 404
                assert file["id"] in gone.json()["error"]["message"]

    run(scenario)


def test_listing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            ids = [await there.upload(b"x", "batch" if number == 1 else "fine-tune") for number in range(3)]
            page = (await there.http.get("/v1/files", params={"limit": 2})).json()
            assert [file["id"] for file in page["data"]] == [ids[2], ids[1]]
            assert (page["object"], page["has_more"], page["first_id"], page["last_id"]) == (
                "list",
                True,
                ids[2],
                ids[1],
            )
            page = (await there.http.get("/v1/files", params={"after": ids[1]})).json()
            assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[0]], False)
            page = (await there.http.get("/v1/files", params={"order": "asc", "purpose": "fine-tune"})).json()
            assert [file["id"] for file in page["data"]] == [ids[0], ids[2]]
            bad = {"limit": 0}, {"limit": 10_001}, {"limit": "x"}, {"order": "up"}, {"after": "file-none"}
            for params in bad:
                answer = await there.http.get("/v1/files", params=params)
                assert answer.status_code == 400, params
                assert answer.json()["error"]["param"] == next(iter(params))

    run(scenario)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (form(file_part(b"x")), "purpose", "Missing"),
        (form(PURPOSE), "file", "Missing"),
        (form(PURPOSE, field_part(b"file", b"x")), "file", "one file"),
        (form(PURPOSE, file_part(b"x", b"other")), "file", "one file"),
        (form(file_part(b"x"), file_part(b"y"), PURPOSE), "file", "Only one"),
        (form(field_part(b"purpose", b"fun"), file_part(b"x")), "purpose", "fine-tune"),
        (form(field_part(b"purpose", b"fine-tune-results"), file_part(b"x")), "purpose", "expected one of"),
        (form(field_part(b"purpose", b"x" * 5000), file_part(b"x")), "purpose", "too long"),
        (form(PURPOSE, file_part(b"x"), field_part(b"expires_after", b"1")), "expires_after", "Unrecognized"),
        (form(PURPOSE, PURPOSE, file_part(b"x")), "purpose", "twice"),
        (form(PURPOSE, file_part(b"x"), end=b""), "file", "ends before"),
        (form(PURPOSE, file_part(b"x"), end=b"--B"), "file", "not a form"),
        (form(b"no header"), "file", "not a form"),
        (b"not a form at all", "file", "not a form"),
        (b"", "file", "not a form"),
    ],
)
def test_bad_forms_are_refused_and_leave_nothing(tmp_path: Path, body: bytes, param: str, says: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            answer = await post(there, body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert says in answer.json()["error"]["message"]
            assert stored(tmp_path) == []

    run(scenario)


@pytest.mark.parametrize(
    "content_type", ["application/json", "multipart/form-data", "multipart/form-data; boundary=" + "B" * 5000, ""]
)
def test_other_content_types_are_refused(tmp_path: Path, content_type: str) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            answer = await post(there, form(PURPOSE, file_part(b"x")), content_type)
            assert answer.status_code == 400
            assert "multipart" in answer.json()["error"]["message"] or "oundary" in answer.json()["error"]["message"]

    run(scenario)


def test_an_upload_past_the_limit_is_refused_before_it_has_all_arrived(tmp_path: Path) -> None:
    sent_bytes = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        yield form(PURPOSE, end=b"--B\r\n") + file_part(b"")
        for _ in range(100):
            sent_bytes += 1 << 20
            yield bytes(1 << 20)

    async def scenario() -> None:
        async with server(tmp_path) as there:
            answer = await post(there, endless())
            assert answer.status_code == 413
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("file_too_large", "file")
            assert str(MAX_UPLOAD_BYTES) in error["message"]
            assert sent_bytes < 4 * MAX_UPLOAD_BYTES
            assert stored(tmp_path) == []

    run(scenario)


def test_a_file_of_exactly_the_limit_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server(tmp_path) as there:
            file_id = await there.upload(bytes(MAX_UPLOAD_BYTES))
            assert (tmp_path / "files" / file_id).stat().st_size == MAX_UPLOAD_BYTES

    run(scenario)


def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    class GoneError(Exception):
        pass

    async def interrupted() -> AsyncIterator[bytes]:
        yield form(PURPOSE, end=b"--B\r\n") + file_part(bytes(2 << 20))
        raise GoneError

    async def scenario() -> None:
        async with server(tmp_path) as there:
            with pytest.raises(GoneError):
                await post(there, interrupted())
            assert stored(tmp_path) == []

    run(scenario)


def test_content_arrives_unchanged_however_it_is_cut(tmp_path: Path) -> None:
    almost_boundaries = st.just(b"\r\n--A\r\n\r\n-B--\r\n\r\n--") | st.just(b"\r\n" * 40)

    @settings(max_examples=25, deadline=None)
    @given(content=st.binary(max_size=300) | almost_boundaries, size=st.integers(1, 50))
    def check(content: bytes, size: int) -> None:
        assume(b"\r\n--B" not in content)
        body = form(file_part(content), PURPOSE)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        async def scenario() -> None:
            async with server(tmp_path) as there:
                answer = await post(there, pieces())
                assert answer.status_code == 200
                download = await there.http.get(f"/v1/files/{answer.json()['id']}/content")
                assert download.content == content

        run(scenario)

    check()

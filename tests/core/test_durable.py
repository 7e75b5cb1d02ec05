"""A reader sees the old content or the new, whatever interrupts the writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotenant.durable import atomic_folder, remove_leftovers, write_atomically


def test_a_folder_appears_whole_and_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    for content in ("old", "new"):
        with atomic_folder(target) as folder:
            (folder / "a").write_text(content)
            (folder / "sub").mkdir()
            (folder / "sub" / "b").write_text(content)
            assert not target.exists() or (target / "a").read_text() == "old"
        assert (target / "a").read_text() == (target / "sub" / "b").read_text() == content
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "file"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    file.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), atomic_folder(target) as folder:
        fail(folder / "a")
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, fail)
    assert (target / "a").read_text() == file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]


def test_a_folder_that_cannot_take_the_old_ones_place_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("old")
    rename = os.replace

    def replace(source: Path, destination: Path) -> None:
        if destination == target and (source / "a").read_text() == "new":
            raise OSError(28, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"), atomic_folder(target) as folder:
        (folder / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


_REPLACER = """
import os, shutil, sys
from pathlib import Path
from cotenant.durable import atomic_folder
target, last = Path(sys.argv[1]), int(sys.argv[2])
calls = 0

def dying(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls > last:
            os._exit(9)
        return function(*arguments, **options)
    return call

os.replace, shutil.rmtree = dying(os.replace), dying(shutil.rmtree)
with atomic_folder(target) as folder:
    (folder / "a").write_text("new")
"""


@pytest.mark.parametrize(("num_calls", "content"), [(0, "old"), (1, "old"), (2, "new"), (3, "new")])
def test_a_kill_while_a_folder_is_replaced_leaves_the_old_or_the_new(
    tmp_path: Path, num_calls: int, content: str
) -> None:
    """Renames, and the removal of the old one: killed before each of them."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").write_text("old")
    process = subprocess.run([sys.executable, "-c", _REPLACER, str(target), str(num_calls)], check=False)
    assert process.returncode == (0 if num_calls == 3 else 9)
    remove_leftovers(tmp_path)
    assert (target / "a").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


_WRITER = """
import sys
from pathlib import Path
from cotenant.durable import write_atomically
target = Path(sys.argv[1])
number = 0
while True:
    text = str(number) * 50_000
    write_atomically(target, lambda path: path.write_text(text))
    number = (number + 1) % 10
"""


def test_sigkill_in_the_middle_of_writing_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    for attempt in range(5):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, str(target)])
        while not target.exists():
            time.sleep(0.01)
        time.sleep(0.05 + 0.013 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        content = target.read_text()
        assert len(content) == 50_000
        assert len(set(content)) == 1
        remove_leftovers(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        target.unlink()

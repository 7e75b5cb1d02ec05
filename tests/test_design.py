"""The design document names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "cotenant"
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", (ROOT / "docs" / "design.md").read_text())))


def test_the_document_names_modules() -> None:
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_every_module_named_in_the_design_exists(name: str) -> None:
    candidates = [PACKAGE / name, PACKAGE / "api" / "routes" / name]
    assert any(path.is_dir() if name.endswith("/") else path.is_file() for path in candidates), name


def test_every_package_is_named_in_the_design() -> None:
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= set(NAMED)

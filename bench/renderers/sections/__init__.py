"""The files under bench/results/ that have a place on the pages, in the order of these, and what is said of them."""

from __future__ import annotations

from renderers.section import Section
from renderers.sections.decisions import DECISIONS
from renderers.sections.grids import GRIDS
from renderers.sections.one_tenant import ONE_TENANT
from renderers.sections.parts import PARTS

SECTIONS: tuple[Section, ...] = (*ONE_TENANT, *GRIDS, *DECISIONS, *PARTS)

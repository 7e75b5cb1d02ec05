"""Lists in pages, the way OpenAI's API has them: ``after`` is the id of the last item that the client has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, Table, select, true

from cotenant.core.errors import InvalidInputError
from cotenant.store.records import Page

T = TypeVar("T")

MAX_DELETED_PLACES = 20_000  # two of the longest pages


class DeletedPlaces:
    """Where rows stood in their lists that were deleted lately: clients delete what they page through, and then ask for
    what comes after it. In memory alone, so that it is bounded: who pages across a restart begins again."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def add(self, row_id: str, place: int) -> None:
        """Remember a row. Call it in the unit of work that deletes the row: no two of those run at once."""
        self._places[row_id] = place
        while len(self._places) > MAX_DELETED_PLACES:
            del self._places[next(iter(self._places))]

    def find(self, row_id: str) -> int | None:
        """None if the row was not deleted, or too long ago."""
        return self._places.get(row_id)


def read_page(
    connection: Connection,
    query: Select[Any],
    table: Table,
    make: Callable[[Row[Any]], T],
    *,
    after: str | None,
    limit: int,
    deleted: Callable[[str], int | None] | None = None,
    ascending: bool = False,
    owner: ColumnElement[bool] | None = None,
    place: Column[int] | None = None,
) -> Page[T]:
    """Up to ``limit`` rows of ``query`` by ``place``, which no two of them share (None: ``table``'s sequence), highest
    first unless ``ascending``.

    ``deleted`` tells where a row stood that is gone. Raises InvalidInputError if it does not know ``after`` either, and
    no row of ``table`` has this id, of those that ``owner`` says.
    """
    place = table.c.sequence if place is None else place
    if after is not None:
        last = select(place).where(table.c.id == after, true() if owner is None else owner)
        reached = connection.execute(last).scalar_one_or_none()
        if reached is None and deleted is not None:
            reached = deleted(after)
        if reached is None:
            raise InvalidInputError(
                f"Invalid 'after': there is no '{after[:100]}'.", code="invalid_value", param="after"
            )
        query = query.where(place > reached if ascending else place < reached)
    order = place.asc() if ascending else place.desc()
    rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
    return Page([make(row) for row in rows[:limit]], len(rows) > limit)

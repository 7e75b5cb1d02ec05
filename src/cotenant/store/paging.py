"""Lists in pages, the way OpenAI's API has them: ``after`` is the id of the last item that the client has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Column, ColumnElement, Connection, Row, Select, Table, select, true

from cotenant.core.errors import InvalidInputError
from cotenant.store.records import Page

T = TypeVar("T")


def read_page(
    connection: Connection,
    query: Select[Any],
    table: Table,
    make: Callable[[Row[Any]], T],
    *,
    after: str | None,
    limit: int,
    ascending: bool = False,
    owner: ColumnElement[bool] | None = None,
    place: Column[int] | None = None,
) -> Page[T]:
    """Up to ``limit`` rows of ``query`` by ``place``, which no two of them share (None: ``table``'s sequence), highest
    first unless ``ascending``.

    Raises InvalidInputError if no row of ``table`` has the id ``after``, of those that ``owner`` says.
    """
    place = table.c.sequence if place is None else place
    if after is not None:
        last = select(place).where(table.c.id == after, true() if owner is None else owner)
        reached = connection.execute(last).scalar_one_or_none()
        if reached is None:
            raise InvalidInputError(
                f"Invalid 'after': there is no '{after[:100]}'.", code="invalid_value", param="after"
            )
        query = query.where(place > reached if ascending else place < reached)
    order = place.asc() if ascending else place.desc()
    rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
    return Page([make(row) for row in rows[:limit]], len(rows) > limit)

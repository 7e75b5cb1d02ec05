"""Lists in pages, the way OpenAI's API has them: ``after`` is the id of the last item that the client has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, Table, select, true

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
) -> Page[T]:
    """Up to ``limit`` rows of ``query`` by ``table``'s sequence, newest first unless ``ascending``.

    Raises InvalidInputError if no row of ``table`` has the id ``after``, of those that ``owner`` says.
    """
    if after is not None:
        last = select(table.c.sequence).where(table.c.id == after, true() if owner is None else owner)
        sequence = connection.execute(last).scalar_one_or_none()
        if sequence is None:
            raise InvalidInputError(
                f"Invalid 'after': there is no '{after[:100]}'.", code="invalid_value", param="after"
            )
        query = query.where(table.c.sequence > sequence if ascending else table.c.sequence < sequence)
    order = table.c.sequence.asc() if ascending else table.c.sequence.desc()
    rows = connection.execute(query.order_by(order).limit(limit + 1)).all()
    return Page([make(row) for row in rows[:limit]], len(rows) > limit)

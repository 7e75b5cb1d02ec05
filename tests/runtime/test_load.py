"""The load that policies are compared under."""

from __future__ import annotations

from cotenant.core.request import Request
from cotenant.runtime.load import Arrival, Load
from cotenant.wire.messages import AddRequest


def requests(seed: int, first_token: int) -> list[Request]:
    load = Load([Arrival(0.0, 6, 3), Arrival(0.0, 1, 2), Arrival(0.0, 40, 1)], 500, seed, first_token)
    messages = load.receive()
    assert all(isinstance(message, AddRequest) for message in messages)
    return [message.request for message in messages if isinstance(message, AddRequest)]


def test_loads_of_one_seed_differ_in_the_first_token_alone() -> None:
    one, other = requests(3, 7), requests(3, 8)
    assert [request.prompt for request in one] != [request.prompt for request in other]
    for left, right in zip(one, other, strict=True):
        assert (left.prompt[0], right.prompt[0]) == (7, 8)
        assert left.prompt[1:] == right.prompt[1:]
        assert left.sampling == right.sampling
    assert [len(request.prompt) for request in one] == [6, 1, 40]
    assert requests(4, 7)[2].prompt != one[2].prompt

"""What is known of a training file once it is encoded. Whoever only asks for that need not import what encodes."""

from __future__ import annotations

from dataclasses import dataclass

MIN_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class PreparedFile:
    """What a training file came to. An example of preferences is two sequences; ``max_tokens``: of the longest one."""

    num_examples: int
    num_tokens: int
    num_trained_tokens: int
    max_tokens: int

"""What text must be before any tokenizer sees it."""

from __future__ import annotations

from cotenant.core.errors import InvalidInputError


def check_encodable(text: str) -> None:
    """InvalidInputError for a lone surrogate (``"\\ud800"`` in JSON), which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"The text holds an unpaired surrogate (U+{ord(text[error.start]):04X}), which is not a character"
        ) from error

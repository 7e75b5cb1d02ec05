"""What text must be before any tokenizer sees it."""

from __future__ import annotations

from cotenant.core.errors import InvalidInputError


def check_encodable(text: str) -> None:
    """InvalidInputError for a lone surrogate (``"\\ud800"`` in JSON), which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"The text holds {unpaired_surrogate(ord(text[error.start]))}") from error


def unpaired_surrogate(code_point: int) -> str:
    """What it is, in an error's words."""
    return f"an unpaired surrogate (U+{code_point:04X}), which is not a character"

"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cotenant.config import is_plain
from cotenant.core.errors import InvalidInputError

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_path``: a folder on the server's disk. ``load_inplace``: the name may be one that is loaded."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False

    def check(self) -> None:
        """Raise InvalidInputError for a name that is not what it looks like."""
        if not is_plain(self.lora_name):
            raise InvalidInputError(
                "Invalid 'lora_name': it has to be printable text without spaces around it.",
                param="lora_name",
                code="invalid_value",
            )


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_int_id`` is accepted and changes nothing."""

    lora_name: AdapterName
    lora_int_id: int | None = None

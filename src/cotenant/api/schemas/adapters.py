"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

AdapterName = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadLoraAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_path``: a folder on the server's disk. ``load_inplace``: the name may be one that is loaded."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadLoraAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_int_id`` is accepted and changes nothing."""

    lora_name: AdapterName
    lora_int_id: int | None = None

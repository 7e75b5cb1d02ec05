"""Names for the pages of a sequence: equal names, equal content of the KV cache.

What a page holds follows from its own tokens, all tokens before it, and the weights. So a page's key is a hash chain
over pages that starts from the adapter's weights: vLLM's scheme ("Automatic prefix caching"), with 128 bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16

BASE_ROOT = bytes(KEY_BYTES)
"""Where the base model's chains start. Those of an adapter start from the fingerprint of its weights."""


def salted(root: bytes, salt: str) -> bytes:
    """The root of chains that only requests with this salt share: who does not know it finds none of their pages, nor
    learns from the time that an answer takes that there are any. None is equal to a page's key, whatever the salt."""
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"salt").digest() if salt else root


class PrefixKeys:
    """The keys of one sequence's full pages, computed once each.

    key i = blake2b(key i-1 + the token ids of page i), and ``root`` stands before the first: ``BASE_ROOT``, or an
    adapter's fingerprint, perhaps ``salted``.
    """

    def __init__(self, page_tokens: int, root: bytes) -> None:
        self._page_tokens = page_tokens
        self.root = root
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of the first ``count`` pages of ``tokens``, all of them full. See ``known``."""
        return self.known(tokens, count)[:count]

    def known(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of ``count`` pages at least: all that are known, in a list that grows with them and is not to be
        changed.

        ``tokens`` may have grown since the last call; those of pages that were asked for have not changed. Raises
        OverflowError when a page holds a token that is not known yet (``PENDING``).
        """
        num_keys = len(self._keys)
        if count > num_keys:
            first, stop = num_keys * self._page_tokens, count * self._page_tokens
            assert stop <= len(tokens), f"{count} pages of {self._page_tokens} are not full with {len(tokens)} tokens"
            ids = array("I", tokens[first:stop])
            page_bytes = self._page_tokens * ids.itemsize
            data = ids.tobytes()
            key = self._keys[-1] if self._keys else self.root
            for start in range(0, len(data), page_bytes):
                key = blake2b(key + data[start : start + page_bytes], digest_size=KEY_BYTES).digest()
                self._keys.append(key)
        return self._keys

"""Which adapters live requests want, and what became of reading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef
from cotenant.engine.adapters import AdapterCache, Reading
from cotenant.engine.prefix import BASE_ROOT
from cotenant.engine.sequence import Sequence
from cotenant.models.lora import LoraAdapter


class AdapterDesk:
    """Stands between the engine and ``cache``, which holds the adapters themselves."""

    def __init__(self, cache: AdapterCache) -> None:
        self.cache = cache
        self.is_used = False  # whether there ever was a request for an adapter
        self._loading: list[tuple[AdapterRef, Reading]] = []  # read because ``load`` asked for it
        self._dropped: list[AdapterRef] = []  # meanwhile
        self._num_wanting: Counter[AdapterRef] = Counter()  # live requests, of those that have any
        self._registered: set[AdapterRef] = set()  # and not dropped since
        self._all_were_ready = True  # those that waiting sequences wanted, at the last look

    def want(self, ref: AdapterRef) -> None:
        """A request for this adapter has come, and is live until ``want_no_more``."""
        self.is_used = True
        self._num_wanting[ref] += 1
        self.cache.prefetch(ref)

    def want_no_more(self, ref: AdapterRef) -> None:
        """A request for this adapter has left. If it was the last, the adapter is not read unless that has begun:
        adapters are read one after the other, and others wait behind it. What was registered has no folder to be read
        from later."""
        self._num_wanting[ref] -= 1
        if self._num_wanting[ref] == 0:
            del self._num_wanting[ref]
            if ref not in self._registered:
                self.cache.cancel(ref)

    def prefix_root(self, ref: AdapterRef | None) -> bytes:
        """What the page keys of a sequence begin with that is admitted now; its adapter is ready. It follows from the
        weights alone: a folder may change and be read again without anybody's saying so."""
        return BASE_ROOT if ref is None else self.cache.fingerprint(ref)

    def register(self, ref: AdapterRef, adapter: LoraAdapter) -> None:
        """Serve a frozen copy of ``adapter`` as ``ref`` without reading it from disk."""
        self._registered.add(ref)
        self.cache.register(ref, adapter)

    def wait(self, refs: Iterable[AdapterRef]) -> None:
        """Block until adapters that were registered or wanted have been read. Raises InvalidInputError for one that
        cannot be."""
        for ref in refs:
            self.cache.wait(ref)
            failure = self.cache.failure(ref)
            if failure is not None:
                raise failure

    def drop(self, ref: AdapterRef) -> None:
        """Forget this adapter. Sequences that hold it keep it until they end."""
        self._dropped += [other for other, _ in self._loading if other == ref]
        self._loading = [(other, reading) for other, reading in self._loading if other != ref]
        self._registered.discard(ref)
        self.cache.set_apart(ref)

    def load(self, ref: AdapterRef) -> None:
        """Read an adapter that may have changed on disk, and put it in the place of the one of its name, which serves
        until then. ``take_loaded`` says when that has happened."""
        self._loading.append((ref, self.cache.read(ref)))

    def take_loaded(
        self, before_replacing: Callable[[AdapterRef], None]
    ) -> list[tuple[AdapterRef, InvalidInputError | None]]:
        """Adapters that ``load`` asked for and that serve since this call, or why they cannot: then the one before goes
        on. ``before_replacing`` is told of each before it takes the place of others of its name. Each ``load`` ends
        once, whatever is dropped."""
        ended: list[tuple[AdapterRef, InvalidInputError | None]] = []
        for ref in self._dropped:
            ended.append((ref, InvalidInputError(f"adapter '{ref.name}' was unloaded while it was read")))
        self._dropped.clear()
        while self._loading and self._loading[0][1].done():  # they are read one after the other
            ref, reading = self._loading.pop(0)
            result = reading.result()
            if isinstance(result, InvalidInputError):
                ended.append((ref, result))
            else:
                before_replacing(ref)
                self.cache.replace(ref, reading)
                ended.append((ref, None))
        return ended

    def look(self, waiting: Iterable[Sequence]) -> tuple[dict[AdapterRef, InvalidInputError], bool]:
        """Have those read that waiting sequences want, the first in order first. Returns the ones that cannot be, with
        the reason, and whether a plan made before may be out of date."""
        refs = dict.fromkeys(sequence.adapter_ref for sequence in waiting) if self.is_used else {}
        failures: dict[AdapterRef, InvalidInputError] = {}
        all_ready, some_left = True, False
        num_left = self.cache.max_read_ahead
        for ref in refs:
            if ref is None:
                continue
            error = self.cache.failure(ref)
            if error is not None:
                failures[ref] = error
                continue
            is_held = self.cache.is_held(ref)  # nothing pushes it out
            if not is_held and num_left == 0:
                continue
            num_left -= not is_held
            if not is_held:
                some_left |= self.cache.prefetch(ref)  # one that is there is only kept from being pushed out
            all_ready &= self.cache.is_ready(ref)
        has_changed = some_left or not (all_ready and self._all_were_ready)
        self._all_were_ready = all_ready
        return failures, has_changed

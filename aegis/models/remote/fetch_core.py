"""Fetches the files of one checkpoint: which comes next, from which byte, when again, and whether what came is right.

It decides and does nothing: `on(event, now_ns)` answers with what is to be done. Laws, which
`tests/unit/models/remote/test_fetch_core.py` holds for any order of events:

1. A file is kept only after its bytes on disk were found to have the size and the sha256 that its source says.
2. No more than `AT_ONCE` files are on their way, and each is asked for from the byte that is on disk.
3. A file whose connection is lost is asked for again after a wait that doubles, at most `TRIES` times in a row without
   a byte more; one that is wrong once is fetched anew, one that is wrong twice ends the fetch.
4. The end is said once, after which nothing is asked for: `Finished` when all are kept, else `Failed` with one reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

AT_ONCE = 4
TRIES = 6
FIRST_WAIT_NS = 500_000_000
LONGEST_WAIT_NS = 30_000_000_000
FRESH_STARTS = 1
"""So often a file that was wrong is fetched anew."""


class WantedFile(Struct, frozen=True):
    """A file as its source lists it; `have_bytes` of it are on disk from an earlier fetch."""

    name: str
    size_bytes: int | None = None
    sha256: str | None = None
    have_bytes: int = 0


# --- events -----------------------------------------------------------------------------------------------------------


class Begun(Struct, frozen=True):
    """The fetch may begin."""


class Answered(Struct, frozen=True):
    """The source sends the file from this byte on: another than was asked for where it does not resume. The file has
    `size_bytes` in all, if it says so."""

    name: str
    start: int
    size_bytes: int | None = None


class Arrived(Struct, frozen=True):
    """So many bytes of it are on disk now."""

    name: str
    have_bytes: int


class Ended(Struct, frozen=True):
    """The source has sent all it sends of it."""

    name: str


class Lost(Struct, frozen=True):
    """The connection broke, or the source is busy: it may work again, no sooner than `retry_after_ns`."""

    name: str
    reason: str
    retry_after_ns: int = 0


class Verified(Struct, frozen=True):
    """What its bytes on disk are."""

    name: str
    size_bytes: int
    sha256: str


class Hopeless(Struct, frozen=True):
    """Trying again does not help: the source does not have it, the disk is full."""

    reason: str


class Due(Struct, frozen=True):
    """The time of a `Wake` has come."""


Event = Begun | Answered | Arrived | Ended | Lost | Verified | Hopeless | Due


# --- effects ----------------------------------------------------------------------------------------------------------


class Ask(Struct, frozen=True):
    """Ask the source for the file from this byte on."""

    name: str
    start: int


class Leave(Struct, frozen=True):
    """Read no more of what the source sends of it."""

    name: str


class Discard(Struct, frozen=True):
    """Drop what is on disk of it."""

    name: str


class Verify(Struct, frozen=True):
    """Read what is on disk of it and tell with `Verified`."""

    name: str


class Keep(Struct, frozen=True):
    """Keep the file: it is whole and right."""

    name: str
    sha256: str


class Wake(Struct, frozen=True):
    """Tell `Due` then."""

    at_ns: int


class Finished(Struct, frozen=True):
    """All files are kept."""


class Failed(Struct, frozen=True):
    """The fetch is over; what is on disk stays for the next one."""

    reason: str


Effect = Ask | Leave | Discard | Verify | Keep | Wake | Finished | Failed


class _File:
    """`asked` while the source sends it, `verifying` while it is read from disk; else it waits, `not_before_ns`."""

    __slots__ = ("asked", "have_bytes", "kept", "not_before_ns", "sha256", "size_bytes", "tries", "verifying", "wrong")

    def __init__(self, wanted: WantedFile) -> None:
        self.size_bytes = wanted.size_bytes
        self.sha256 = wanted.sha256
        self.have_bytes = wanted.have_bytes
        self.asked = False
        self.verifying = False
        self.kept = False
        self.not_before_ns = 0
        self.tries = 0
        self.wrong = 0


class FetchCore:
    """Decides how one checkpoint's files are fetched, in the order in which they are wanted."""

    def __init__(self, files: Iterable[WantedFile]) -> None:
        self._files = {wanted.name: _File(wanted) for wanted in files}
        self.over = False

    @property
    def have_bytes(self) -> int:
        return sum(file.have_bytes for file in self._files.values())

    @property
    def total_bytes(self) -> int:
        """The bytes of all files, as far as they are known."""
        return sum(file.have_bytes if file.size_bytes is None else file.size_bytes for file in self._files.values())

    def on(self, event: Event, now_ns: int) -> list[Effect]:
        if self.over:
            return []
        match event:
            case Begun() | Due():
                return self._go_on(now_ns)
            case Answered(name, start, size_bytes):
                return self._answered(name, start, size_bytes, now_ns)
            case Arrived(name, have_bytes):
                return self._arrived(name, have_bytes, now_ns)
            case Ended(name):
                return self._ended(name, now_ns)
            case Lost(name, reason, retry_after_ns):
                return self._lost(name, reason, retry_after_ns, now_ns)
            case Verified(name, size_bytes, sha256):
                return self._verified(name, size_bytes, sha256, now_ns)
            case Hopeless(reason):
                return self._fail(reason)

    def _go_on(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        left = [(name, file) for name, file in self._files.items() if not file.kept]
        if not left:
            self.over = True
            return [Finished()]
        busy = sum(file.asked or file.verifying for _, file in left)
        waiting = [(name, file) for name, file in left if not (file.asked or file.verifying)]
        for name, file in waiting:
            if busy == AT_ONCE or file.not_before_ns > now_ns:
                continue
            busy += 1
            effects += self._begin(name, file)
        later = [file.not_before_ns for _, file in waiting if file.not_before_ns > now_ns]
        return [*effects, Wake(min(later))] if later and busy < AT_ONCE else effects

    def _begin(self, name: str, file: _File) -> list[Effect]:
        effects: list[Effect] = []
        if file.size_bytes is not None and file.have_bytes > file.size_bytes:
            effects.append(Discard(name))
            file.have_bytes = 0
        if file.have_bytes == file.size_bytes and file.have_bytes:
            file.verifying = True
            return [*effects, Verify(name)]
        file.asked = True
        return [*effects, Ask(name, file.have_bytes)]

    def _answered(self, name: str, start: int, size_bytes: int | None, now_ns: int) -> list[Effect]:
        file = self._files[name]
        if file.size_bytes is not None and size_bytes not in (None, file.size_bytes):
            return self._wrong(name, f"has {size_bytes} bytes instead of {file.size_bytes}", now_ns)
        file.size_bytes = size_bytes if file.size_bytes is None else file.size_bytes
        if start == file.have_bytes:
            return []
        file.have_bytes = 0
        if start == 0:
            return [Discard(name)]
        file.asked = False
        return [Leave(name), Discard(name), *self._go_on(now_ns)]

    def _arrived(self, name: str, have_bytes: int, now_ns: int) -> list[Effect]:
        file = self._files[name]
        if have_bytes > file.have_bytes:
            file.tries = 0
        file.have_bytes = have_bytes
        if file.size_bytes is not None and have_bytes > file.size_bytes:
            return self._wrong(name, f"has more than {file.size_bytes} bytes", now_ns)
        return []

    def _ended(self, name: str, now_ns: int) -> list[Effect]:
        file = self._files[name]
        if file.size_bytes is not None and file.have_bytes < file.size_bytes:
            return self._lost(name, f"it ended after {file.have_bytes} of {file.size_bytes} bytes", 0, now_ns)
        file.asked, file.verifying = False, True
        return [Verify(name)]

    def _lost(self, name: str, reason: str, retry_after_ns: int, now_ns: int) -> list[Effect]:
        file = self._files[name]
        file.asked = False
        file.tries += 1
        if file.tries >= TRIES:
            return self._fail(f"{name}: {reason}, {TRIES} times in a row; what came of it is kept")
        wait_ns = min(FIRST_WAIT_NS << (file.tries - 1), LONGEST_WAIT_NS)
        file.not_before_ns = now_ns + max(wait_ns, min(retry_after_ns, LONGEST_WAIT_NS))
        return self._go_on(now_ns)

    def _verified(self, name: str, size_bytes: int, sha256: str, now_ns: int) -> list[Effect]:
        file = self._files[name]
        if file.size_bytes is not None and size_bytes != file.size_bytes:
            return self._wrong(name, f"has {size_bytes} bytes instead of {file.size_bytes}", now_ns)
        if file.sha256 is not None and sha256 != file.sha256:
            return self._wrong(name, f"has the sha256 {sha256[:12]}… instead of {file.sha256[:12]}…", now_ns)
        file.verifying, file.kept, file.have_bytes = False, True, size_bytes
        return [Keep(name, sha256), *self._go_on(now_ns)]

    def _wrong(self, name: str, what: str, now_ns: int) -> list[Effect]:
        file = self._files[name]
        file.wrong += 1
        leaving: list[Effect] = [Leave(name)] if file.asked else []
        file.asked = file.verifying = False
        file.have_bytes = 0
        if file.wrong > FRESH_STARTS:
            return [*leaving, Discard(name), *self._fail(f"{name} {what}, fetched twice; see to its source")]
        return [*leaving, Discard(name), *self._go_on(now_ns)]

    def _fail(self, reason: str) -> list[Effect]:
        self.over = True
        leaving: list[Effect] = [Leave(name) for name, file in self._files.items() if file.asked]
        return [*leaving, Failed(reason)]

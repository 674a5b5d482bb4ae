"""KV of sequences that have ended, kept in a machine's host memory for prompts with the same beginning.

The node alone owns it, so no instance has to be asked to give it up: slabs of kept KV are as good as free ones. Kept KV
forms trees, one for each weight image and shape of KV: the path of a block from the root is the tokens before it and
its own. A block is found by those tokens themselves and not by a digest of them, so two prompts are never confused.

Slabs are filled from their beginning and leave as a whole, the least recently used first, together with all blocks
elsewhere that continue theirs. A reader holds nothing: it copies, and then asks whether the blocks were there all the
time (`intact`). Only a slab that is being written to cannot leave; it can as soon as its writer has ended.

Laws: (K1) a kept block lies in one slab that is held, at a place of its own; (K2) its parent is kept, too, and no tree
without blocks is; (K3) the count of a slab's writers is right; (K4) the entries of a slab are those that lie there.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from aegis.core.block_runs import runs_of
from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, SlabId
from aegis.core.messages import KeepKv, OfferKv
from aegis.core.model import KvShape
from aegis.core.request import KeptPrefix

TOKEN_BYTES = array("I").itemsize


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The bytes of tokens, as messages hold them."""
    return array("I", tokens).tobytes()


@dataclass(slots=True)
class Counters:
    """Since the node started. A prompt is asked for once each time that it is to be prefilled."""

    prompts: int = 0
    hits: int = 0
    hit_tokens: int = 0
    kept_blocks: int = 0
    evicted_blocks: int = 0
    stale: int = 0  # hits that were evicted before they were copied


@dataclass(slots=True, eq=False)
class _Slab:
    """`entries` by their numbers; `filled` of its places were ever taken."""

    slab: SlabId
    shape: KvShape
    places: int
    filled: int = 0
    writers: int = 0
    entries: dict[int, _Entry] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Entry:
    """A block. `number` is never used for another one; the root of a tree has none and lies nowhere."""

    number: int
    tokens: bytes
    parent: _Entry | None
    slab: _Slab | None
    block: int
    written: bool = False
    children: dict[bytes, _Entry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Writing:
    entries: tuple[_Entry, ...]
    slabs: tuple[_Slab, ...]


class KeptPrefixes:
    """The KV that the node keeps on a machine, in slabs of `slab_bytes`."""

    def __init__(self, slab_bytes: int, counters: Counters | None = None) -> None:
        self.counters = counters or Counters()
        self._slab_bytes = slab_bytes
        self._roots: dict[tuple[str, KvShape], _Entry] = {}
        self._entries: dict[int, _Entry] = {}
        self._slabs: dict[SlabId, _Slab] = {}  # the one that was used the longest ago first
        self._open: dict[KvShape, _Slab] = {}  # that is being filled
        self._writing: dict[tuple[InstanceId, int], _Writing] = {}
        self._numbers = 0
        self.nbytes = 0  # of all blocks that can be found, or will be once they are written

    @property
    def slabs(self) -> int:
        return len(self._slabs)

    @property
    def idle(self) -> int:
        """The number of slabs that could leave at once."""
        return len(self._slabs) - len({slab.slab for writing in self._writing.values() for slab in writing.slabs})

    def held(self) -> list[SlabId]:
        return list(self._slabs)

    # --- readers ------------------------------------------------------------------------------------------------------

    def find(self, image: str, shape: KvShape, prompt: Sequence[int]) -> KeptPrefix | None:
        """The kept KV of the prompt's beginning; the prompt's last token is never part of it."""
        self.counters.prompts += 1
        root = self._roots.get((image, shape))
        if root is None:
            return None
        whole = (len(prompt) - 1) // shape.block_tokens * shape.block_tokens
        known = self._known(root, _blocks(token_bytes(prompt[:whole]), shape))
        found = list(takewhile(lambda entry: entry.written, known))
        if not found:
            return None
        self._use(found)
        tokens = len(found) * shape.block_tokens
        self.counters.hits += 1
        self.counters.hit_tokens += tokens
        return KeptPrefix(runs_of(entry.block for entry in found), tokens, found[-1].number)

    def intact(self, entry: int) -> bool:
        """Whether all blocks of a prefix that ends with this entry have been there since it was found."""
        intact = entry in self._entries
        self.counters.stale += not intact
        return intact

    # --- writers ------------------------------------------------------------------------------------------------------

    def offer(
        self,
        writer: InstanceId,
        offer: OfferKv,
        image: str,
        shape: KvShape,
        spare: Callable[[], SlabId | None],
    ) -> KeepKv:
        """The blocks of the offer that are to be written, and their places: those after the blocks that are kept
        already, as far as there is room in slabs that are to `spare`, or that were used longer ago."""
        root = self._roots.get((image, shape)) or _Entry(0, b"", None, None, -1)
        blocks = _blocks(offer.tokens, shape)
        known = self._known(root, blocks)
        self._use(known)
        above = {entry.slab.slab for entry in known if entry.slab}
        parent = known[-1] if known else root
        made: list[_Entry] = []
        slabs: dict[SlabId, _Slab] = {}
        for block in blocks[len(known) :]:
            slab = self._room(shape, above, spare)
            if slab is None:
                break
            if slab.slab not in slabs:
                slabs[slab.slab] = slab
                slab.writers += 1  # from here on it cannot leave for what follows
            parent = self._enter(slab, block, parent)
            made.append(parent)
        if made:
            self._roots[image, shape] = root
            self._writing[writer, offer.offer] = _Writing(tuple(made), tuple(slabs.values()))
        return KeepKv(offer.offer, len(known), runs_of(entry.block for entry in made))

    def ended(self, writer: InstanceId, offer: int, *, done: bool) -> None:
        """The offer was written, or will not be: slabs that were to be written to may leave again."""
        writing = self._writing.pop((writer, offer))
        for slab in writing.slabs:
            slab.writers -= 1
        for entry in writing.entries:
            if entry.number not in self._entries:
                break  # evicted meanwhile, with all that followed
            if not done:
                self._forget(entry)
                break
            entry.written = True
            self.counters.kept_blocks += 1

    def lost(self, writer: InstanceId) -> None:
        """The instance's process is gone, and with it everything that it was writing."""
        for key in [key for key in self._writing if key[0] == writer]:
            self.ended(*key, done=False)

    # --- room ---------------------------------------------------------------------------------------------------------

    def release(self, count: int) -> list[SlabId]:
        """Gives up what up to `count` slabs hold, for KV of running requests."""
        oldest = list(islice((slab for slab in self._slabs.values() if not slab.writers), max(count, 0)))
        for slab in oldest:
            self._evict(slab)
        return [slab.slab for slab in oldest]

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        places, roots = Counter(entry.block for entry in self._entries.values()), set(self._roots.values())
        for number, entry in self._entries.items():
            slab = entry.slab
            if slab is None or self._slabs.get(slab.slab) is not slab or entry.block // slab.places != slab.slab:
                raise LawBroken(f"K1: entry {number} lies in no slab that is held")
            if places[entry.block] > 1 and sum(e.block == entry.block for e in slab.entries.values()) > 1:
                raise LawBroken(f"K1: block {entry.block} is two entries'")
            parent = entry.parent
            if parent is None or parent.children.get(entry.tokens) is not entry:
                raise LawBroken(f"K2: entry {number} cannot be found")
            is_kept = parent.number in self._entries if parent.slab else parent in roots
            if not is_kept:
                raise LawBroken(f"K2: what entry {number} goes on from is gone")
        if not all(root.children for root in roots):
            raise LawBroken("K2: a tree without blocks is kept")
        writers = Counter(slab.slab for writing in self._writing.values() for slab in writing.slabs)
        if any(slab.writers != writers[slab.slab] for slab in self._slabs.values()) or writers.keys() - self._slabs:
            raise LawBroken(f"K3: {writers} are written to")
        if sum(len(slab.entries) for slab in self._slabs.values()) != len(self._entries):
            raise LawBroken("K4: slabs and entries differ")

    def _known(self, root: _Entry, blocks: Iterable[bytes]) -> list[_Entry]:
        """The entries of the longest known beginning, some of which may have to be written yet."""
        known: list[_Entry] = []
        entry = root
        for block in blocks:
            following = entry.children.get(block)
            if following is None:
                break
            entry = following
            known.append(entry)
        return known

    def _use(self, entries: Sequence[_Entry]) -> None:
        """Marks them as used, the last blocks first, so that their parents stay longer."""
        for entry in reversed(entries):
            assert entry.slab
            self._slabs[entry.slab.slab] = self._slabs.pop(entry.slab.slab)

    def _room(self, shape: KvShape, above: set[SlabId], spare: Callable[[], SlabId | None]) -> _Slab | None:
        """A slab with a place for a block of the shape."""
        slab = self._open.get(shape)
        if slab and slab.filled < slab.places:
            return slab
        free = spare()
        if free is None:
            oldest = next((s for s in self._slabs.values() if not s.writers and s.slab not in above), None)
            if oldest is None:
                return None
            self._evict(oldest)
            free = oldest.slab
        slab = self._slabs[free] = self._open[shape] = _Slab(free, shape, self._slab_bytes // shape.block_bytes)
        return slab

    def _enter(self, slab: _Slab, tokens: bytes, parent: _Entry) -> _Entry:
        self._numbers += 1
        entry = _Entry(self._numbers, tokens, parent, slab, slab.slab * slab.places + slab.filled)
        slab.filled += 1
        self.nbytes += slab.shape.block_bytes
        parent.children[tokens] = self._entries[entry.number] = slab.entries[entry.number] = entry
        return entry

    def _evict(self, slab: _Slab) -> None:
        for entry in list(slab.entries.values()):
            if entry.number in self._entries:
                self._forget(entry)
        del self._slabs[slab.slab]
        if self._open.get(slab.shape) is slab:
            del self._open[slab.shape]

    def _forget(self, first: _Entry) -> None:
        """The block cannot be found any more, nor the blocks that continue it."""
        above = first.parent
        assert above
        del above.children[first.tokens]
        if above.slab is None and not above.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not above}
        going = [first]
        while going:
            entry = going.pop()
            assert entry.slab
            del self._entries[entry.number], entry.slab.entries[entry.number]
            self.counters.evicted_blocks += entry.written
            self.nbytes -= entry.slab.shape.block_bytes
            going += entry.children.values()
            entry.children, entry.parent = {}, None  # or they would be garbage of the kind that is costly to find


def _blocks(tokens: bytes, shape: KvShape) -> list[bytes]:
    """The whole blocks of these tokens."""
    size = shape.block_tokens * TOKEN_BYTES
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]

"""The kernels of `triton_attention`, which says what they are for and launches them."""

# Triton reads annotations as its own, hence none of Python's here and no postponed ones.
import triton
import triton.language as tl


@triton.jit
def cached_at(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to where a cache would begin, whether something is mapped there or not. An address below 2^31 comes as
    32 bits."""
    pointer = address.to(tl.int64).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def append(
    key,
    value,
    keys_at,
    values_at,
    lengths,
    starts,
    units,
    key_stride,
    value_stride,
    unit_stride,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    keys, values = cached_at(keys_at, TYPE, ALIGNED), cached_at(values_at, TYPE, ALIGNED)
    row = tl.program_id(0)
    last = tl.load(lengths + row) - 1
    if last >= 0:
        unit = tl.load(units + tl.load(starts + row) + last // SIZE).to(tl.int64)
        at = tl.arange(0, TILE)
        own = tl.load(key + row * key_stride + at, mask=at < KEY_WIDTH)
        tl.store(keys + unit * unit_stride + (last % SIZE) * KEY_WIDTH + at, own, mask=at < KEY_WIDTH)
        own = tl.load(value + row * value_stride + at, mask=at < VALUE_WIDTH)
        tl.store(values + unit * unit_stride + (last % SIZE) * VALUE_WIDTH + at, own, mask=at < VALUE_WIDTH)


@triton.jit
def attend_part(
    query,
    keys_at,
    values_at,
    partial,
    weight,
    lengths,
    starts,
    units,
    row_stride,
    head_stride,
    unit_stride,
    scale,
    softcap,
    window,
    TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    POSITIONS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """Part `split` of one row and one KV head: the weighted sum of its values, and with what weight it counts (the
    greatest logit in base 2, and the sum of the exponentials relative to it)."""
    keys, values = cached_at(keys_at, TYPE, ALIGNED), cached_at(values_at, TYPE, ALIGNED)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    share = tl.cdiv(tl.cdiv(length - first, SPLITS), POSITIONS) * POSITIONS
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    member, k_at, v_at = tl.arange(0, ROWS), tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    heads = head * GROUP + member
    asked = (member < GROUP)[:, None] & (k_at < KEY_DIM)[None, :]
    q = tl.load(query + row * row_stride + heads[:, None] * head_stride + k_at[None, :], mask=asked, other=0.0)
    greatest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    table = units + tl.load(starts + row)
    for at in range(begin, end, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        there = position < end
        unit = tl.load(table + position // SIZE, mask=there, other=0).to(tl.int64) * unit_stride
        slot = (position % SIZE) * HEADS + head
        k_from = keys + unit[None, :] + slot[None, :] * KEY_DIM + k_at[:, None]
        k = tl.load(k_from, mask=there[None, :] & (k_at < KEY_DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * (softcap * 1.4426950408889634)
        scores = tl.where(there[None, :], scores, -float("inf"))
        raised = tl.maximum(greatest, tl.max(scores, 1))
        weights = tl.exp2(scores - raised[:, None])
        fading = tl.exp2(greatest - raised)
        v_from = values + unit[:, None] + slot[:, None] * VALUE_DIM + v_at[None, :]
        v = tl.load(v_from, mask=there[:, None] & (v_at < VALUE_DIM)[None, :], other=0.0)
        mixed = mixed * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * fading + tl.sum(weights, 1)
        greatest = raised
    place = (row * HEADS * GROUP + heads) * SPLITS + split
    kept = (member < GROUP)[:, None] & (v_at < VALUE_DIM)[None, :]
    tl.store(partial + place[:, None] * VALUE_DIM + v_at[None, :], mixed, mask=kept)
    tl.store(weight + place * 2, greatest, mask=member < GROUP)
    tl.store(weight + place * 2 + 1, total, mask=member < GROUP)


@triton.jit
def combine(
    partial,
    weight,
    sinks,
    out,
    QUERY_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    VALUE_TILE: tl.constexpr,
):
    """The parts of one row and query head as one, and the head's sink, which takes weight but has no value."""
    row, head = tl.program_id(0), tl.program_id(1)
    place = row * QUERY_HEADS + head
    split, v_at = tl.arange(0, SPLITS), tl.arange(0, VALUE_TILE)
    greatest = tl.load(weight + (place * SPLITS + split) * 2)
    total = tl.load(weight + (place * SPLITS + split) * 2 + 1)
    raised = tl.maximum(tl.max(greatest, 0), -1e30)  # of a row without positions every part is -inf
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        raised = tl.maximum(raised, sink)
    share = tl.exp2(greatest - raised)
    whole = tl.sum(share * total, 0)
    if HAS_SINKS:
        whole += tl.exp2(sink - raised)
    read = (v_at < VALUE_DIM)[None, :]
    parts = tl.load(partial + (place * SPLITS + split)[:, None] * VALUE_DIM + v_at[None, :], mask=read, other=0.0)
    mixed = tl.sum(parts * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + place * VALUE_DIM + v_at, mixed.to(out.dtype.element_ty), mask=v_at < VALUE_DIM)

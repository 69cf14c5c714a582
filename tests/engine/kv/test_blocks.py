"""Names and bytes of blocks: what differs has another name, and no changed byte is accepted."""

from __future__ import annotations

import random
from typing import Any

import pytest

from magnitude_engine.kv.blocks import (
    HEADER_BYTES,
    BlockName,
    BlockRejected,
    CacheIdentity,
    chain,
    decode,
    encode,
    names,
    next_digest,
    root_digest,
)
from testkit.disk import IDENTITY, OTHER_MODEL, chain_of, payload_of

MODEL = CacheIdentity("weights", "tokenizer", "reference", "float32", 2, 1, 8)
NAME = chain_of(1, 1)[0]


def whole(name: BlockName = NAME, identity: bytes = IDENTITY) -> bytes:
    """Returns a block's file."""
    payload = payload_of(name, 256)
    return encode(identity, name, payload) + payload


def refused(data: bytes, name: BlockName = NAME, identity: bytes = IDENTITY) -> str:
    """Returns why `data` is not the block of this name."""
    with pytest.raises(BlockRejected) as caught:
        decode(identity, name, data)
    return caught.value.reason


def test_every_field_of_the_identity_counts() -> None:
    others: list[dict[str, Any]] = [
        {field: value + "x" if isinstance(value, str) else value + 1} for field, value in MODEL._asdict().items()
    ]
    changed = [MODEL._replace(**other) for other in others]
    digests = {each.digest() for each in [MODEL, *changed]}
    assert len(digests) == len(MODEL) + 1
    assert {len(digest) for digest in digests} == {32}
    assert MODEL._replace(weights_hash="weightst", tokenizer_hash="okenizer").digest() not in digests


def test_a_key_depends_on_all_tokens_before_it_and_on_tenant_and_model() -> None:
    ids = list(range(64))
    keys = chain(root_digest(IDENTITY, "a"), ids)
    assert len(set(keys)) == 4
    assert chain(root_digest(IDENTITY, "a"), [*ids[:20], 7, *ids[21:]])[0] == keys[0]
    for other in (
        chain(root_digest(IDENTITY, "a"), [7, *ids[1:]]),
        chain(root_digest(IDENTITY, "b"), ids),
        chain(root_digest(OTHER_MODEL, "a"), ids),
        chain(root_digest(IDENTITY, "a"), ids[16:] + ids[:16]),
    ):
        assert not set(keys) & set(other)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 0), (15, 0), (16, 1), (31, 1), (32, 2), (47, 2)])
def test_only_full_pages_have_keys(tokens: int, pages: int) -> None:
    root, ids = root_digest(IDENTITY, "a"), list(range(tokens))
    keys = chain(root, ids)
    assert len(keys) == pages
    expected = root
    for index, name in enumerate(names(root, tuple(ids))):
        page = tuple(range(index * 16, index * 16 + 16))
        assert name == BlockName(next_digest(expected, page), expected, page)
        assert keys[index] == name.key
        expected = name.key


@pytest.mark.parametrize("ids", [range(15), range(17), [-1] * 16, [1 << 32] * 16])
def test_a_page_of_another_form_has_no_key(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="16 token ids of 32 bits"):
        next_digest(bytes(16), ids)


@pytest.mark.parametrize("name", [NAME._replace(key=b"short"), NAME._replace(parent=b""), NAME._replace(ids=(1,))])
def test_a_malformed_name_is_not_encoded(name: BlockName) -> None:
    with pytest.raises(ValueError, match=r"keys 16|16 token ids"):
        encode(IDENTITY, name, b"payload")


def test_a_block_gives_its_payload_back() -> None:
    payload = payload_of(NAME, 1000)
    for form in (bytes, bytearray, memoryview):
        data = form(encode(IDENTITY, NAME, memoryview(payload)) + payload)
        assert bytes(decode(IDENTITY, NAME, data)) == payload
    empty = encode(IDENTITY, NAME, b"")
    assert len(empty) == HEADER_BYTES
    assert bytes(decode(IDENTITY, NAME, empty)) == b""


def test_every_flipped_bit_is_found() -> None:
    data = bytearray(whole())
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockRejected):
            decode(IDENTITY, NAME, data)
        data[bit // 8] ^= 1 << bit % 8
    assert bytes(decode(IDENTITY, NAME, data)) == payload_of(NAME, 256)


def test_every_other_length_is_found() -> None:
    data = whole()
    assert {refused(data[:length]) for length in range(len(data))} == {"truncated"}
    for extra in (b"\0", b"x", data[-100:], data):
        assert refused(data + extra) == "corrupt"


def test_a_whole_block_of_another_name_is_foreign() -> None:
    other, behind = chain_of(2, 1)[0], chain_of(1, 2)[1]
    assert refused(whole(other)) == "foreign"
    assert refused(whole(behind)) == "foreign"
    assert refused(whole(identity=OTHER_MODEL)) == "foreign"
    assert refused(whole(chain_of(1, 1, "b")[0])) == "foreign"


@pytest.mark.parametrize("field", ["key", "parent", "ids"])
def test_no_part_of_the_name_is_taken_on_trust(field: str) -> None:
    """As if two pages had the same digest: the rest of the name tells them apart."""
    other: Any = {field: tuple(range(16)) if field == "ids" else random.Random(3).randbytes(16)}
    assert refused(whole(), NAME._replace(**other)) == "foreign"


def test_another_version_of_the_format_is_foreign() -> None:
    data = bytearray(whole())
    data[8] += 1
    assert refused(bytes(data)) == "foreign"

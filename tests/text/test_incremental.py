"""Incremental decoding: the pieces joined are what decoding at once gives, and no half character is given out."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.text.incremental import IncrementalDecoder

NOTHING = -1


def decode(ids):
    """A byte-level vocabulary: ids below 256 are one byte, those above two, which cut characters anywhere."""
    parts = [b"" if id_ == NOTHING else bytes([id_]) if id_ < 256 else (id_ - 256).to_bytes(2, "big") for id_ in ids]
    return b"".join(parts).decode("utf-8", errors="replace")


def pieces(ids):
    decoder = IncrementalDecoder(decode)
    return [*map(decoder.push, ids), decoder.flush()]


def test_a_character_waits_for_its_last_byte():
    assert pieces([*"aé😀b".encode()]) == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_text_before_an_unfinished_character_is_given_at_once():
    assert pieces([256 + 0x61C3, 0xA9]) == ["a", "é", ""]


def test_what_never_becomes_a_character_is_given_when_that_is_certain():
    assert pieces([0xC3, 0x61]) == ["", "\ufffda", ""]
    assert pieces([0xFF, 0xFF, 0xC3]) == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert pieces([*"\ufffd".encode()]) == ["", "", "", "\ufffd"]


def test_a_long_run_of_tokens_that_each_end_inside_a_character():
    ids = [0xC3, *[256 + 0xA9C3] * 40, 0xA9]  # no token boundary falls between two é
    assert pieces(ids) == ["", *["é"] * 41, ""]


def test_tokens_without_bytes_do_not_end_a_character():
    ids = [*[0xFF] * 7, 0xC3, *[NOTHING] * 20, 0xA9]
    assert "".join(pieces(ids)) == "\ufffd" * 7 + "é"


def test_flush_leaves_nothing_behind():
    decoder = IncrementalDecoder(decode)
    assert decoder.push(0xC3) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(0xA9) == ""
    assert decoder.flush() == "\ufffd"


trouble = st.sampled_from(
    [*"é你😀".encode(), 0xFF, 0x80, 0xC3, 0xE4, 0xF0, 0x61, 256 + 0x80F0, 256 + 0xBDE4, 256 + 0x80C3]
)


@given(ids=st.lists(trouble, max_size=80) | st.lists(st.integers(0, 256 + 65535), max_size=40))
@settings(deadline=None, max_examples=500)
def test_pieces_join_to_the_whole(ids):
    decoder = IncrementalDecoder(decode)
    given_out = ""
    for index, id_ in enumerate(ids):
        given_out += decoder.push(id_)
        # All but a last character that further bytes could still change.
        assert decode(ids[: index + 1]) in (given_out, given_out + "\ufffd")
    assert given_out + decoder.flush() == decode(ids)


def test_long_garbage_costs_work_in_proportion():
    decoded = 0

    def counting(ids):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    decoder = IncrementalDecoder(counting)
    length = 5000
    text = "".join(decoder.push(0xFF) for _ in range(length)) + decoder.flush()
    assert text == "\ufffd" * length
    assert decoded < 20 * length, "decoding all that waits with every token would take length / 2 per token"

"""Completions that arrive token by token: any token list gives a completion, and streaming equals parsing and decoding at once."""

from dataclasses import replace

from harmony_cases import stream, tokens, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from nmoe.text.harmony import CHANNELS, CONTROL_TOKENS, Completion
from nmoe.text.streaming import Event, IncrementalDecoder, StreamParser
from nmoe.types import Message

# The control tokens of the trained vocabulary are its first eight ids; the last ids here lie outside it.
hostile_ids = st.lists(st.integers(0, 7) | st.integers(-1, 502) | st.integers(), max_size=60)


class TestTotality:
    @given(ids=hostile_ids)
    @settings(deadline=None, max_examples=300)
    def test_any_ids_give_a_completion(self, harmony, ids):
        self.check(harmony, ids)

    @given(
        parts=st.lists(
            st.sampled_from([*CONTROL_TOKENS, "assistant", *CHANNELS, " to=f", " ", "json", ":ada", "user", "x"]),
            max_size=24,
        )
    )
    @settings(deadline=None, max_examples=300)
    def test_near_misses_give_a_completion(self, harmony, parts):
        self.check(harmony, tokens(harmony, "".join(parts)))

    @given(messages=turns, data=st.data())
    @settings(deadline=None, max_examples=200)
    def test_a_turn_with_one_token_changed_gives_a_completion(self, harmony, messages, data):
        ids = harmony.render_completion(messages)
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(st.integers(-1, harmony.tokenizer.vocab_size))
        self.check(harmony, ids)

    @staticmethod
    def check(harmony, ids):
        completion = harmony.parse_completion(ids)
        assert (completion.error is None) == (completion.end in ("return", "call"))
        parser, events = stream(harmony, ids)
        assert parser.completion() == completion
        check_events(events, completion)
        if completion.error is None:
            # Spellings differ, but what was read is a conversation that renders and reads back the same.
            again = harmony.parse_completion(harmony.render_completion(completion.messages))
            assert again == completion
            # The strict parse agrees once the prompt's part of the header is put in front.
            assert harmony.parse([*harmony.render_prompt([]), *ids]) == list(completion.messages)


def check_events(events, completion):
    """The events of a stream are those of its messages in order, and their texts join to the contents."""
    headers = [event.message for event in events if event.kind == "header"]
    complete = [event.message for event in events if event.kind == "message"]
    assert tuple(complete) == completion.messages
    assert [replace(message, content="") for message in complete] == headers[: len(complete)]
    assert len(headers) - len(complete) in (0, 1)
    texts = []
    for event in events:
        if event.kind == "header":
            texts.append("")
        elif event.kind != "error":
            texts[-1] += event.text
    assert texts[: len(complete)] == [message.content for message in complete]
    errors = [event.text for event in events if event.kind == "error"]
    assert errors == [] or (errors == [completion.error] and events[-1].kind == "error")


class TestPrefixes:
    @given(messages=turns)
    @settings(deadline=None, max_examples=60)
    def test_a_prefix_of_a_turn_is_truncated_and_nothing_worse(self, harmony, messages):
        ids = harmony.render_completion(messages)
        for length in range(len(ids)):
            completion = harmony.parse_completion(ids[:length])
            assert completion.end is None
            assert completion.error.startswith(f"token {length}: truncated")
            assert completion.messages == tuple(messages[: len(completion.messages)])
        assert harmony.parse_completion(ids).error is None


class TestStream:
    def test_events_come_as_early_as_they_can(self, harmony):
        ids = tokens(
            harmony,
            "<|channel|>analysis<|message|>a\U000e0041<|end|><|start|>assistant to=f<|channel|>final<|message|>",
        )
        parser = StreamParser(harmony)
        events = [parser.feed(id_) for id_ in ids]
        header = Message("assistant", "", "analysis")
        message_at = ids.index(harmony.tokenizer.special_id("<|message|>"))
        assert events[:message_at] == [None] * message_at
        assert events[message_at : message_at + 7] == [
            Event("header", message=header),
            Event("content", text="a"),
            None,
            None,
            None,
            Event("content", text="\U000e0041"),
            Event("message", text="", message=replace(header, content="a\U000e0041")),
        ]
        assert events[-1] == Event("header", message=Message("assistant", "", "final", "f"))
        assert [event for event in events[message_at + 7 : -1] if event is not None] == []
        assert parser.completion().error == f"token {len(ids)}: truncated inside message content"

    def test_the_end_of_a_message_gives_what_was_held_back(self, harmony):
        half = harmony.tokenizer.encode("\U000e0041")[:2]
        ids = [*tokens(harmony, "<|channel|>final<|message|>"), *half, harmony.stop_ids[0]]
        parser, events = stream(harmony, ids)
        assert events[1:] == [Event("message", text="\ufffd", message=Message("assistant", "\ufffd", "final"))]
        assert parser.completion() == harmony.parse_completion(ids)

    def test_an_error_is_said_once_and_ends_the_stream(self, harmony):
        parser, events = stream(harmony, tokens(harmony, "<|end|><|channel|>final<|message|>x<|return|>"))
        assert events == [Event("error", text="token 0: <|end|> inside a message header")]
        assert parser.completion() == Completion((), None, "token 0: <|end|> inside a message header")

    @given(messages=turns)
    @settings(deadline=None)
    def test_equals_the_parse_at_once(self, harmony, messages):
        ids = harmony.render_completion(messages)
        parser, events = stream(harmony, ids)
        assert parser.completion() == harmony.parse_completion(ids)
        check_events(events, parser.completion())
        assert [event.message for event in events if event.kind == "message"] == messages


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

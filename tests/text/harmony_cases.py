"""Conversations, turns and token lists that the Harmony tests draw from."""

from dataclasses import replace

from hypothesis import strategies as st

from nmoe.text.harmony import CHANNELS, CONTROL_TOKENS, ROLES, Harmony
from nmoe.text.streaming import Event, StreamParser
from nmoe.types import Message

LOOKALIKES = [*CONTROL_TOKENS, "<|", "|>", " to=functions.x", "assistant", "final", "\ufffd", "\u2028", "\x1c"]
contents = st.lists(st.sampled_from(LOOKALIKES) | st.text(max_size=8), max_size=8).map("".join)
words = (
    st.sampled_from(["functions.add", "json", "to=x", "a:b", "<|end|>", "ada"]) | st.text(min_size=1, max_size=6)
).filter(lambda word: word.split() == [word])
channels = st.sampled_from(CHANNELS)
speakers = st.builds(
    Message,
    role=st.sampled_from(ROLES[:4]),
    content=contents,
    channel=st.none() | channels,
    recipient=st.none() | words,
    name=st.none() | words,
    content_type=st.none() | words,
)
tools = st.builds(
    Message,
    role=st.just("tool"),
    content=contents,
    channel=st.none() | channels,
    recipient=words,
    name=words.filter(lambda word: word.partition(":")[0] not in ROLES[:4]),
    content_type=st.none() | words,
)
conversations = st.lists(speakers | tools, max_size=5)
spoken = st.builds(Message, st.just("assistant"), contents, channel=channels, content_type=st.none() | words)
turns = st.builds(
    lambda messages, recipient: [*messages[:-1], replace(messages[-1], recipient=recipient)],
    st.lists(spoken, min_size=1, max_size=4),
    st.none() | words,
)


def tokens(harmony: Harmony, text: str) -> list[int]:
    """The ids of `text` with its control tokens taken as such: how a test writes what a model may sample."""
    ids, rest = [], text
    while rest:
        start, control = min((rest.find(token) % (len(rest) + 1), token) for token in CONTROL_TOKENS)
        ids += harmony.tokenizer.encode(rest[:start])
        if start < len(rest):
            ids.append(harmony.tokenizer.special_id(control))
        rest = rest[start + len(control) :]
    return ids


def stream(harmony: Harmony, ids) -> tuple[StreamParser, list[Event]]:
    parser = StreamParser(harmony)
    events = [parser.feed(id_) for id_ in ids]
    return parser, [event for event in events if event is not None]

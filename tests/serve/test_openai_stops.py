"""Stop strings: the text before the first one, however the text was divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nmoe.engine.api import Delta
from nmoe.serve.openai.reading import Choice, texts
from nmoe.serve.openai.stops import Stops
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format

strings = st.text("ab\u00e9", max_size=30)


@given(strings, st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3), st.data(), st.booleans())
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str], data: st.DataObject, kept: bool) -> None:
    finder, said, at = Stops(stops, kept), "", 0
    while at < len(text):
        step = data.draw(st.integers(1, len(text) - at))
        said += finder.push(text[at : at + step])
        assert not any(stop in said for stop in stops) or (kept and finder.found), "nothing of a stop string goes out"
        at += step
    said += finder.flush()
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (said, finder.found) == (text, None)
        return
    end, _, first = min(ends)
    assert (said, finder.found) == (text[:end] if kept else text[: end - len(first)], first)


@pytest.mark.parametrize(
    ("sampled", "stop", "kept", "content"),
    [
        ("one\ntwo", "\n", False, "one"),
        ("one\n", "\n", True, "one\n"),
        ("one \n\n<tool_call>", "\n\n", False, "one "),
        ("one. \ntwo", ". \n", False, "one"),
        ("<think>a\n\nb</think>\n\none\n\ntwo", "\n\n", False, "one"),
    ],
)
def test_white_space_stops_at_its_own_token(
    tokenizer: Tokenizer, sampled: str, stop: str, kept: bool, content: str
) -> None:
    ids = [token for one in sampled for token in tokenizer.encode(one)]
    choice, pieces = Choice(0, chat_format(tokenizer).reader([]), Stops([stop], kept)), []
    while ids and not choice.stopped:
        pieces += choice.feed([Delta(ids.pop(0), 0.0, None)]).pieces
    assert (choice.stopped, texts(pieces, "content")) == (True, content)
    last = choice.feed([Delta(None, 0.0, "abort")])
    assert (last.pieces, last.finish, last.reason) == ([], "stop", stop)
    assert choice.tokens == sampled.rindex(stop) + len(stop), "nothing is sampled behind the stop string"

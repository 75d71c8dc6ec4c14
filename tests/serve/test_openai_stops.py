"""Stop strings: the text before the first one, however the text was divided."""

from hypothesis import given
from hypothesis import strategies as st

from nmoe.serve.openai.stops import Stops

texts = st.text("ab\u00e9", max_size=30)


@given(texts, st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3), st.data(), st.booleans())
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

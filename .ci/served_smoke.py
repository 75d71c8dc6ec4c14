"""Serves a run by `nmoe serve`, asks for what every client asks for, and has it drain:

python .ci/served_smoke.py RUN
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from served import serving

HI: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Sort: 4153"}], "temperature": 0}


def main(run: str) -> None:
    with serving(Path(run), "--threads", "1") as client:
        assert client.http.get("/health").json() == {"status": "ok"}
        assert [model["id"] for model in client.http.get("/v1/models").json()["data"]] == ["tiny"]
        whole = client.ask("/v1/chat/completions", **HI)
        (choice,) = whole["choices"]
        chunks = client.stream("/v1/chat/completions", **HI, stream_options={"include_usage": True})
        deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
        for part in ("content", "reasoning_content"):
            joined = "".join(delta.get(part) or "" for delta in deltas)
            assert joined == (choice["message"].get(part) or ""), f"{part}: {joined!r} streamed, {choice} whole"
        assert chunks[-1]["usage"] == whole["usage"]
        scored = {"prompt": "Sort: 4153", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        logprobs = client.ask("/v1/completions", model="tiny", **scored)["choices"][0]["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert all(value <= 0 for value in logprobs[1:])
        error = client.refusal("/v1/chat/completions", 404, **HI | {"model": "another"})
        assert error["code"] == "model_not_found", error
        print(f"{whole['usage']['completion_tokens']} tokens, whole and streamed: {json.dumps(choice['message'])}")
        # A request that runs when the signal comes is answered.
        answered = list[dict[str, Any]]()
        long = HI | {"ignore_eos": True, "max_tokens": 40, "n": 8}
        asked = threading.Thread(target=lambda: answered.append(client.ask("/v1/chat/completions", **long)))
        asked.start()
        while client.metric("nmoe_requests_open") < 1:
            assert asked.is_alive(), "it was answered before it was seen"
        client.process.send_signal(signal.SIGTERM)
        asked.join()
        assert len(answered[0]["choices"]) == 8
        assert client.process.wait(30) == 0
    print("drained")


if __name__ == "__main__":
    main(sys.argv[1])

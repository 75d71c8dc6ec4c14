"""An agent in one loop, with the package openai alone: the model may call `add` until it answers. Any server of OpenAI's API will
do:

nmoe serve RUN_OR_CHECKPOINT --served-model-name adder
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/tool_loop.py adder "What is 2 + 3?"
"""

import json
import sys

from openai import OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TURNS = 4


def answer(client: OpenAI, model: str, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[ADD], temperature=0).choices[0]
        messages.append(reply.message.model_dump(exclude_none=True))
        if reply.finish_reason != "tool_calls":
            return reply.message.content
        for call in reply.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            print(f"add({arguments})", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])})
    raise SystemExit(f"no answer after {TURNS} turns")


if __name__ == "__main__":
    print(answer(OpenAI(), *sys.argv[1:]))

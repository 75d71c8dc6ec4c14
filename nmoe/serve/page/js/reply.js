// Builds an assistant's message from the chunks of a streamed reply.
//
// A token is [id, text, logprob, [[id, text, logprob] of its alternatives], experts by layer or null].

const round = (logprob) => Math.round(logprob * 1e4) / 1e4;

function textOf(entry) {
  const hidden = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(entry.token);
  return hidden && entry.bytes?.length ? `‹${hidden[1].replaceAll("\\x", " ").trim()}›` : entry.token;
}

export class Reply {
  /** `kept` are the tokens that the reply goes on from: the server sends their text again, but not the tokens. */
  constructor(node, kept = []) {
    this.node = node;
    this.kept = kept;
    this.started = performance.now();
    this.first = this.last = 0;
    this.begun = false;
  }

  add(chunk) {
    const node = this.node;
    if (!this.begun) {
      this.begun = true;
      Object.assign(node, { content: "", reasoning: "", calls: [], tokens: [...this.kept], finish: null, usage: null, error: null });
    }
    if (chunk.model) node.model = chunk.model;
    if (chunk.usage) node.usage = [chunk.usage.prompt_tokens, chunk.usage.completion_tokens];
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if (content) node.content += content;
    if (reasoning) node.reasoning += reasoning;
    for (const call of calls ?? []) this.#call(call);
    if (choice.token_ids?.length) {
      this.last = performance.now();
      this.first ||= this.last;
    }
    for (const entry of choice.logprobs?.content ?? []) node.tokens.push(this.#token(entry));
    if (choice.experts) choice.experts.forEach((layers, at) => (node.tokens[this.kept.length + at] ?? [])[4] = layers);
    if (choice.expert_count) node.experts = choice.expert_count;
    if (choice.finish_reason) {
      node.finish = choice.finish_reason;
      node.reason = node.finish === "length" && choice.stop_reason ? String(choice.stop_reason) : null;
    }
    this.count = node.tokens.length - this.kept.length;
    if (this.count > 1) node.rate = round((1000 * (this.count - 1)) / Math.max(this.last - this.first, 1));
    if (this.first) node.wait = Math.round(this.first - this.started);
  }

  #call({ index, id, function: called = {} }) {
    const call = (this.node.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = id;
    if (called.name) call.name = called.name;
    call.arguments += called.arguments ?? "";
  }

  #token(entry) {
    const others = (entry.top_logprobs ?? []).map((other) => [other.token_id, textOf(other), round(other.logprob)]);
    return [entry.token_id, textOf(entry), round(entry.logprob), others, null];
  }
}

/** The tokens up to number `at`, with `other` (one of its alternatives) in its stead. */
export function instead(tokens, at, other) {
  return [...tokens.slice(0, at), [...other, tokens[at][3], null]];
}

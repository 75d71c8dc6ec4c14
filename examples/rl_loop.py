"""Reinforcement learning on the four primitives: `generate`, `forward_backward`, `optim_step` and `publish`.

    python examples/rl_loop.py              a few seconds on a core

A new model over bytes reads "abc:" or "123:" and earns the share of its 16 tokens that are small letters, or digits. An
advantage is the reward less the mean of its group, the loss is REINFORCE's. The reward rises from 0.07 to above 0.9.
"""

# Shapes: P prompts, G samples of each, B = P x G sequences of L + 1 tokens, T = B x L predicting positions.

import asyncio

import torch

import nmoe
from nmoe.config.tables.model import OptimizerSection
from nmoe.engine.api import Request
from nmoe.learner.batch import Batch
from nmoe.model.config import ModelConfig
from nmoe.model.transformer import Transformer
from nmoe.types import Sampling

TASKS = {"abc:": "abcdefghijklmnopqrstuvwxyz", "123:": "0123456789"}
SHAPE = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 16, "intermediate_size": 64}
GROUP, TOKENS = 32, 16


def reinforce(outputs, scored):
    return -(scored.weights_N * scored.advantages_N * outputs.logprobs_N).sum(), {}


async def sample(engine, prompts, seed):
    requests = [Request(ids, GROUP, Sampling(TOKENS, seed=seed), str(ids)) for ids in prompts]
    return await asyncio.gather(*map(engine.generate, requests))


def train(steps=80, seed=0):
    tokenizer = nmoe.Tokenizer.train((), 264)  # every byte is a token
    model = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, context_tokens=64, **SHAPE)).initialize(seed)
    learner = nmoe.Learner(model, OptimizerSection(learning_rate=1e-2), steps, tokens_per_microbatch=4096)
    engine = nmoe.NativeEngine(model, max_sequences=len(TASKS) * GROUP)
    prompts_PL = torch.tensor([tokenizer.encode(text) for text in TASKS])
    wanted = [torch.tensor(tokenizer.encode(letters)) for letters in TASKS.values()]
    for step in range(steps):
        groups = engine.run(sample(engine, map(tuple, prompts_PL.tolist()), seed * steps + step))
        completions_PGL = torch.tensor([[one.token_ids for one in group] for group in groups])
        rewards_PG = torch.stack([fits.float().mean(dim=1) for fits in map(torch.isin, completions_PGL, wanted)])
        advantages_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
        tokens_BL = torch.cat([prompts_PL.repeat_interleave(GROUP, dim=0), completions_PGL.flatten(0, 1)], dim=1)
        count, length = len(tokens_BL), tokens_BL.shape[1] - 1  # the last token predicts nothing
        scored_T = (torch.arange(length) >= length - TOKENS).repeat(count)  # the next token is the completion's
        columns = (tokens_BL[:, :-1].flatten(), tokens_BL[:, 1:].flatten(), scored_T, scored_T / scored_T.sum())
        batch = Batch((length,) * count, *columns, advantages_PG.flatten().repeat_interleave(length))
        learner.forward_backward(batch, reinforce)
        learner.optim_step()
        learner.publish(engine)
        yield float(rewards_PG.mean())


if __name__ == "__main__":
    print("share of the kind asked for:", *(f"{reward:.2f}" for reward in list(train())[::10]))

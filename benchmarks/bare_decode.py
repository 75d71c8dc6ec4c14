"""The floor: the decode loop that a competent user writes in plain PyTorch for one batch of equal lengths.

No scheduler, no stop ids, no other lengths, no rows that come and go: what an engine adds to this is its cost, and what it does
better than this is its own.
"""

# Shapes: B sequences, T new tokens each, L positions so far, P positions the cache holds, Y layers, H query heads, J key-value
# heads, G = H / J, C head width, D width, E experts, K chosen experts, F expert width, R = B * T * K routed rows, V vocabulary.

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F
from decode_workload import NEW_TOKENS, PROMPT_TOKENS, Dtype, Generated, Run, make_prompts
from machine import Stopwatch
from safetensors.torch import load_file
from side import answer
from torch import Tensor

_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class BareDecoder:
    """Qwen3, dense or mixture-of-experts, over a dense cache made once per number of sequences."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self.config = config = json.loads((directory / "config.json").read_text())
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
        self.embedding_VD, self.norm_D = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        self.layers = [
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in (f"model.layers.{layer}." for layer in range(config["num_hidden_layers"]))
        ]
        for layer in self.layers:
            layer["qkv"] = torch.cat([layer[f"self_attn.{n}_proj.weight"] for n in "qkv"])
            if self.experts:
                each = [f"mlp.experts.{expert}." for expert in range(self.experts)]
                layer["gate_up"] = torch.stack(
                    [torch.cat([layer[e + "gate_proj.weight"], layer[e + "up_proj.weight"]]) for e in each]
                )
                layer["down"] = torch.stack([layer[e + "down_proj.weight"] for e in each])
            else:
                layer["gate_up"] = torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
                layer["down"] = layer["mlp.down_proj.weight"]
        width = config["head_dim"]
        angles = torch.outer(
            torch.arange(PROMPT_TOKENS + NEW_TOKENS),
            config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, width, 2) / width),
        )
        angles_P1C = torch.cat([angles, angles], -1).unsqueeze(1)
        self.cos_P1C, self.sin_P1C = angles_P1C.cos().to(dtype), angles_P1C.sin().to(dtype)
        self.caches: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def experts(self) -> int:
        return self.config.get("num_local_experts", 0)

    def cache(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[Y, B * J, P, C]`."""
        if sequences not in self.caches:
            rows = sequences * self.config["num_key_value_heads"]
            shape = (len(self.layers), rows, PROMPT_TOKENS + NEW_TOKENS, self.config["head_dim"])
            dtype = self.embedding_VD.dtype
            self.caches[sequences] = (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
        return self.caches[sequences]

    def last_logits(self, ids_BT: Tensor, start: int) -> Tensor:
        """fp32 logits `[B, V]` after tokens that take the positions from `start` on."""
        eps = self.config["rms_norm_eps"]
        keys_YNPC, values_YNPC = self.cache(ids_BT.shape[0])
        x_BTD = F.embedding(ids_BT, self.embedding_VD)
        for layer, keys_NPC, values_NPC in zip(self.layers, keys_YNPC, values_YNPC, strict=True):
            y_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:], layer["input_layernorm.weight"], eps)
            x_BTD = x_BTD + self.attention(layer, y_BTD, start, keys_NPC, values_NPC)
            y_BTD = F.rms_norm(x_BTD, x_BTD.shape[-1:], layer["post_attention_layernorm.weight"], eps)
            x_BTD = x_BTD + (self.mixture(layer, y_BTD) if self.experts else self.dense(layer, y_BTD))
        x_BD = F.rms_norm(x_BTD[:, -1], x_BTD.shape[-1:], self.norm_D, eps)
        return F.linear(x_BD, self.embedding_VD).float()

    def attention(
        self, layer: dict[str, Tensor], y_BTD: Tensor, start: int, keys_NPC: Tensor, values_NPC: Tensor
    ) -> Tensor:
        """Products over the cache's views; N = B * J rows of it, each read by G query heads."""
        config = self.config
        heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        batch, new, end = y_BTD.shape[0], y_BTD.shape[1], start + y_BTD.shape[1]
        qkv = F.linear(y_BTD, layer["qkv"]).view(batch, new, heads + 2 * kv_heads, width)
        q_BTHC, k_BTJC, v_BTJC = qkv.split([heads, kv_heads, kv_heads], 2)
        q_BTHC = self.turn(
            F.rms_norm(q_BTHC, (width,), layer["self_attn.q_norm.weight"], config["rms_norm_eps"]), start
        )
        k_BTJC = self.turn(
            F.rms_norm(k_BTJC, (width,), layer["self_attn.k_norm.weight"], config["rms_norm_eps"]), start
        )
        keys_NPC[:, start:end] = k_BTJC.transpose(1, 2).reshape(-1, new, width)
        values_NPC[:, start:end] = v_BTJC.transpose(1, 2).reshape(-1, new, width)
        q_NSC = q_BTHC.transpose(1, 2).reshape(batch * kv_heads, -1, width)  # S = G * T
        scores_NSL = torch.bmm(q_NSC, keys_NPC[:, :end].transpose(1, 2)).mul_(width**-0.5)
        if new > 1:
            later_TL = torch.ones(new, end, dtype=torch.bool).triu_(start + 1)
            scores_NSL.view(-1, new, end).masked_fill_(later_TL, float("-inf"))
        o_NSC = torch.bmm(scores_NSL.softmax(-1), values_NPC[:, :end])
        o_BTD = o_NSC.view(batch, heads, new, width).transpose(1, 2).reshape(batch, new, -1)
        return F.linear(o_BTD, layer["self_attn.o_proj.weight"])

    def turn(self, x_BTNC: Tensor, start: int) -> Tensor:
        """Rotary embedding."""
        end = start + x_BTNC.shape[1]
        first, second = x_BTNC.chunk(2, -1)
        return x_BTNC * self.cos_P1C[start:end] + torch.cat([-second, first], -1) * self.sin_P1C[start:end]

    def dense(self, layer: dict[str, Tensor], y_BTD: Tensor) -> Tensor:
        return F.linear(_swiglu(F.linear(y_BTD, layer["gate_up"])), layer["down"])

    def mixture(self, layer: dict[str, Tensor], y_BTD: Tensor) -> Tensor:
        """Rows sorted by expert, then one expert after another."""
        chosen = self.config["num_experts_per_tok"]
        y_ND = y_BTD.flatten(0, 1)
        scores_NE = F.linear(y_ND, layer["mlp.gate.weight"]).float().softmax(-1)
        weights_NK, expert_NK = scores_NE.topk(chosen, -1)
        weights_R1 = (weights_NK / weights_NK.sum(-1, keepdim=True)).to(y_ND.dtype).view(-1, 1)
        order_R = expert_NK.flatten().argsort()
        counts = torch.bincount(expert_NK.flatten(), minlength=self.experts).tolist()
        rows = y_ND[order_R // chosen].split(counts)
        out_RD = torch.cat(
            [
                F.linear(_swiglu(F.linear(part, gate_up)), down)
                for part, gate_up, down in zip(rows, layer["gate_up"], layer["down"], strict=True)
            ]
        )
        out_ND = torch.zeros_like(y_ND).index_add_(0, order_R // chosen, out_RD * weights_R1[order_R])
        return out_ND.view_as(y_BTD)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _sample(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens by inverse CDF and their logprobs, `[B]` each. `torch.multinomial` takes 25 times as long."""
    mass_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).exp_()
    cumulative_BV = mass_BV.cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cumulative_BV, torch.rand_like(total_B1) * total_B1).clamp_(
        max=logits_BV.shape[-1] - 1
    )
    return tokens_B1.squeeze(-1), (mass_BV.gather(-1, tokens_B1) / total_B1).log().squeeze(-1)


class BareDecode:
    """One decoder per dtype, loaded when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.decoders: dict[Dtype, BareDecoder] = {}

    @torch.inference_mode()
    def generate(self, run: Run) -> Generated:
        if run.dtype not in self.decoders:
            self.decoders[run.dtype] = BareDecoder(self.directory, _DTYPES[run.dtype])
        decoder, prompts = self.decoders[run.dtype], make_prompts(run.sequences, run.seed)
        torch.manual_seed(run.seed)
        with Stopwatch() as watch:
            ids_BT, start = torch.tensor(prompts), 0
            token_ids_BN = torch.empty(run.sequences, run.new_tokens, dtype=torch.int64)
            logprobs_BN = torch.empty(run.sequences, run.new_tokens)
            for step in range(run.new_tokens):
                token_ids_BN[:, step], logprobs_BN[:, step] = _sample(decoder.last_logits(ids_BT, start))
                start += ids_BT.shape[1]
                ids_BT = token_ids_BN[:, step : step + 1]
            token_ids, logprobs = token_ids_BN.tolist(), logprobs_BN.tolist()
        return Generated(watch.seconds, watch.cpu_seconds, watch.others_cores, token_ids, logprobs)


def serve(connection: Connection, directory: Path) -> None:
    """Answers what is asked about the checkpoint in `directory`."""
    answer(connection, BareDecode(directory).generate)

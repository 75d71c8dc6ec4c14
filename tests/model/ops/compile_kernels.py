"""Compiles every Triton kernel for the chip of this compute capability (90 is Hopper, 100 Blackwell), with no GPU there, and prints
what each came to as JSON lines.

The interpreter knows nothing of the compiler's rules; this does: Triton's front end, LLVM and ptxas, which come in its package.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nmoe.model.ops.attention import AttentionLayer
from nmoe.model.ops.triton import elementwise, paged_attention, routing


class Chip:
    """What a driver is asked before a launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_instead(kernel: JITFunction, grid: Any) -> Any:
    def compile_(*arguments: Any, **options: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        ptx = compiled.asm["ptx"]
        row = {"kernel": f"{kernel.__module__.rsplit('.', 1)[1]}.{kernel.__name__}", "case": CASE}
        row |= {"shared": compiled.metadata.shared, "tensor_cores": "mma" in ptx, "async_copies": "cp.async" in ptx}
        row |= {"target": ptx.split(".target ")[1].split()[0], "bytes": len(compiled.asm["cubin"])}
        print(json.dumps(row), file=sys.stdout)

    return compile_


CASE = ""
PAGED = {
    "qwen3": (16, 8, 128, 128, 0, False, torch.bfloat16),
    "gpt-oss": (64, 8, 64, 64, 128, True, torch.bfloat16),
    "deepseek": (16, 16, 192, 128, 0, False, torch.bfloat16),
    "width 80": (16, 8, 80, 80, 0, True, torch.float16),
    "fp32": (16, 8, 128, 128, 0, True, torch.float32),
    "fp32 wide": (16, 8, 256, 256, 0, False, torch.float32),
}


def main() -> None:
    global CASE
    triton.runtime.driver.set_active(Chip(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_instead
    for blocks in (8, 80):  # without and with joining
        for name, (heads, kv_heads, width, value_width, window, sinks, dtype) in PAGED.items():
            CASE = f"{name}, {blocks} blocks"
            paged_attention.paged_attention_triton(
                AttentionLayer(0, 0.1, window, torch.zeros(heads, dtype=dtype) if sinks else None),
                torch.zeros(3, heads, width, dtype=dtype),
                torch.zeros(9, kv_heads, 16, width, dtype=dtype),
                torch.zeros(9, kv_heads, 16, value_width, dtype=dtype),
                torch.zeros(3, blocks, dtype=torch.int32),
                torch.ones(3, dtype=torch.int32),
            )
    for limit in (0.0, 7.0):
        CASE = f"limit {limit}"
        gate_up = torch.zeros(4, 1536, dtype=torch.bfloat16)
        elementwise.swiglu_forward(gate_up, limit)
        elementwise.swiglu_backward(gate_up[:, :768], gate_up, limit)
    CASE = "8 of 128 experts"
    rows, picks = torch.zeros(16, 2048, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.int64)
    for weights in (None, torch.zeros(2, 8)):
        routing.sum_rows(rows, weights, picks)
    routing.spread_rows(rows[:2], rows, torch.zeros(2, 8), picks)
    CASE = "qwen3"
    elementwise.rotate_triton(
        torch.zeros(3, 32, 128, dtype=torch.bfloat16)[:, :24], torch.zeros(3, 1, 64), torch.zeros(3, 1, 64)
    )


if __name__ == "__main__":
    main()

"""A vLLM plugin by which a running server takes new weights from nmoe's learner.

A server started with `--weight-transfer-config '{"backend": "nmoe"}'` has it.
"""


def register() -> None:
    """Names the backend to vLLM, which calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "nmoe" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("nmoe", "nmoe_vllm.receiver", "Receiver")

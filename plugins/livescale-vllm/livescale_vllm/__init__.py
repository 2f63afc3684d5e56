"""vLLM's entry point of the plug-in: the load format `livescale`, and a weight-transfer backend of
that name.

vLLM calls `register` in each of its processes, before anything else: nothing is started here, and
little is imported.
"""

from __future__ import annotations

NAME = "livescale"


def register() -> None:
    """Let vLLM know both. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from livescale_vllm.loader import LiveScaleLoader

    register_model_loader(NAME)(LiveScaleLoader)
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            NAME, "livescale_vllm.transfer", "LiveScaleEngine"
        )

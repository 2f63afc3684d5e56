"""On CPUs vLLM copies weights into layouts of its kernels: those of linears unless it is kept from
doing so, as parameters that are views of an arena must stay as they are; those of experts always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def plain_linears(*, is_on: bool) -> Iterator[None]:
    """Engines that are made meanwhile compute linears with torch, from the weights as they lie."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as utils

    if not is_on:
        yield
        return
    had_onednn, check = ops._supports_onednn, utils.check_cpu_sgl_kernel
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = _packs_nothing
    try:
        yield
    finally:
        ops._supports_onednn, utils.check_cpu_sgl_kernel = had_onednn, check


def forget_packed_experts(model: torch.nn.Module) -> None:
    """To be called before experts are loaded again. vLLM 0.32.0 packs those of a CPU only when it
    makes their kernel, and takes what comes later for packed."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
        if is_on_cpu and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_head(model: Any) -> None:
    """To be called when the embedding was loaded again. The head gets no weights of its own then,
    so that vLLM 0.32.0 goes on with what it packed before."""
    # Gemma2 has no head of its own.
    head = getattr(model, "lm_head", model.model.embed_tokens)
    head.quant_method.process_weights_after_loading(head)


def _packs_nothing(n: int, k: int, dtype: object) -> bool:
    return False

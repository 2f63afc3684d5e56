"""The model loader of `--load-format livescale`: layers go into vLLM's own loaders as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from livescale.common.errors import UserError
from livescale_vllm.guests import holder, let_go, read_terms, tensors


class LiveScaleLoader(BaseModelLoader):
    """One per engine process. Config and tokenizer are those of the directory that vLLM has."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        given = load_config.model_loader_extra_config or {}
        self._terms = read_terms(given, "model_loader_extra_config")

    def download_model(self, model_config: Any) -> None:
        """The parameters are the only thing that is fetched, by each process for itself."""

    def create_model(
        self, vllm_config: Any, model_config: Any, prefix: str = ""
    ) -> torch.nn.Module:
        # The first bytes come while vLLM builds its modules.
        holder(self._terms, model_config)
        return super().create_model(vllm_config, model_config, prefix)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        if model_config.quantization is None and loaded is not None:
            missing = sorted({name for name, _ in model.named_parameters()} - loaded)
            if missing:
                raise UserError(f"the pool's model lacks {', '.join(missing[:3])} ({len(missing)})")

    def get_all_weights(
        self, model_config: Any, model: torch.nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """What vLLM asks for, at the first load and to load again. Raises UserError."""
        guest = holder(self._terms, model_config)
        try:
            yield from tensors(guest, model_config)
        except BaseException:
            let_go(self._terms).kill()
            raise
        if not self._terms.keep:
            let_go(self._terms).leave()

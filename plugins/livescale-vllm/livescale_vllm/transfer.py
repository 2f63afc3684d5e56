"""The weight-transfer backend `livescale`: an engine that runs gets the parameters of a model that
has the shape of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from livescale.runtime.guest.guest_child import GuestChild
from livescale.runtime.guest.guest_messages import GuestTerms
from livescale.vllm_engine.packing import forget_packed_experts, pack_tied_head
from livescale_vllm.guests import open_guest, read_terms, tensors


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The keys of `--model-loader-extra-config`, read."""

    terms: GuestTerms


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The name in the pool of the model that is wanted now (empty: that of the first terms)."""

    model: str = ""


class LiveScaleEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Of one rank. It stays a holder of what came last, if its terms say so."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _terms: GuestTerms | None = None
    _guest: GuestChild | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        """Raises UserError, which names the key."""
        return InitInfo(read_terms(init_dict, "init_info"))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._terms = init_info.terms

    def start_weight_update(self) -> None:
        forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises UserError. What came before stays in vLLM then, layer by layer."""
        assert self._terms is not None, "vLLM calls init_weight_transfer_engine first"
        terms = self._terms
        if update_info.model:
            terms = msgspec.structs.replace(terms, model=update_info.model)
        self.shutdown()
        self._guest = guest = open_guest(terms, self.model_config)
        try:
            self.model.load_weights(tensors(guest, self.model_config))
        except BaseException:
            self.shutdown()
            raise
        if not terms.keep:
            self._guest = None
            guest.leave()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        is_tied = getattr(self.model_config.hf_text_config, "tie_word_embeddings", False)
        if is_tied and self.device.type == "cpu":
            pack_tied_head(self.model)

    def shutdown(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            guest.kill()

"""The process that prepares one model for publication in a running pool, and ends.

Hashing every byte of a model takes seconds: it must not hold up decisions.
"""

from __future__ import annotations

from livescale.common.settings import ConfigError
from livescale.engine.base.errors import ModelError
from livescale.runtime.layout.vllm_python import check_vllm
from livescale.runtime.layout.worker_python import WorkerPythonError
from livescale.runtime.models.catalog import prepare_model
from livescale.runtime.models.module_check import ModuleCheck
from livescale.runtime.wire.boot import PrepareBoot, Status, read_boot, report


def main() -> None:
    """Read the model and tell its catalog entry, or what is wrong with it."""
    boot = read_boot(PrepareBoot)
    try:
        with ModuleCheck(boot.pool, (boot.model,)) as check:
            entry = prepare_model(boot.pool, boot.model, check)
        check_vllm(boot.pool, (entry,))
    except (ModelError, ConfigError, WorkerPythonError) as error:
        report(Status(fatal=str(error)))
    else:
        report(Status(entry=entry))

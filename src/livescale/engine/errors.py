"""The error that a model's directory, file or tensor can cause. Nothing else lives here."""

from __future__ import annotations

from livescale.common.errors import UserError


class ModelError(UserError):
    """A model cannot be read or run; the message names the directory, file or tensor and why."""

"""The error that a model's directory, file or tensor can cause. Nothing else lives here."""


class ModelError(Exception):
    """A model cannot be read or run; the message names the directory, file or tensor and why."""

"""LiveScale: many language models on one pool, scaled by multicasting their parameters."""

__version__ = "0.1.0"

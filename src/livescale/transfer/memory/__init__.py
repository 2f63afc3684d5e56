"""The bytes of models in memory, and how they are checked."""

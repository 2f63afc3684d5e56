"""The OpenAI-compatible HTTP front: text in, tokens out.

It knows the rest of LiveScale only through `backend.Backend`. It must not import torch,
transformers, or any floor but the ground (`livescale.values.types`).
"""

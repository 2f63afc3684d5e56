"""The model side: files, layer-wise execution, KV cache and the greedy oracle.

torch and transformers are imported here and nowhere else. `model_files` and `make` do without
them, so that processes which only describe models stay small; this file imports nothing.
"""

"""How fast engines compute, load and start: ours, vLLM, transformers."""

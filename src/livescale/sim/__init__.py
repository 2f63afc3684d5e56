"""The twin world: production controller and Batcher over virtual clock, network and workers."""

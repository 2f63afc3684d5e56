"""One instance alone: requests, their KV blocks, and the next Run."""

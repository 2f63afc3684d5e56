"""vLLM as what computes for a worker: it schedules, runs and samples by itself, in this process.

Imported in an interpreter that has vLLM only (`worker_python`), but for `versions` and `check`,
which import nothing of it.
"""

"""QUART's formulas, each by itself: variation, queueing, smoothing, correction."""

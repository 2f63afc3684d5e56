"""What happened, written down: run records, scale events, timelines. No decisions."""

"""What is asked of a pool and when: traces, arrivals and the objectives of answers."""

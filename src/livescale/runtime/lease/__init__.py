"""Which of several controllers acts: a lease, who keeps it, and who waits for it."""

"""What a batcher is asked and answers, and the messages between instances."""

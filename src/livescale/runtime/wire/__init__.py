"""What the processes of a pool say to each other, and how: messages, doors, heartbeats."""

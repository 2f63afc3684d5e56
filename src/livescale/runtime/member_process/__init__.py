"""The processes of workers and host agents: the Member in the real world."""

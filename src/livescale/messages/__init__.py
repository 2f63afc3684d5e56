"""Messages as values: controller events and commands, and what travels on the sockets."""

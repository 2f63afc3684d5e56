"""What goes over a connection of the data plane, and what a carrier must do."""

"""Members and hosts that join, leave and are lost; leases."""

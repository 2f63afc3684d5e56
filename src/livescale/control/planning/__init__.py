"""Who can send a model to whom: plans, loads under way, copies, spares."""

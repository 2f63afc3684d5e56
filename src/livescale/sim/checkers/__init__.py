"""What must hold in every simulated world, stated from outside: one property per checker."""

"""A loading instance and its source alone, in virtual time: orders, protocol, the best split."""

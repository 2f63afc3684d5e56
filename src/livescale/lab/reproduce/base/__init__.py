"""Claims as values, the loads and models that they are tried with, figures."""

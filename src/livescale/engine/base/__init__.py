"""Results of Runs, errors, and the cores that Runs may use."""

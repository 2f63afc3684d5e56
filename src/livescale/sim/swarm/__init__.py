"""Random worlds with faults: a seed draws one, and every rule is checked."""

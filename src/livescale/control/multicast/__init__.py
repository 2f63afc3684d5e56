"""Pure multicast planning: sources and targets in, ScalePlans out."""

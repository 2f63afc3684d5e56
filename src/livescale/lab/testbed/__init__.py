"""Hosts emulated on one machine: network namespaces, switches and links with a rate. No pool."""

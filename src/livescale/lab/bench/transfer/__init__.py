"""Bytes on the way: multicast, receiving beside computing, packed parcels."""

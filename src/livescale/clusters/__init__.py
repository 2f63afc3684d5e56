"""Devices, hosts and links of a cluster; cluster files that come along; profiles of devices."""

"""Simulated hosts: agents, memory, disks and the network between them."""

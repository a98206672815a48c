"""Benchmark programs; each prints JSON with the hardware and the versions it ran on."""

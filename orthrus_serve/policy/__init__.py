"""Decisions as pure functions: no clock, no socket, no GPU, no framework."""

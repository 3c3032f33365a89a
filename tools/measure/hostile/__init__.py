"""Hostile input for `fuzz.py`, made by generators with seeds, and the clients that send it."""

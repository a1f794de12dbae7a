"""Neighbours: one file each for a library that loads, trains or serves models in objects of its own."""

"""Stores a pruned model as a small file. How the zeros came about does not matter."""

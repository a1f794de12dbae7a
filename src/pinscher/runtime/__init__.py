"""A pruned model made fast on a CPU."""

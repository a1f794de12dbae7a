"""A pruned model as a small file. Knows nothing of how its zeros came about."""

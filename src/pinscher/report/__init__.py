"""Reads run folders and checkpoints, and shows what pruning did."""

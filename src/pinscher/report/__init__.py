"""Reads run folders and shows what pruning did, on a page and in figures."""

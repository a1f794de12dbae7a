"""What pruning did: reads run folders, and draws them."""

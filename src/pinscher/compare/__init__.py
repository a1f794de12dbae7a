"""Many runs: methods × tasks × sparsities × seeds, and their table."""

# Settings of a run that the comparison itself decides in every cell.
DECIDED = ("sparsity", "seed", "output", "overwrite", "recipe", "target_size", "export", "baseline")

"""Analyses any checkpoint: its sparsity, its pattern, and the size it would have when stored."""

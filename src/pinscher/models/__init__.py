"""Everything about models and their families. Any room may import it; it imports torch lazily or not at all."""

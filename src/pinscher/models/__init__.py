"""What there is to know about models. Everyone may import it; it imports torch lazily or not at all."""

"""Messages that are cut: what that was estimated to do, and what it does."""

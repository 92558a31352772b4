"""What is cut or taken away: what that was estimated to do, and what it does."""

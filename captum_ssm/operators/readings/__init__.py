"""What methods take out of operators: states one by one, their factors, and tiles of their rows."""

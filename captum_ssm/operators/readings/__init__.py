"""What methods take out of operators: how outputs follow coefficients, states one by one and
their factors, and tiles of rows."""

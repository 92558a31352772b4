"""What tests of several folders share, beside oracles and models."""

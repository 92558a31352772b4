"""Small real models with random parameters, and packages for GPUs made to run on the CPU."""

"""Inside a model: features of its layers, and which of them an answer came about through."""

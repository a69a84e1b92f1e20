"""Load a transformers model and route its attention into a paged backend."""

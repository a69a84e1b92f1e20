"""Fused decoder layers: a loaded transformers model rewritten so that a decode step is few kernels."""

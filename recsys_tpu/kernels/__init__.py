"""Embedding kernels: pooled lookup, fused optimizer update, exchanges between chips."""

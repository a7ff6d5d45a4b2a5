"""Embedding tables: host-side preparation of ids, and table stacks with fused optimizers."""

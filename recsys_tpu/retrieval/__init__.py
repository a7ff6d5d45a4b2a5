"""Retrieval: sampled softmax, exact ranking, export, indexes and serving."""

"""Exchanges of pooled embeddings and of their gradients between chips, as kernels that write into peers' HBM.

reference       the same operations by XLA's collectives
api             all_to_all and ragged_all_to_all for JAX programs, with gradients
direct          one mesh axis: HBM to the peer's HBM
coded           one mesh axis: scaled, and bfloat16 on the wire
parts, lines    peers, barrier and copies; payloads as lines of 128 lanes
"""

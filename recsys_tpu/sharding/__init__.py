"""Sharding of embedding tables over ranks."""

"""Recommendation models on TorchRec collections; they know nothing of devices or ranks."""

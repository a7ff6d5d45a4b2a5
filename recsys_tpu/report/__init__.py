"""A page about a finished run: results, curves, config, data, time, beside published numbers."""

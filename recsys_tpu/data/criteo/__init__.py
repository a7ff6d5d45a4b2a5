"""Criteo click logs (Kaggle and 1TB), from tab-separated text to Parquet files of ids.

Run as ``python -m recsys_tpu.data.criteo preprocess --help``.
"""

"""Prices in seconds of matmuls, attention, transfers and steps, by the numbers of a cluster file; `forecast.py`
computes money. Torch-free.
"""

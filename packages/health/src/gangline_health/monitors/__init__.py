"""Monitors of `health=monitors`: one module per monitor, and helpers."""

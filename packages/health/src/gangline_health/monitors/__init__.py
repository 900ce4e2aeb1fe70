"""Monitors of `health=on`: one module for each thing that is watched."""

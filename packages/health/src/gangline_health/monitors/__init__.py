"""Monitors of `health=monitors`: one module for each thing that is watched."""

"""Configurations shipped as YAML."""

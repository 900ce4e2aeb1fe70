"""What ships as YAML."""

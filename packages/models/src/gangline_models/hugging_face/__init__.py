"""Between a config.json and the options of a family."""

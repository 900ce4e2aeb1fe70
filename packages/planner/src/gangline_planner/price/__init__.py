"""From shapes and bytes to seconds, with the numbers of a cluster file. Torch-free arithmetic."""

"""What each rank does: build, loop, end."""

"""The parts that a run is made of where nothing else is chosen."""

"""Ways to a longer context by slower rotation: the group `model/rope`, one file each."""

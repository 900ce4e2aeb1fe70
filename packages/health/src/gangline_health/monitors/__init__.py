"""What finds: one module for each thing that is watched."""

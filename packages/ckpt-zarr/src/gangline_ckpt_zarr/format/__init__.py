"""What a checkpoint is on disk: pure functions of shapes and cuts, without torch and without reading a byte."""

"""On-disk format of a checkpoint: pure functions of shapes and layouts, without torch and without reading a byte."""

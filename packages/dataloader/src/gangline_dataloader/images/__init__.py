"""Images with texts from WebDataset tar files, decoded and augmented by NVIDIA DALI; pixels in `Batch.extra`."""

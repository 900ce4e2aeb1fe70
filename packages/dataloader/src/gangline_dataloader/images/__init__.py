"""Images with texts, out of WebDataset's tar files: decoded and augmented by NVIDIA DALI, pixels in `Batch.extra`."""

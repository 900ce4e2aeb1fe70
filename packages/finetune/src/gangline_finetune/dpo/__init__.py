"""Direct preference optimization (DPO; Rafailov et al., arXiv 2305.18290): pairs of answers as data, and their loss."""

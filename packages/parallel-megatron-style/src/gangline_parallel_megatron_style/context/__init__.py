"""Context parallelism: attention over sequences that are split over ranks. Ring attention (Liu et al., arXiv
2310.01889) passes keys and values from rank to rank; Ulysses (Jacobs et al., arXiv 2309.14509) exchanges tokens for
heads.
"""

"""Token stores behind a URL: whole shards, fetched in large ranges into a bounded cache on disk, mapped from there."""

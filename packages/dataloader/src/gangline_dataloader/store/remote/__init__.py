"""Remote token stores, behind a URL: shards are fetched in large ranges into a bounded disk cache and mapped there."""

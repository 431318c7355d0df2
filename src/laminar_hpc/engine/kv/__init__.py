"""Migration of a request's KV cache: its pages gathered into checksummed chunks, moved, and scattered into
another engine's pool."""

"""The adapter of SGLang: all that this system knows of it. plugin/ runs inside its processes."""

"""The model files that an engine imports at its start (SGLANG_EXTERNAL_MODEL_PACKAGE), in place of the 200
that SGLang would.

An architecture that has no file here still works: SGLang then imports its own models, which takes some ten
seconds longer.
"""
